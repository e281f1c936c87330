# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions with tools and reasoning, asked with OpenAI's own client."""

import json

import openai
import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import Lifecycle
from tests.serving.chat.models import MISTRAL, OPENED, TEMPLATES, TOOLS, chat_model
from tests.serving.chat.test_parser import ARGUMENTS, ONE, TWO
from tests.serving.http.fronts import World, error_of, fronted, run
from tests.serving.scripted import ScriptedService, answer

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Weather?"}]
QWEN = TEMPLATES["hermes"]


def service(text: str, template: str = QWEN, **fields) -> ScriptedService:
    """One that answers so, with this template."""
    made = ScriptedService(answer(text, **fields))
    made.chat = chat_model(template)
    return made


def client(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.base_url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_come_whole(name):
    async def act():
        async with fronted(service(TWO[name], TEMPLATES[name])) as world, client(world) as asking:
            whole = await asking.chat.completions.create(model="", messages=HELLO, tools=TOOLS)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
        assert all(json.loads(call.function.arguments) == json.loads(ARGUMENTS) for call in choice.message.tool_calls)
        assert len({call.id for call in choice.message.tool_calls}) == 2

    run(act())


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_come_as_they_are_written(name):
    async def act():
        async with fronted(service(ONE[name], TEMPLATES[name])) as world, client(world) as asking:
            stream = await asking.chat.completions.create(model="", messages=HELLO, tools=TOOLS, stream=True)
            deltas = [chunk.choices[0] async for chunk in stream]
        calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
        assert calls[0].id and calls[0].function.name == "weather" and calls[0].type == "function"
        assert all(call.index == 0 and call.id is None for call in calls[1:])
        assert json.loads("".join(call.function.arguments for call in calls)) == json.loads(ARGUMENTS)
        assert len(calls) > 10
        assert deltas[-1].finish_reason == "tool_calls"
        assert not any(choice.delta.content for choice in deltas)

    run(act())


def test_openais_helper_for_streams_puts_calls_together():
    async def act():
        async with fronted(service("Hm. " + ONE["hermes"])) as world, client(world) as asking:
            async with asking.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as stream:
                async for _ in stream:
                    pass
            whole = await stream.get_final_completion()
        message = whole.choices[0].message
        assert message.content == "Hm."
        assert json.loads(message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)

    run(act())


def test_the_service_is_asked_with_tools_a_grammar_and_earlier_calls():
    async def act():
        asked = service("Sunny.")
        history = [
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "sun"},
        ]
        async with fronted(asked) as world, client(world) as asking:
            whole = await asking.chat.completions.create(
                model="", messages=history, tools=TOOLS, tool_choice="auto", reasoning_effort="low"
            )
        assert whole.choices[0].message.content == "Sunny." and whole.choices[0].finish_reason == "stop"
        [(_, call, _)] = asked.asked
        assert call.prompt.template == {"add_generation_prompt": True, "reasoning_effort": "low", "tools": TOOLS}
        assert call.prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == json.loads(ARGUMENTS)
        assert "<tool_call>" in call.params.grammar

    run(act())


def test_a_call_that_is_cut_off_says_length():
    async def act():
        text = ONE["hermes"][:60]
        async with fronted(service(text, finish_reason="length")) as world, client(world) as asking:
            whole = await asking.chat.completions.create(model="", messages=HELLO, tools=TOOLS)
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].message.tool_calls[0].function.arguments.startswith('{"city')

    run(act())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "reason"), [(ONE["hermes"][:60], "stop"), (ONE["hermes"], "tool_calls")])
