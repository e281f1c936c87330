# SPDX-License-Identifier: Apache-2.0
"""/v1/responses, asked with OpenAI's own client."""

import json

import openai
import pytest
from pydantic import BaseModel

from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.http.response_store import ResponseStore, Stored
from tests.serving.chat.models import CITY, OPENED, TEMPLATES, chat_model
from tests.serving.chat.test_parser import ARGUMENTS, ONE, TWO
from tests.serving.http.fronts import World, error_of, fronted, run
from tests.serving.scripted import ScriptedService, answer, ids_of

URL = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather", "description": "d", "parameters": CITY, "strict": False},
    {"type": "function", "name": "sum", "parameters": {"type": "object", "properties": {}}, "strict": True},
]
INCLUDED = ["message.output_text.logprobs"]


def service(text: str, template: str = TEMPLATES["hermes"], **fields) -> ScriptedService:
    made = ScriptedService(answer(text, **fields))
    made.chat = chat_model(template)
    return made


def client(world: World, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.base_url}/v1", api_key=key, max_retries=0)


def prompts(asked: ScriptedService) -> list[list[dict]]:
    """The messages of each call."""
    return [list(call.prompt.messages) for _, call, _ in asked.asked]


def test_a_response_has_openais_shape():
    async def act():
        asked = service("Sunny.")
        async with fronted(asked) as world, client(world) as asking:
            made = await asking.responses.create(
                model="scripted",
                input="Weather?",
                instructions="Be brief.",
                max_output_tokens=9,
                temperature=0.5,
                metadata={"a": "b"},
                store=False,
            )
        assert made.output_text == "Sunny." and made.status == "completed"
        [item] = made.output
        assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
        assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (3, 6, 9)
        assert made.metadata == {"a": "b"} and made.instructions == "Be brief." and made.temperature == 0.5
        assert prompts(asked) == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]]
        assert asked.asked[0][1].params.max_tokens == 9

    run(act())


def test_events_come_in_order_and_are_numbered():
    async def act():
        text = "hm</think>\n\nLet me see.\n" + ONE["hermes"]
        async with fronted(service(text, OPENED)) as world, client(world) as asking:
            stream = await asking.responses.create(model="", input="Weather?", tools=TOOLS, stream=True)
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        told = [kind for place, kind in enumerate(kinds) if not place or kind != kinds[place - 1]]
        part = ["response.content_part.added", "response.{}.delta", "response.{}.done", "response.content_part.done"]
        added, done = "response.output_item.added", "response.output_item.done"
        assert told == [
            "response.created",
            "response.in_progress",
            *(added, *(kind.format("reasoning_text") for kind in part), done),
            *(added, *(kind.format("output_text") for kind in part), done),
            *(added, "response.function_call_arguments.delta", "response.function_call_arguments.done", done),
            "response.completed",
        ]
        whole = events[-1].response
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert [event.item for event in events if event.type == done] == whole.output
        assert whole.output[0].content[0].text == "hm" and whole.output_text == "Let me see."
        assert json.loads(whole.output[2].arguments) == json.loads(ARGUMENTS)
        deltas = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
        assert deltas == whole.output[2].arguments
        assert whole.usage.output_tokens == len(ids_of(text))

    run(act())


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_helper_for_streams_puts_calls_together(name):
    async def act():
        async with fronted(service(TWO[name], TEMPLATES[name])) as world, client(world) as asking:
            async with asking.responses.stream(model="m", input="Weather?", tools=TOOLS) as stream:
                async for _ in stream:
                    pass
                streamed = await stream.get_final_response()
            whole = await asking.responses.create(model="", input="Weather?", tools=TOOLS)
        for made in (streamed, whole):
            assert [item.name for item in made.output] == ["weather", "weather"]
            assert all(json.loads(item.arguments) == json.loads(ARGUMENTS) for item in made.output)
            assert len({item.call_id for item in made.output}) == 2

    run(act())


def test_answers_are_parsed_into_models():
    class Answer(BaseModel):
        a: int

    async def act():
        asked = service('{"a": 5}')
        async with fronted(asked) as world, client(world) as asking:
            made = await asking.responses.parse(model="m", input="Five?", text_format=Answer)
        assert made.output_parsed == Answer(a=5)
        assert json.loads(asked.asked[0][1].params.json_schema)["properties"] == {
            "a": {"title": "A", "type": "integer"}
        }

    run(act())


