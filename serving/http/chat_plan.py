# SPDX-License-Identifier: Apache-2.0
"""From a body of /v1/chat/completions to its `ChatPlan`, and faults that a plan's own grammar has."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import SamplingParams
from serving.chat.holding import reason_of
from serving.chat.messages import openai_messages
from serving.chat.plan import Chat, ChatPlan, plan
from serving.chat.reasoning import openai_reasoning
from serving.chat.tools import openai_tools
from serving.core.errors import Kind, ServiceError
from serving.http.answers import switch, without
from serving.http.desk import Desk
from serving.openai_body import chat_params, checked_answers

OWN_FIELDS = (
    *("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "return_token_ids"),
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
    *("reasoning_effort", "enable_thinking"),
)


async def plan_chat(desk: Desk, body: Mapping[str, Any]) -> ChatPlan:
    """The plan of a body of /v1/chat/completions. Raises `RequestError`, or `ServiceError`."""
    messages, tools = openai_messages(body.get("messages")), openai_tools(body)
    reasoning = replace(openai_reasoning(body), variables=template_variables(body))
    params = chat_params(without(body, OWN_FIELDS), {})
    checked_answers("n", params.n)
    return await planned(desk, Chat(messages, tools, reasoning), params)


async def planned(desk: Desk, chat: Chat, params: SamplingParams) -> ChatPlan:
    """The plan for a chat with the model that there is, made beside the event loop: templates take their time."""
    model = desk.model.chat_model()
    return await asyncio.to_thread(plan, chat, model, params, desk.settings.tool_dialect)


@contextmanager
def faults_of(made: ChatPlan) -> Iterator[None]:
    """Out of it a fault of the plan's own grammar comes as one of the tools that it was made for."""
    try:
        yield
    except ServiceError as error:
        if not made.constrained or error.field != "params.grammar":
            raise
        _, _, told = str(error).partition(" is refused (")
        reason = reason_of(told.rpartition("); ")[0] or told or str(error))
        message = f"The answer cannot be held to the schemas of tools ({reason}); simplify them."
        raise ServiceError(Kind.INVALID, message, field="tools") from error


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the body says to the chat template. Raises `RequestError`, or `ServiceError`."""
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise RequestError(
            f"chat_template_kwargs={shown(given, 80)} is no object; give one, or leave it out.", "chat_template_kwargs"
        )
    goes_on = switch(body, "continue_final_message", False)
    begins = switch(body, "add_generation_prompt", not goes_on)
    if goes_on and begins:
        raise RequestError(
            "continue_final_message=True goes with no add_generation_prompt=True: an answer goes on or begins; leave "
            "one of them out.",
            "continue_final_message",
        )
    variables = {"add_generation_prompt": begins} | ({"continue_final_message": True} if goes_on else {})
    return variables | (given or {})
