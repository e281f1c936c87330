# SPDX-License-Identifier: Apache-2.0
"""`ChatPlan`: what a chat asks of the service, and how its answers are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import SamplingParams
from serving.http.answers import switch, without
from serving.openai_body import chat_request, checked_answers

OWN_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "return_token_ids")


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


class PlainParser:
    """Reads an answer of text only: what comes is content."""

    def feed(self, text: str) -> list[Content]:
        """The parts that are whole with this text."""
        return [Content(text)] if text else []

    def end(self) -> list[Content]:
        """What was held back; nothing more comes."""
        return []


@dataclass(frozen=True)
class ChatPlan:
    """`messages` and variables of their `template`, `params`, and a fresh `parser()` for each answer."""

    messages: Sequence[Mapping[str, Any]]
    template: Mapping[str, Any]
    params: SamplingParams
    parser: Callable[[], PlainParser]


def plan_chat(body: Mapping[str, Any]) -> ChatPlan:
    """The plan of a body of /v1/chat/completions. Raises `RequestError`, or `ServiceError`."""
    if switch(body, "continue_final_message", False):
        raise RequestError(
            "continue_final_message=True is not served here; leave it out, and ask to go on in a message.",
            "continue_final_message",
        )
    messages, params = chat_request(without(body, OWN_FIELDS), {})
    checked_answers("n", params.n)
    return ChatPlan(messages, template_variables(body), params, PlainParser)


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the body says to the chat template. Raises `RequestError`, or `ServiceError`."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise RequestError(
            f"chat_template_kwargs={shown(given, 80)} is no object; give one, or leave it out.", "chat_template_kwargs"
        )
    return {"add_generation_prompt": switch(body, "add_generation_prompt", True)} | (given or {})