def test_items_become_messages():
    async def act():
        asked = service("So.")
        items = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call", "call_id": "b", "name": "sum", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "b", "output": "3"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "sun"}]},
        ]
        async with fronted(asked) as world, client(world) as asking:
            await asking.responses.create(
                model="", input=items, tools=TOOLS, tool_choice={"type": "function", "name": "sum"}
            )
        functions = [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}},
            {"id": "b", "type": "function", "function": {"name": "sum", "arguments": {}}},
        ]
        assert prompts(asked) == [
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "reasoning_content": "hm",
                    "tool_calls": functions,
                },
                {"role": "tool", "tool_call_id": "b", "name": "sum", "content": "3"},
                {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "sun"},
            ]
        ]
        assert "weather" not in asked.asked[0][1].params.grammar

    run(act())


def test_a_response_goes_on_from_an_earlier_one():
    async def act():
        asked = service("Let me see.\n" + ONE["hermes"])
        async with fronted(asked) as world, client(world) as asking:
            first = await asking.responses.create(model="", input="Weather?", tools=TOOLS, instructions="Be brief.")
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
                for item in first.output
                if item.type == "function_call"
            ]
            asked.script = answer("Sunny.")
            async with asking.responses.stream(
                model="m", input=outputs, previous_response_id=first.id, tools=TOOLS
            ) as stream:
                second = await stream.get_final_response()
            assert (await asking.responses.retrieve(second.id)).output_text == "Sunny."
            third = await asking.responses.create(model="", input="And?", previous_response_id=second.id)
            await asking.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await asking.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError, match="send its items"):
                await asking.responses.create(model="", input="x", previous_response_id=first.id)
        last = prompts(asked)[-1]
        assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant", "user"]
        assert last[1]["content"] == "Let me see." and last[2]["name"] == "weather" and last[3]["content"] == "Sunny."
        assert third.previous_response_id == second.id

    run(act())


