# SPDX-License-Identifier: Apache-2.0
"""/tokenize, /detokenize and /tokenizer_info, in the shapes that vLLM gave them."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from metrale_jax.core.errors import RequestError, shown
from serving.core.calls import DetokenizeCall, Prompt, TokenizeCall
from serving.http.answers import body_faults, known_only, switch, without
from serving.http.bodies import text_field
from serving.http.chat_plan import plan_chat, template_variables
from serving.http.chat_schemas import CHAT_BODY
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer, post
from serving.http.errors import with_fields
from serving.http.operations import Operation
from serving.http.schemas import BOOLEAN, MESSAGES, MODEL, TOKENS, any_of, body_of, integer, nullable, object_of, text
from serving.openai_body import chat_messages, checked_prompt

FORM = with_fields({"token_ids": "tokens"})
OF_TEXT = {"model": MODEL, "prompt": text(), "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN}
OF_CHAT = {
    "model": MODEL,
    "messages": MESSAGES,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": {"type": "object"},
    "tools": CHAT_BODY["tools"],
    "tool_choice": CHAT_BODY["tool_choice"],
    "return_token_strs": BOOLEAN,
}
TOKENIZE = Operation(
    "Token ids of a text or a chat.",
    any_of(body_of(OF_TEXT, "prompt"), body_of(OF_CHAT, "messages")),
    object_of({"count": integer(0), "max_model_len": integer(0), "tokens": TOKENS}, "count", "max_model_len", "tokens"),
)
DETOKENIZE = Operation(
    "The text of token ids.",
    body_of({"model": MODEL, "tokens": TOKENS, "skip_special_tokens": BOOLEAN}, "tokens"),
    object_of({"prompt": text()}, "prompt"),
)
# Who works with tokens at a distance asks for these, and reads null as none.
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
DESCRIBE = Operation(
    "The tokenizer's configuration.",
    answer=object_of({name: nullable(text()) for name in NAMED} | {"model_max_length": integer(0)}, *NAMED),
)


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        post(desk, "/tokenize", tokenize, about=TOKENIZE),
        post(desk, "/detokenize", detokenize, form=FORM, about=DETOKENIZE),
        get(desk, "/tokenizer_info", describe, about=DESCRIBE),
    ]


async def tokenize(desk: Desk, asked: Asked) -> Response:
    """Token ids of a text, or of a chat under the model's template."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        with_texts = switch(body, "return_token_strs", False)
        prompt = await _chat(desk, body) if body.get("messages") is not None else _text(body)
    ids = await desk.model.tokenize(TokenizeCall(prompt, asked.info(model)), asked.caller)
    length = next((card.max_context_tokens for card in desk.model.models()), 0)
    texts = [desk.model.token_text(token)[0] for token in ids] if with_texts else None
    return json_answer({"count": len(ids), "max_model_len": length, "tokens": list(ids), "token_strs": texts})


async def detokenize(desk: Desk, asked: Asked) -> Response:
    """The text of token ids."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        known_only(body, ("model", "tokens", "skip_special_tokens"))
        given, skip = body.get("tokens"), switch(body, "skip_special_tokens", False)
        if not isinstance(given, list):
            raise RequestError(f"tokens={shown(given, 80)} is no list of token ids; give one.", "tokens")
        try:
            ids = tuple(checked_prompt(given))
        except RequestError as error:
            raise RequestError(str(error).replace("prompt", "tokens", 1), "tokens") from error
    text = await desk.model.detokenize(DetokenizeCall(ids, skip, asked.info(model)), asked.caller)
    return json_answer({"prompt": text})


async def describe(desk: Desk, asked: Asked) -> Response:
    """What the model's tokenizer_config.json says, its chat template included."""
    config = desk.model.chat_model().config
    length = next((card.max_context_tokens for card in desk.model.models()), 0)
    return json_answer(dict.fromkeys(NAMED) | {"model_max_length": length} | config)


def _text(body: Mapping[str, Any]) -> Prompt:
    known_only(body, OF_TEXT)
    given = body.get("prompt")
    if not isinstance(given, str):
        raise RequestError(f"prompt={shown(given, 80)} is no text; give one, or messages.", "prompt")
    return Prompt(text=given, add_special_tokens=switch(body, "add_special_tokens", True))


async def _chat(desk: Desk, body: Mapping[str, Any]) -> Prompt:
    known_only(body, OF_CHAT)
    if body.get("tools") is not None or body.get("tool_choice") is not None:
        # As the chat itself would be asked, calls and their results included.
        plan = await plan_chat(desk, without(body, ("model", "return_token_strs")))
        return Prompt(messages=plan.messages, template=plan.template)
    return Prompt(messages=tuple(chat_messages(body["messages"])), template=template_variables(body))
