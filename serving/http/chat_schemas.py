# SPDX-License-Identifier: Apache-2.0
"""What the APIs for chats say of their bodies and answers in /openapi.json."""

from metrale_jax.sampling.params import MAX_LOGPROBS
from serving.chat.messages import ROLES
from serving.chat.reasoning import EFFORTS
from serving.chat.tools import MAX_TOOLS, TOOL_NAME
from serving.http.metadata import METADATA
from serving.http.operations import Operation
from serving.http.paging import page_of
from serving.http.schemas import ANYTHING, BOOLEAN, PARAMS, any_of, array, body_of, integer, nullable, object_of, text
from serving.passed_over import (
    DRAWING,
    MESSAGES_HINTS,
    MESSAGES_REFUSED,
    RESPONSES_HINTS,
    RESPONSES_REFUSED,
    described,
)

OBJECT = {"type": "object"}
NAME = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}
PART = object_of({"type": text("text", "input_text", "output_text"), "text": text()}, "type", "text")
REFUSAL = object_of({"type": text("refusal"), "refusal": text()}, "type", "refusal")
CONTENT = any_of(text(), array(any_of(PART, REFUSAL)))
SCHEMA = object_of({"type": text("object"), "properties": OBJECT})
FUNCTION = object_of(
    {"name": NAME, "description": nullable(text()), "parameters": nullable(SCHEMA), "strict": nullable(BOOLEAN)}, "name"
)
CALL = object_of(
    {"id": text(), "type": text("function"), "function": object_of({"name": text(), "arguments": text()}, "name")},
    "id",
    "type",
    "function",
)
CHAT_MESSAGE = object_of(
    {
        "role": text(*ROLES),
        "content": nullable(CONTENT),
        "name": nullable(text()),
        "tool_calls": nullable(array(CALL)),
        "function_call": nullable(OBJECT),
        "tool_call_id": nullable(text()),
        "reasoning_content": nullable(CONTENT),
        "reasoning": nullable(CONTENT),
        **{name: ANYTHING for name in ("refusal", "annotations", "audio")},
    },
    "role",
    closed=True,
)
CHOICE = any_of(text("none", "auto", "required"), OBJECT)
# Fields of a chat beside those that any generation has.
CHAT_BODY = {
    "messages": array(CHAT_MESSAGE, 1),
    "tools": array(object_of({"type": text("function"), "function": FUNCTION}, "type", "function"), None, MAX_TOOLS),
    "tool_choice": CHOICE,
    "functions": array(FUNCTION, None, MAX_TOOLS),
    "function_call": any_of(text("none", "auto"), OBJECT),
    "parallel_tool_calls": BOOLEAN,
    "reasoning_effort": text(*EFFORTS),
    "enable_thinking": BOOLEAN,
}
CHAT_ANSWER = object_of(
    {"role": text("assistant"), "content": nullable(text()), "tool_calls": array(CALL), "reasoning_content": text()},
    "role",
    "content",
)
CHAT_ENDS = text("stop", "length", "tool_calls", "function_call")

ASKED = {
    **described(MESSAGES_HINTS, MESSAGES_REFUSED),
    "messages": array(
        object_of({"role": text("user", "assistant", "system"), "content": ANYTHING}, "role", "content"), 1
    ),
    "system": any_of(text(), array(PART)),
    "tools": array(OBJECT, None, MAX_TOOLS),
    "tool_choice": object_of({"type": text("auto", "any", "tool", "none")}, "type"),
    "thinking": object_of({"type": text("enabled", "adaptive", "disabled")}, "type"),
    "output_config": OBJECT,
    "output_format": OBJECT,
    "model": text(),
    "stream": BOOLEAN,
    "max_tokens": integer(1),
    "stop_sequences": array({"type": "string", "minLength": 1}),
    **{name: PARAMS[name] for name in DRAWING if name != "stop"},
}
MESSAGE = object_of(
    {
        "id": text(),
        "type": text("message"),
        "role": text("assistant"),
        "model": text(),
        "content": array(object_of({"type": text("text", "thinking", "tool_use")}, "type")),
        "stop_reason": text("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": nullable(text()),
        "usage": object_of({"input_tokens": integer(0), "output_tokens": integer(0)}, "input_tokens", "output_tokens"),
    },
    *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"),
)
MESSAGES_ABOUT = Operation(
    "The next message of a chat, as Anthropic has them.",
    body_of(ASKED, "messages", "max_tokens"),
    MESSAGE,
    is_streamed=True,
)
COUNT_ABOUT = Operation(
    "How many tokens the prompt of a message has.",
    body_of(ASKED, "messages"),
    object_of({"input_tokens": integer(0)}, "input_tokens"),
)
RESPONSE = object_of(
    {
        "id": text(),
        "object": text("response"),
        "created_at": integer(0),
        "status": text("completed", "incomplete"),
        "model": text(),
        "output": array(object_of({"type": text("message", "reasoning", "function_call"), "id": text()}, "type", "id")),
        "usage": OBJECT,
    },
    *("id", "object", "created_at", "status", "model", "output", "usage"),
)
RESPONSES_ABOUT = Operation(
    "The next response of a chat.",
    body_of(
        {
            **described(RESPONSES_HINTS, RESPONSES_REFUSED),
            "input": any_of(text(), array(OBJECT, 1)),
            "instructions": text(),
            "previous_response_id": text(),
            "tools": array(object_of({"type": text("function"), **FUNCTION["properties"]}, "type", "name")),
            "tool_choice": CHOICE,
            "parallel_tool_calls": BOOLEAN,
            "reasoning": object_of({"effort": nullable(text(*EFFORTS))}),
            "text": OBJECT,
            "metadata": METADATA,
            "store": BOOLEAN,
            "include": array(text()),
            "top_logprobs": integer(0, MAX_LOGPROBS),
            "model": text(),
            "stream": BOOLEAN,
            "max_output_tokens": integer(1),
            **{name: PARAMS[name] for name in DRAWING},
        },
        "input",
    ),
    RESPONSE,
    is_streamed=True,
)
SHOW_ABOUT = Operation(
    "A response that is kept.",
    answer=RESPONSE,
    is_streamed=True,
    query={"stream": BOOLEAN, "starting_after": integer(0), "include": ANYTHING, "include_obfuscation": ANYTHING},
)
INPUT_ITEMS_ABOUT = Operation(
    "The items that a response was made from.",
    answer=page_of(object_of({"type": text(), "id": text()}, "type", "id")),
    query={"after": text(), "limit": integer(1, 100), "order": text("asc", "desc"), "include": ANYTHING},
)
FORGET_ABOUT = Operation(
    "Keeps a response no longer.",
    answer=object_of({"id": text(), "object": text("response"), "deleted": {"const": True}}, "id", "object", "deleted"),
)