def test_the_items_that_a_response_was_made_from_are_listed():
    async def act():
        asked = service("Let me see.\n" + ONE["hermes"])
        async with fronted(asked) as world, client(world) as asking:
            first = await asking.responses.create(model="", input="Weather?", tools=TOOLS)
            [listed] = (await asking.responses.input_items.list(first.id)).data
            assert (listed.type, listed.role, listed.content[0].text) == ("message", "user", "Weather?")
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
                for item in first.output
                if item.type == "function_call"
            ]
            given = [*outputs, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
            second = await asking.responses.create(
                model="",
                input=given,
                previous_response_id=first.id,
                tools=TOOLS,
                include=["reasoning.encrypted_content"],
            )
            pages = asking.responses.input_items.list(second.id, limit=2, order="asc", include=INCLUDED)
            found = [item async for item in pages]
            assert [item.type for item in found] == [
                *("message", "message", "function_call", "function_call_output", "message", "message")
            ]
            assert found[0] == listed and [item.id for item in found[1:3]] == [item.id for item in first.output]
            assert (found[4].content[0].type, found[5].content[0].type) == ("output_text", "input_text")
            assert len({item.id for item in found}) == 6
            backwards = [item async for item in asking.responses.input_items.list(second.id, limit=4)]
            assert backwards == found[::-1]
            with pytest.raises(openai.NotFoundError):
                await asking.responses.input_items.list("resp_none")
            for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
                told = await world.client.get(f"{URL}/{second.id}/input_items", params=query)
                assert error_of(told, 400)["param"] == param

    run(act())


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_response_that_is_kept_is_streamed_again(finish_reason):
    async def act():
        text = "hm</think>\n\nLet me see.\n" + TWO["hermes"]
        asked = service(text, OPENED, finish_reason=finish_reason)
        async with fronted(asked) as world, client(world) as asking:
            stream = await asking.responses.create(model="", input="Weather?", tools=TOOLS, stream=True)
            events = [event async for event in stream]
            whole = events[-1].response
            again = [event async for event in await asking.responses.retrieve(whole.id, stream=True, include=INCLUDED)]
            late = await asking.responses.retrieve(whole.id, stream=True, starting_after=again[-2].sequence_number)
            assert [event async for event in late] == again[-1:]
            assert (await asking.responses.retrieve(whole.id)).output == whole.output
            told = await world.client.get(f"{URL}/{whole.id}", params={"stream": "maybe"})
            assert error_of(told, 400)["param"] == "stream"
        assert again[-1].response == whole and again[-1].type == events[-1].type
        assert [event.sequence_number for event in again] == list(range(len(again)))

        def once(told):
            kinds = [(event.type, getattr(event, "output_index", None)) for event in told]
            return [kind for place, kind in enumerate(kinds) if not place or kind != kinds[place - 1]]

        assert once(again) == once(events)
        ends = [[event.item for event in told if event.type == "response.output_item.done"] for told in (again, events)]
        assert ends[0] == ends[1]

    run(act())


def test_what_is_not_to_be_kept_or_anothers_is_not_found():
    async def act():
        asked = service("Yes.")
        asked.keys = {"one": Caller("1"), "two": Caller("2")}
        async with fronted(asked) as world, client(world, "one") as one, client(world, "two") as two:
            unkept = await one.responses.create(model="", input="x", store=False)
            kept = await one.responses.create(model="", input="x")
            for asking, response_id in ((one, unkept.id), (two, kept.id)):
                with pytest.raises(openai.NotFoundError):
                    await asking.responses.retrieve(response_id)
                with pytest.raises(openai.NotFoundError):
                    await asking.responses.delete(response_id)
            assert (await one.responses.retrieve(kept.id)).id == kept.id

    run(act())


def test_the_store_keeps_what_there_is_room_for_of_each_and_of_all():
    def one(name: str, size: int = 100) -> Stored:
        return Stored({"id": name, "x": "y" * size}, [])

    def held(key: str) -> list[str]:
        found = []
        for name in ("a", "b", "c", "big"):
            try:
                found.append(store.get(key, name).response["id"])
            except ServiceError as error:
                assert error.kind is Kind.NOT_FOUND
        return found

    store = ResponseStore(max_each=300, max_all=400)
    for name in ("a", "b", "c"):
        store.put("one", one(name))
    assert held("one") == ["b", "c"]
    for name in ("a", "b"):
        store.put("two", one(name))
    assert (held("one"), held("two")) == (["c"], ["a", "b"])
    store.put("two", one("big", 400))
    assert held("two") == ["a", "b"]
    store.delete("one", "c")
    assert held("one") == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_off_is_incomplete(stream):
    async def act():
        for text, kinds in (("Sun", ["message"]), (ONE["hermes"][:60], ["function_call"]), ('<tool_call>{"na', [])):
            async with fronted(service(text, finish_reason="length")) as world, client(world) as asking:
                made = await asking.responses.create(model="", input="x", tools=TOOLS, stream=stream)
                if stream:
                    events = [event async for event in made]
                    assert events[-1].type == "response.incomplete"
                    made = events[-1].response
            assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
            assert [(item.type, item.status) for item in made.output] == [(kind, "incomplete") for kind in kinds]

    run(act())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "x", "arguments": [1]}]}, "input[0].arguments"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "content"),
        ({"input": [{"type": "reasoning", "summary": [5]}]}, "input[0].summary[0].text"),
        ({"input": "x", "instructions": 5}, "instructions"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "y"}}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "text": 5}, "text"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "x", "reasoning": 5}, "reasoning"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "seed": "x"}, "seed"),
        ({"input": "x", "include": INCLUDED, "tools": TOOLS}, "include"),
        ({"input": "x", "include": [*INCLUDED, "nope"]}, "include[1]"),
        ({"input": "x", "include": [{}]}, "include[0]"),
        ({"input": "x", "top_logprobs": 2, "tools": TOOLS}, "top_logprobs"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "x", "top_logprobs": True}, "top_logprobs"),
        ({"input": "x", "store": "yes"}, "store"),
        ({"input": "x", "metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"input": "x", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "x", "stream": 1}, "stream"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_faults_name_their_field(body, param):
    async def act():
        async with fronted(service("x")) as world:
            error = error_of(await world.client.post(URL, json=body), 400)
            assert error["param"] == param

    run(act())


def test_a_prompt_that_is_too_long_is_the_bodys_input():
    async def act():
        made = ScriptedService((ServiceError(Kind.TOO_LONG, "prompt of 9 tokens leaves no room.", field="prompt"),))
        async with fronted(made) as world:
            error = error_of(await world.client.post(URL, json={"input": "x"}), 400)
            assert (error["param"], error["code"]) == ("input", "context_length_exceeded")

    run(act())


def test_what_changes_no_answer_is_taken_and_an_answer_can_be_repeated():
    async def act():
        asked = service("x")
        hints = {"max_tool_calls": 3, "truncation": "auto", "context_management": [{"type": "compaction"}]}
        hints |= {"top_logprobs": 0, "client_metadata": {"a": "b"}, "background": False, "text": {"verbosity": "low"}}
        async with fronted(asked) as world:
            told = await world.client.post(URL, json={"input": "x", "seed": -1, "top_k": 5, "stop": "END", **hints})
            assert told.status_code == 200, told.text
        [(_, call, _)] = asked.asked
        params = call.params
        assert (params.seed, params.top_k, params.stop) == (2**64 - 1, 5, ("END",))

    run(act())


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_named_as_the_body_names_it(stream):
    async def act():
        asked = service("x")
        for own, param in (
            ("json_schema", "text.format.schema"),
            ("max_tokens", "max_output_tokens"),
            ("seed", "seed"),
        ):
            asked.script = (ServiceError(Kind.INVALID, f"{own}=5 is refused.", field=f"params.{own}"),)
            async with fronted(asked) as world:
                error = error_of(await world.client.post(URL, json={"input": "x", "stream": stream}), 400)
            assert (error["param"], error["message"]) == (param, f"{param}=5 is refused.")

    run(act())


@pytest.mark.parametrize(("asked", "num_top"), [({"include": INCLUDED}, 0), ({"top_logprobs": 2}, 2)])
def test_log_probabilities_come_with_texts(asked, num_top):
    async def act():
        async with fronted(ScriptedService()) as world, client(world) as asking:
            made = await asking.responses.create(model="", input="ab", **asked)
            stream = await asking.responses.create(model="", input="ab", stream=True, **asked)
            events = [event async for event in stream]
            again = [event async for event in await asking.responses.retrieve(made.id, stream=True)]
        [item] = made.output
        logprobs = item.content[0].logprobs
        assert "".join(one.token for one in logprobs) == made.output_text == "user:ab\n"
        assert all(one.logprob == -0.5 and len(one.top_logprobs) == num_top for one in logprobs)
        assert events[-1].response.output[0].content[0].logprobs == logprobs
        for told in (events, again):
            deltas = [one for event in told if event.type == "response.output_text.delta" for one in event.logprobs]
            [done] = [event for event in told if event.type == "response.output_text.done"]
            assert [one.token for one in deltas] == [one.token for one in done.logprobs] == list(made.output_text)

    run(act())


def test_an_error_within_a_stream_fails_the_response():
    async def act():
        asked = service("x")
        asked.script = (*answer("ab")[:2], ServiceError(Kind.UNAVAILABLE, "The engine is gone."))
        async with fronted(asked) as world, client(world) as asking:
            stream = await asking.responses.create(model="", input="x", stream=True)
            events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert failed.error.message == "The engine is gone." and failed.store is False
        streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert [(one.status, one.content[0].text) for one in failed.output] == [("incomplete", streamed)] and streamed
        assert [error.kind for _, error in asked.refusals] == [Kind.UNAVAILABLE]

    run(act())


def test_an_error_before_a_stream_has_its_status():
    async def act():
        asked = service("x")
        asked.script = (ServiceError(Kind.EXHAUSTED, "Too much.", retry_after_s=2.0),)
        async with fronted(asked) as world, client(world) as asking:
            with pytest.raises(openai.RateLimitError):
                await asking.responses.create(model="", input="x", stream=True)

    run(act())


def test_a_call_that_a_stop_ended_is_incomplete():
    async def act():
        async with fronted(service(ONE["hermes"][:60])) as world:
            told = (await world.client.post(URL, json={"input": "x", "tools": TOOLS, "stop": "Paris"})).json()
        [call] = told["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")

    run(act())


@pytest.mark.parametrize(("text", "count"), [("hm</think>Yes", 10), ("hm", 2), ("</think>Yes", 0)])
def test_tokens_of_thoughts_are_counted(text, count):
    async def act():
        async with fronted(service(text, OPENED)) as world:
            used = (await world.client.post(URL, json={"input": "x"})).json()["usage"]
        assert used["output_tokens_details"]["reasoning_tokens"] == count <= used["output_tokens"] == len(text)

    run(act())
