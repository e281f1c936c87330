# SPDX-License-Identifier: Apache-2.0
"""/v1/messages, asked with Anthropic's own client."""

import json

import anthropic
import httpx
import pytest

from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.passed_over import LEAST_TOP_P
from tests.serving.chat.models import CITY, OPENED, SUM, TEMPLATES, chat_model
from tests.serving.chat.test_parser import ARGUMENTS, ONE, TWO
from tests.serving.http.fronts import World, fronted, run
from tests.serving.scripted import ScriptedService, answer, ids_of

URL = "/v1/messages"
CALL_BLOCK = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
HELLO = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"name": "weather", "description": "d", "input_schema": CITY},
    {"name": "sum", "input_schema": SUM, "type": "custom"},
]
ASKED = {"model": "scripted", "max_tokens": 100, "messages": HELLO}


def service(text: str, template: str = TEMPLATES["hermes"], **fields) -> ScriptedService:
    made = ScriptedService(answer(text, **fields))
    made.chat = chat_model(template)
    return made


def client(world: World, **options) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=world.base_url, **{"api_key": "none", "max_retries": 0, **options})


def test_a_message_has_anthropics_shape():
    async def act():
        async with fronted(service("Sunny.")) as world:
            body = (await world.client.post(URL, json=ASKED, headers={"x-request-id": "r1"})).json()
        assert body == {
            "id": "msg_r1",
            "type": "message",
            "role": "assistant",
            "model": "scripted",
            "content": [{"type": "text", "text": "Sunny."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 1,
                "output_tokens": 6,
            },
        }

    run(act())


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_tools_are_used(name):
    async def act():
        async with fronted(service(TWO[name], TEMPLATES[name])) as world, client(world) as asking:
            whole = await asking.messages.create(**ASKED, tools=TOOLS)
            async with asking.messages.stream(**ASKED, tools=TOOLS) as stream:
                kinds = [event.type async for event in stream]
                streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use" and len(message.content) == 2
            assert len({block.id for block in message.content}) == 2
            for block in message.content:
                assert (block.type, block.name, block.input) == ("tool_use", "weather", json.loads(ARGUMENTS))
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    run(act())


def test_a_stream_has_blocks_one_after_the_other():
    async def act():
        text = "hm</think>\n\nLet me see.\n" + ONE["hermes"]
        async with fronted(service(text, OPENED)) as world, client(world) as asking:
            stream = await asking.messages.create(**ASKED, tools=TOOLS, stream=True)
            events = [event async for event in stream]
        start = events[0].message.usage
        assert (start.input_tokens, start.cache_read_input_tokens, start.output_tokens) == (2, 1, 0)
        kinds = [event.type for event in events if event.type != "content_block_delta"]
        block = ["content_block_start", "content_block_stop"]
        assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
        starts = [event for event in events if event.type == "content_block_start"]
        assert [event.content_block.type for event in starts] == ["thinking", "text", "tool_use"]
        assert [event.index for event in starts] == [0, 1, 2]
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == "hm"
        assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == "Let me see."
        written = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
        assert json.loads(written) == json.loads(ARGUMENTS)
        assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.output_tokens == len(ids_of(text))

    run(act())


def test_thinking_comes_as_a_block():
    async def act():
        asked = service("hm</think>Yes", OPENED)
        async with fronted(asked) as world, client(world) as asking:
            thinking = {"type": "enabled", "budget_tokens": 50}
            whole = await asking.messages.create(**ASKED, thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert (whole.content[0].thinking, whole.content[1].text) == ("hm", "Yes")
        [(_, call, _)] = asked.asked
        assert call.prompt.template["enable_thinking"] is True

    run(act())


def test_the_service_is_asked_for_all_that_a_body_says():
    async def act():
        asked = service("Yes.")
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "gone", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "user", "content": "Well?"},
        ]
        async with fronted(asked) as world, client(world) as asking:
            await asking.messages.create(
                model="scripted",
                max_tokens=7,
                system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
                messages=messages,
                tools=TOOLS,
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                stop_sequences=["END"],
                metadata={"user_id": "u"},
                extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9},
            )
        [(_, call, _)] = asked.asked
        call_made = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
        assert list(call.prompt.messages) == [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [call_made],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sun"},
            {"role": "tool", "tool_call_id": "t2", "name": "", "content": "Error: gone"},
            {"role": "user", "content": "And?\nWell?"},
        ]
        params = call.params
        assert (params.max_tokens, params.stop, params.temperature, params.top_k, params.top_p) == (
            *(7, ("END",), 0.5, 3, 0.9),
        )
        assert "TEXT" not in params.grammar and "(" not in params.grammar.partition("calls:")[2].partition("\n")[0]

    run(act())


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("Yes", {"token_ids": (*ids_of("Yes"), 0)}, "end_turn", None),
        ("Yes", {"token_ids": ids_of("Yes. END")}, "stop_sequence", "END"),
        ("Yes", {"token_ids": ids_of("Yes.\n")}, "stop_sequence", "\n"),
        ("Yes", {"finish_reason": "length"}, "max_tokens", None),
        ("Yes", {"finish_reason": "abort"}, "max_tokens", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_end_is_told_with_its_reason(text, fields, reason, sequence, stream):
    async def act():
        async with fronted(service(text, **fields)) as world, client(world) as asking:
            asked = {**ASKED, "stop_sequences": ["\n", "END", "END."]}
            if stream:
                async with asking.messages.stream(**asked) as events:
                    whole = await events.get_final_message()
            else:
                whole = await asking.messages.create(**asked)
        assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)

    run(act())


