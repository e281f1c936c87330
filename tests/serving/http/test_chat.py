# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions over a service that does as it is told."""

import asyncio

import pytest

from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from tests.serving.http.fronts import error_of, events_of, fronted, joined, run
from tests.serving.scripted import ScriptedService, answer, ids_of, result

URL = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_has_openais_shape():
    async def act():
        service = ScriptedService(answer("well"))
        async with fronted(service) as world:
            asked = HELLO | {"model": "scripted", "max_completion_tokens": 9, "chat_template_kwargs": {"mood": "calm"}}
            body = (await world.client.post(URL, json=asked, headers={"x-request-id": "r1"})).json()
            assert body.pop("created") > 0
            assert body == {
                "id": "chatcmpl-r1",
                "object": "chat.completion",
                "model": "scripted",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "well", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 4,
                    "total_tokens": 7,
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            }
        [(_, call, _)] = service.asked
        assert call.prompt.messages == ({"role": "user", "content": "hi"},) and call.params.max_tokens == 9
        assert call.prompt.template == {"add_generation_prompt": True, "mood": "calm"}

    run(act())


def test_a_stream_begins_with_the_role_and_ends_with_a_reason_and_what_it_took():
    async def act():
        async with fronted(ScriptedService(answer("yes"))) as world:
            asked = HELLO | {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
            *chunks, usage, done = events_of((await world.client.post(URL, json=asked)).text)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert [choice["delta"] for choice in choices] == [
                {"role": "assistant", "content": ""},
                {"content": "y"},
                {"content": "e"},
                {"content": "s"},
                {},
            ]
            assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
            assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 6 and done == "[DONE]"
            assert {chunk["object"] for chunk in (*chunks, usage)} == {"chat.completion.chunk"}
            assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1

    run(act())


def test_several_answers_stream_side_by_side():
    async def act():
        async with fronted(ScriptedService()) as world:
            asked = HELLO | {"stream": True, "n": 2, "max_tokens": 4}
            *chunks, _ = events_of((await world.client.post(URL, json=asked)).text)
            texts, reasons = {0: "", 1: ""}, {}
            for chunk in chunks:
                [choice] = chunk["choices"]
                texts[choice["index"]] += choice["delta"].get("content", "")
                reasons[choice["index"]] = choice["finish_reason"]
            assert texts == {0: "user", 1: "user"} and reasons == {0: "length", 1: "length"}

    run(act())


def test_log_probabilities_are_entries_whole_and_in_pieces():
    async def act():
        async with fronted(ScriptedService()) as world:
            asked = HELLO | {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}
            whole = (await world.client.post(URL, json=asked)).json()["choices"][0]["logprobs"]["content"]
            assert whole[0] == {
                "token": "u",
                "logprob": -0.5,
                "bytes": [117],
                "top_logprobs": [{"token": "u", "logprob": -0.5, "bytes": [117]}],
            }
            *chunks, _ = events_of((await world.client.post(URL, json=asked | {"stream": True})).text)
            listed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert joined(one["content"] for one in listed if one) == whole

    run(act())


def test_tokens_whose_text_is_yet_to_come_are_told_where_asked_for():
    script = (Delta(0, "", ids_of("a")), Delta(0, "ab", ids_of("b")), Ended(0, result("ab", finish_reason="abort")))

    async def act():
        async with fronted(ScriptedService(script)) as world:
            asked = HELLO | {"stream": True, "return_token_ids": True}
            choices = [event["choices"][0] for event in events_of((await world.client.post(URL, json=asked)).text)[:-1]]
            assert [choice["token_ids"] for choice in choices] == [[], [97], [98], []]
            assert choices[-1]["finish_reason"] == "length"

    run(act())


def test_an_error_amid_a_stream_is_its_last_event():
    async def act():
        service = ScriptedService((*answer("ab")[:2], ServiceError(Kind.UNAVAILABLE, "gone.", retry_after_s=1)))
        async with fronted(service) as world:
            answered = await world.client.post(URL, json=HELLO | {"stream": True})
            *chunks, last = events_of(answered.text)
            assert answered.status_code == 200 and len(chunks) == 3
            assert last["error"]["code"] == "service_unavailable" and last["error"]["message"] == "gone."
            service.script = (*answer("ab")[:1], RuntimeError("secret"))
            answered = await world.client.post(URL, json=HELLO | {"stream": True})
            assert events_of(answered.text)[-1]["error"]["type"] == "server_error" and "secret" not in answered.text

    run(act())


def test_an_answer_that_failed_among_others_is_an_error():
    failed = result("", finish_reason="error", error=ValueError("the grammar broke"))

    async def act():
        async with fronted(ScriptedService((Ended(0, result("a")), Ended(1, failed)))) as world:
            assert "grammar" in error_of(await world.client.post(URL, json=HELLO | {"n": 2}), 500)["message"]

    run(act())


def test_a_stream_that_has_nothing_to_say_says_so():
    async def act():
        goes = asyncio.Event()
        service = ScriptedService((goes, *answer("ok")))
        async with fronted(service, ping_s=0.02) as world:
            async with world.client.stream("POST", URL, json=HELLO | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                assert (await anext(lines)).startswith(": ")
                goes.set()
                rest = [line async for line in lines]
            assert "data: [DONE]" in rest

    run(act())


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}, "messages[1].role", "not one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        (HELLO | {"tools": [{}]}, "tools[0]", "no tool"),
        (HELLO | {"tool_choice": "required"}, "tool_choice", "no tools"),
        (HELLO | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        (
            HELLO | {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "leave one of them out",
        ),
        (HELLO | {"continue_final_message": "yes"}, "continue_final_message", "neither"),
        (HELLO | {"add_generation_prompt": 1}, "add_generation_prompt", "neither"),
        (HELLO | {"chat_template_kwargs": []}, "chat_template_kwargs", "no object"),
        (HELLO | {"n": 1000}, "n", "128"),
    ],
)
def test_what_is_wrong_is_named(body, param, words):
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            error = error_of(await world.client.post(URL, json=body), 400)
            assert error["param"] == param and words in error["message"] and not service.asked

    run(act())


def test_the_services_prompt_is_the_bodys_messages():
    async def act():
        service = ScriptedService((ServiceError(Kind.INVALID, "too long.", field="prompt"),))
        async with fronted(service) as world:
            assert error_of(await world.client.post(URL, json=HELLO), 400)["param"] == "messages"

    run(act())


def test_the_last_message_is_gone_on_with_where_that_is_asked_for():
    async def act():
        service = ScriptedService(answer("la"))
        async with fronted(service) as world:
            assert (await world.client.post(URL, json=HELLO | {"continue_final_message": True})).status_code == 200
        ((_, call, _),) = service.asked
        assert call.prompt.template == {"add_generation_prompt": False, "continue_final_message": True}

    run(act())
