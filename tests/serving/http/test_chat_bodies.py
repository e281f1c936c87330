# SPDX-License-Identifier: Apache-2.0
"""Bodies of the APIs for chats with anything anywhere: each is read, or refused in words."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.core.errors import MetraleError
from metrale_jax.sampling.params import SamplingParams
from serving.chat.messages import openai_messages
from serving.chat.plan import Chat, plan
from serving.chat.reasoning import openai_reasoning
from serving.chat.tools import openai_tools
from serving.http import messages_body, responses_body
from tests.serving.chat.models import CITY, TEMPLATES, TOOLS, chat_model
from tests.serving.chat.test_parser import ARGUMENTS

MODELS = [chat_model(template) for template in TEMPLATES.values()]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "assistant", "function_call": {"name": "sum", "arguments": "{}"}},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CALL]}},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True},
}
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Ulm"}},
]
MESSAGES = {
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [BLOCKS[1]]}]},
    ],
    "tools": [{"name": "weather", "input_schema": CITY}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["x"],
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
}
leaves = st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.floats(-1, 2), st.sampled_from(["", "x", "auto"]))
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))


def places(value, path=()):
    """The way to every value within."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(body: dict, changes: list) -> dict:
    """The body with other values in some places."""
    body = copy.deepcopy(body)
    for number, value in changes:
        ways = [path for path in places(body) if path]
        *way, last = ways[number % len(ways)]
        inner = body
        for key in way:
            inner = inner[key]
        inner[last] = value
    return body


def read_chat(body: dict) -> tuple[Chat, SamplingParams]:
    chat = Chat(openai_messages(body["messages"]), openai_tools(body), openai_reasoning(body))
    return chat, SamplingParams()


def read_messages(body: dict) -> tuple[Chat, SamplingParams]:
    return messages_body.chat_of(body), messages_body.params_of(body)


def read_responses(body: dict) -> tuple[Chat, SamplingParams]:
    responses_body.check_rest(body)
    messages = [*responses_body.instructions_of(body), *responses_body.input_of(body, [])]
    chat = Chat(messages, responses_body.tools_of(body), responses_body.reasoning_of(body))
    return chat, responses_body.params_of(body)


READERS = [(CHAT, read_chat), (MESSAGES, read_messages), (RESPONSES, read_responses)]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(READERS),
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.integers(0, 200), values), max_size=2),
)
def test_a_body_is_read_or_refused_in_words(reader, model, changes):
    body, read = reader
    try:
        chat, params = read(changed(body, changes))
        made = plan(chat, model, params)
        # As the service would.
        model.render(list(made.messages), **made.template)
    except MetraleError as error:
        assert str(error)
        return
    assert all(isinstance(message["content"], str) for message in made.messages)


@pytest.mark.parametrize("reader", READERS, ids=["chat", "messages", "responses"])
def test_every_place_may_hold_anything(reader):
    body, read = reader
    others = (None, True, 0, -1, 1.5, "", "x", [], [3], ["x"], [{}], {}, {"a": 1}, {"type": "text"})
    refused = 0
    for number, _ in enumerate(path for path in places(body) if path):
        for value in others:
            try:
                chat, params = read(changed(body, [(number, value)]))
                for dialect in ("gemma", "qwen3_coder"):
                    plan(chat, MODELS[0], params, dialect)
            except MetraleError:
                refused += 1
    assert refused > 100


def test_bodies_that_nobody_has_changed_are_read():
    for body, read in READERS:
        chat, _ = read(body)
        assert chat.tools.tools and chat.messages