def test_a_stop_amid_a_call_has_called_nothing(text, reason, stream):
    async def act():
        async with fronted(service(text)) as world, client(world) as asking:
            whole = await asking.chat.completions.create(
                model="", messages=HELLO, tools=TOOLS, stop=["Paris"], stream=stream
            )
            choices = [chunk.choices[0] async for chunk in whole] if stream else whole.choices
        assert choices[-1].finish_reason == reason

    run(act())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('<tool_call>\n{"name', [], ""),
        ('Hm. <tool_call>\n{"name": "wea', [], "Hm."),
        (ONE["hermes"] + '\n<tool_call>\n{"name": "weather", "arguments":', [ARGUMENTS, ""], ""),
        (ONE["hermes"] + "\n<tool_c", [ARGUMENTS], ""),
    ],
)
def test_nothing_of_a_calls_format_shows_where_it_is_cut_off(text, calls, content, stream):
    async def act():
        async with fronted(service(text, finish_reason="length")) as world, client(world) as asking:
            whole = await asking.chat.completions.create(model="", messages=HELLO, tools=TOOLS, stream=stream)
            if not stream:
                message = whole.choices[0].message
                assert message.content == (content or None)
                assert [call.function.arguments for call in message.tool_calls or ()] == calls
                history = [*HELLO, message.model_dump(exclude_none=True), *HELLO]
                await asking.chat.completions.create(model="", messages=history, tools=TOOLS)
                return
            deltas = [chunk.choices[0] async for chunk in whole]
        assert deltas[-1].finish_reason == "length"
        assert "".join(choice.delta.content or "" for choice in deltas) == content
        told = [""] * len(calls)
        for choice in deltas:
            for call in choice.delta.tool_calls or ():
                told[call.index] += call.function.arguments
        assert told == calls

    run(act())


def test_functions_have_a_function_call():
    async def act():
        body = {"messages": HELLO, "functions": [tool["function"] for tool in TOOLS]}
        async with fronted(service(ONE["hermes"])) as world:
            choice = (await world.client.post(URL, json=body)).json()["choices"][0]
            assert choice["message"]["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
            assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
            streamed = (await world.client.post(URL, json=body | {"stream": True})).text
        assert '"function_call":{"name":"weather","arguments":""}' in streamed
        assert '"finish_reason":"function_call"' in streamed

    run(act())


def test_reasoning_comes_apart():
    async def act():
        async with fronted(service("hm</think>\n\nYes", OPENED)) as world, client(world) as asking:
            whole = await asking.chat.completions.create(model="", messages=HELLO)
            assert (whole.choices[0].message.reasoning_content, whole.choices[0].message.content) == ("hm", "Yes")
            stream = await asking.chat.completions.create(model="", messages=HELLO, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
        assert "".join(delta.content or "" for delta in deltas) == "Yes"

    run(act())


def test_a_dialect_may_be_set():
    async def act():
        async with fronted(service(ONE["mistral"]), tool_dialect="mistral") as world, client(world) as asking:
            whole = await asking.chat.completions.create(model="", messages=HELLO, tools=TOOLS)
        assert len(whole.choices[0].message.tool_calls[0].id) == 9

    run(act())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}, "grammar": "x"}, None),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ],
)
def test_faults_name_their_field(more, param):
    async def act():
        async with fronted(service("x")) as world:
            error = error_of(await world.client.post(URL, json={"messages": HELLO} | more), 400)
            assert param is None or error["param"] == param

    run(act())


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_that_cannot_be_held_to_are_the_tools_fault(stream):
    async def act():
        refusal = ServiceError(Kind.INVALID, "grammar='…' is refused (it is odd); write Lark.", field="params.grammar")
        asked = service("x", MISTRAL)
        asked.script = (refusal,)
        async with fronted(asked) as world:
            body = {"messages": HELLO, "tools": TOOLS, "stream": stream}
            error = error_of(await world.client.post(URL, json=body), 400)
        assert error["param"] == "tools" and "schemas of tools (it is odd)" in error["message"]

    run(act())


def test_without_a_model_chats_are_told_to_come_again():
    async def act():
        asked = service("x")
        lifecycle = Lifecycle()

        def refuse():
            lifecycle.refuse_unless_serving()

        asked.chat_model = refuse
        async with fronted(asked, lifecycle) as world:
            error_of(await world.client.post(URL, json={"messages": HELLO}), 503)

    run(act())
