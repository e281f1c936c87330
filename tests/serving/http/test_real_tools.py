# SPDX-License-Identifier: Apache-2.0
"""A tiny model with random weights that is made to call tools, through three APIs and their own clients."""

import json

import anthropic
import jsonschema
import openai
import pytest

from metrale_jax import LLM
from tests.serving.chat.models import CITY
from tests.serving.http.fronts import run
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

COMPILING_S = 300
HELLO = [{"role": "user", "content": "Weather?"}]
FUNCTION = {"name": "weather", "description": "d", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    config = json.loads((directory / "config.json").read_text())
    # A token is a byte, so that a tool takes many.
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return LLM(directory, max_sequences=4, max_context_tokens=2048, prefill_tokens=128, kv_cache_mib=4)


def test_every_api_calls_tools_by_their_schema(model):
    async def act():
        async with whole_server(model) as server:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asking:
                found = [*await chats(asking), await response(asking)]
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as asking:
                found += await messages(asking)
            await server.quiet()
        assert len(found) == 6
        for arguments in found:
            jsonschema.validate(arguments, CITY)
        # Whole or as it comes, it is one answer.
        assert found[0] == found[1]

    run(act(), COMPILING_S)


async def chats(asking: openai.AsyncOpenAI) -> list[dict]:
    """Arguments of calls in chat completions, whole, streamed, and of a tool by its name."""
    asked = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False, "seed": 5}
    whole = await asking.chat.completions.create(**asked, tool_choice="required")
    async with asking.chat.completions.stream(**asked, tool_choice="required") as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    named = await asking.chat.completions.create(
        **asked, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    for made in (whole, streamed, named):
        assert made.choices[0].finish_reason == "tool_calls" and not made.choices[0].message.content
    return [json.loads(made.choices[0].message.tool_calls[0].function.arguments) for made in (whole, streamed, named)]


async def response(asking: openai.AsyncOpenAI) -> dict:
    """Arguments of a call in a response."""
    tool = {"type": "function", **FUNCTION, "strict": True}
    asked = {"model": "tiny", "input": "Weather?", "tools": [tool], "parallel_tool_calls": False}
    made = await asking.responses.create(**asked, tool_choice="required")
    assert made.status == "completed" and {item.type for item in made.output} == {"function_call"}
    return json.loads(made.output[0].arguments)


async def messages(asking: anthropic.AsyncAnthropic) -> list[dict]:
    """Arguments of calls in messages, whole and streamed."""
    tool = {"name": "weather", "description": "d", "input_schema": CITY}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"model": "tiny", "max_tokens": 900, "messages": HELLO, "tools": [tool], "tool_choice": choice}
    whole = await asking.messages.create(**asked)
    async with asking.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    counted = await asking.messages.count_tokens(model="tiny", messages=HELLO, tools=[tool])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    return [made.content[0].input for made in (whole, streamed)]