def test_of_arguments_that_broke_off_the_members_come_that_are_whole():
    async def act():
        async with fronted(service(ONE["hermes"][:72], finish_reason="length")) as world, client(world) as asking:
            whole = await asking.messages.create(**ASKED, tools=TOOLS)
        assert whole.stop_reason == "max_tokens"
        [block] = whole.content
        assert (block.type, block.name, block.input) == ("tool_use", "weather", {"city": "Ulm"})

    run(act())


def test_a_schema_for_the_answer_is_held_to():
    async def act():
        asked = service('{"a": 1}')
        async with fronted(asked) as world, client(world) as asking:
            form = {"type": "json_schema", "schema": {"type": "object"}}
            await asking.messages.create(**ASKED, output_config={"format": form, "effort": "low"})
        [(_, call, _)] = asked.asked
        assert json.loads(call.params.json_schema) == {"type": "object"}
        assert call.prompt.template == {"reasoning_effort": "low"}

    run(act())


def test_what_changes_no_answer_is_taken_and_an_answer_can_be_repeated():
    async def act():
        asked = service("{}")
        hints = {"context_management": {"edits": []}, "mcp_servers": [], "diagnostics": {}, "fallbacks": "default"}
        form = {"type": "json_schema", "schema": {"type": "object"}}
        body = {**ASKED, **hints, "output_format": form, "seed": -2, "top_p": 0}
        async with fronted(asked) as world:
            assert (await world.client.post(URL, json=body)).status_code == 200
        [(_, call, _)] = asked.asked
        assert (call.params.seed, call.params.top_p) == (2**64 - 2, LEAST_TOP_P)
        assert json.loads(call.params.json_schema) == form["schema"]

    run(act())


def test_what_the_assistant_began_is_gone_on_with():
    async def act():
        made = service("is sunny.")
        async with fronted(made) as world, client(world) as asking:
            await asking.messages.create(**ASKED | {"messages": [*HELLO, {"role": "assistant", "content": "It"}]})
        ((_, call, _),) = made.asked
        assert call.prompt.template["continue_final_message"] is True
        assert call.prompt.messages[-1] == {"role": "assistant", "content": "It"}

    run(act())


def test_tokens_are_counted():
    async def act():
        async with fronted(service("x")) as world, client(world) as asking:
            counted = await asking.messages.count_tokens(
                model="scripted", messages=HELLO, system="Be brief.", tools=TOOLS
            )
        assert counted.input_tokens == len("system:Be brief.\nuser:Weather?\n")

    run(act())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL_BLOCK]}]}, "give their results"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type='image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "content[0].type='tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type='image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "not below max_tokens=100"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": 5}, "output_config"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"container": "c"}, "container='c' is not served here"),
        ({"mcp_servers": [{"type": "url", "url": "https://a.example"}]}, "give their tools in tools"),
        ({"output_format": {"type": "xml"}}, "output_format"),
    ],
)
def test_faults_are_told_in_anthropics_form(more, words):
    async def act():
        async with fronted(service("x")) as world:
            answered = await world.client.post(URL, json=ASKED | more)
        assert answered.status_code == 400
        body = answered.json()
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert words in body["error"]["message"] and body["request_id"] == answered.headers["x-request-id"]

    run(act())


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (Kind.NOT_FOUND, anthropic.NotFoundError),
        (Kind.EXHAUSTED, anthropic.RateLimitError),
        (Kind.UNAVAILABLE, anthropic.InternalServerError),
        (Kind.INVALID, anthropic.BadRequestError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_service_are_the_clients_own(kind, raised, stream):
    async def act():
        asked = service("x")
        asked.script = (ServiceError(kind, "No.", retry_after_s=2.0),)
        async with fronted(asked) as world, client(world) as asking:
            with pytest.raises(raised, match=r"No\."):
                await asking.messages.create(**ASKED, stream=stream)

    run(act())


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_named_as_the_body_names_it(stream):
    form = {"type": "json_schema", "schema": {"a": 1}}
    given = {"output_config": {"format": form}}, {"output_format": form}

    async def act():
        asked = service("x")
        asked.script = (ServiceError(Kind.INVALID, "json_schema='x' is refused.", field="params.json_schema"),)
        async with fronted(asked) as world:
            for more, place in zip(given, ("output_config.format.schema", "output_format.schema"), strict=True):
                answered = await world.client.post(URL, json={**ASKED, **more, "stream": stream})
                assert answered.status_code == 400
                assert answered.json()["error"]["message"] == f"{place}='x' is refused."

    run(act())


def test_an_error_within_a_stream_is_an_event():
    async def act():
        asked = service("x")
        asked.script = (*answer("ab")[:2], ServiceError(Kind.UNAVAILABLE, "The engine is gone."))
        async with fronted(asked) as world, client(world) as asking:
            with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
                async for _ in await asking.messages.create(**ASKED, stream=True):
                    pass

    run(act())


def test_keys_come_as_x_api_key_and_versions_are_dates():
    async def act():
        asked = service("Yes.")
        asked.keys = {"secret": Caller("k")}
        async with fronted(asked) as world:
            async with client(world, api_key="secret") as asking:
                assert (await asking.messages.create(**ASKED)).content[0].text == "Yes."
            async with client(world, api_key="wrong") as asking:
                with pytest.raises(anthropic.AuthenticationError):
                    await asking.messages.create(**ASKED)
            odd = await world.client.post(URL, json=ASKED, headers={"x-api-key": "secret", "anthropic-version": "new"})
            assert odd.status_code == httpx.codes.BAD_REQUEST and "anthropic-version" in odd.text

    run(act())
