# SPDX-License-Identifier: Apache-2.0
"""/v1/completions over a service that does as it is told."""

import asyncio

import openai
import pytest

from metrale_jax.results import TokenLogprob
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from tests.serving.http.fronts import error_of, events_of, fronted, joined, run
from tests.serving.scripted import CARD, ScriptedService, answer, ids_of, result

URL = "/v1/completions"
CHAT = [{"role": "user", "content": "a"}]


def test_a_completion_has_openais_shape():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            asked = {
                "model": "scripted",
                "prompt": "hello",
                "max_tokens": 3,
                "seed": 5,
                "top_k": 7,
                "logit_bias": {"3": 1},
            }
            answered = await world.client.post(URL, json=asked, headers={"x-request-id": "r1"})
            body = answered.json()
            assert answered.status_code == 200 and body.pop("created") > 0
            assert body == {
                "id": "cmpl-r1",
                "object": "text_completion",
                "model": "scripted",
                "choices": [{"index": 0, "text": "hel", "logprobs": None, "finish_reason": "length"}],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 3,
                    "total_tokens": 8,
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            }
        [(_, call, _)] = service.asked
        assert (call.params.seed, call.params.top_k, call.params.logit_bias) == (5, 7, ((3, 1),))
        assert (call.info.method, call.info.model, call.info.timeout_s) == (URL, "scripted", None)

    run(act())


def test_a_stream_tells_each_piece_and_its_end():
    async def act():
        async with fronted(ScriptedService()) as world:
            asked = {
                "prompt": "héy",
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            answered = await world.client.post(URL, json=asked)
            assert answered.headers["content-type"].startswith("text/event-stream")
            *chunks, usage, done = events_of(answered.text)
            assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
            choices = [chunk["choices"][0] for chunk in chunks]
            assert [choice["text"] for choice in choices] == ["h", "é", "y", ""]
            assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
            assert joined(choice.get("token_ids", []) for choice in choices) == list("héy".encode())
            assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks)

    run(act())


def test_several_prompts_are_answered_prompt_by_prompt():
    prompts = ["ab", "cde"]

    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            for given in (prompts, [list(ids_of(one)) for one in prompts]):
                body = (await world.client.post(URL, json={"prompt": given, "n": 2})).json()
                told = [(choice["index"], choice["text"]) for choice in body["choices"]]
                assert told == [(0, "ab"), (1, "ab"), (2, "cde"), (3, "cde")]
                assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 10)
            asked = {"prompt": prompts, "n": 2, "stream": True}
            streamed = events_of((await world.client.post(URL, json=asked, headers={"x-request-id": "s"})).text)
            texts = dict.fromkeys(range(4), "")
            for event in streamed[:-1]:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert texts == {0: "ab", 1: "ab", 2: "cde", 3: "cde"}
            assert {call.info.request_id for _, call, _ in service.asked[-2:]} == {"s-0", "s-1"}

    run(act())


def test_prompts_run_together_and_one_that_fails_ends_the_others():
    async def act():
        both, never = asyncio.Event(), asyncio.Event()
        service = ScriptedService()
        service.scripts = {"t-0": (both, *answer("a")), "t-1": (both, *answer("b"))}
        failing = ServiceError(Kind.EXHAUSTED, "later.", retry_after_s=3)
        service.scripts |= {"f-0": (never,), "f-1": (failing,)}
        async with fronted(service) as world:
            asked = {"prompt": ["x", "y"]}
            waiting = asyncio.create_task(world.client.post(URL, json=asked, headers={"x-request-id": "t"}))
            await service.until(lambda: len(service.running) == 2)
            both.set()
            assert [choice["text"] for choice in (await waiting).json()["choices"]] == ["a", "b"]
            for stream in (False, True):
                refused = await world.client.post(URL, json=asked | {"stream": stream}, headers={"x-request-id": "f"})
                assert error_of(refused, 429) and refused.headers["retry-after"] == "3"
                await service.until(lambda: not service.running)
            assert service.cancelled == ["f-0", "f-0"]

    run(act())


def test_best_of_keeps_the_likeliest_and_counts_all():
    async def act():
        drawn = [result(text, logprobs=_logprobs(*values)) for text, values in (("a", (-3.0,)), ("b", (-1.0, -1.0)))]
        service = ScriptedService(tuple(Ended(index, one) for index, one in enumerate(drawn)))
        async with fronted(service) as world:
            body = (await world.client.post(URL, json={"prompt": "p", "best_of": 2})).json()
            [choice] = body["choices"]
            assert (choice["text"], choice["index"], choice["logprobs"]) == ("b", 0, None)
            assert body["usage"]["completion_tokens"] == 2
            assert (service.asked[0][1].params.n, service.asked[0][1].params.logprobs) == (2, 0)

    run(act())


def _logprobs(*values):
    return tuple(TokenLogprob(97, value, ()) for value in values)


def test_log_probabilities_come_in_columns_also_in_pieces():
    async def act():
        async with fronted(ScriptedService()) as world:
            whole = (await world.client.post(URL, json={"prompt": "abc", "logprobs": 2})).json()["choices"][0][
                "logprobs"
            ]
            assert whole["tokens"] == ["a", "b", "c"] and whole["text_offset"] == [0, 1, 2]
            assert whole["token_logprobs"] == [-0.5] * 3
            assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
            asked = {"prompt": "abc", "logprobs": 2, "stream": True}
            pieces = [
                event["choices"][0]["logprobs"]
                for event in events_of((await world.client.post(URL, json=asked)).text)[:-2]
            ]
            for name, column in whole.items():
                assert joined(piece[name] for piece in pieces) == column

    run(act())


@pytest.mark.parametrize("prompt", ["abc", list(b"abc"), ["abc", "abc"], [list(b"abc")]])
def test_prompts_alone_are_echoed_with_what_they_were_worth(prompt):
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            asked = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 0}
            body = (await world.client.post(URL, json=asked)).json()
            for choice in body["choices"]:
                assert choice["text"] == "abc" and choice["logprobs"] == {
                    "tokens": ["a", "b", "c"],
                    "token_logprobs": [None, -0.5, -0.5],
                    "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}],
                    "text_offset": [0, 1, 2],
                }
            assert body["usage"]["completion_tokens"] == 0
            assert body["usage"]["prompt_tokens"] == 3 * len(body["choices"])
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last, done = events_of((await world.client.post(URL, json=asked)).text)
            assert [chunk["choices"] for chunk in chunks] == [[choice] for choice in body["choices"]]
            assert (last["usage"], done) == (body["usage"], "[DONE]")
            assert {method for method, _, _ in service.asked} == {"score"}

    run(act())


def test_a_stream_begins_with_the_prompt_that_is_to_be_echoed():
    async def act():
        async with fronted(ScriptedService()) as world:
            client = openai.AsyncOpenAI(base_url=f"{world.base_url}/v1", api_key="none", max_retries=0)
            async with client:
                for more in ({}, {"max_tokens": 0}):
                    stream = await client.completions.create(model="", prompt="ab", echo=True, stream=True, **more)
                    assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"
                    assert world.service.asked[-1][0] == ("score" if more else "generate")
            assert world.service.asked[0][1].params.echo is True

    run(act())


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({}, "prompt", "prompt=None"),
        ({"prompt": [["a"]]}, "prompt", "no token id"),
        ({"prompt": ["a", 1]}, "prompt", "prompt=1"),
        ({"prompt": ["a"] * 257}, "prompt", "over the limit"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not served"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "set echo"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "-1"),
        ({"prompt": "a", "n": 129}, "n", "from 1 to 128"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of", "below n=2"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "stream"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo", "stream"),
        ({"prompt": "a", "stream": "yes"}, "stream", "neither true nor false"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "needs a stream"),
        ({"prompt": "a", "model": 3}, "model", "no text"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "'hot'"),
        ({"prompt": "a", "nonsense": 1}, "nonsense", "no known field"),
        ({"prompt": "a", "regex": "a", "guided_regex": "b"}, "regex", "two names"),
        ({"prompt": "a", "structured_outputs": {"json": {}}, "guided_json": {}}, "json_schema", "two names"),
        ({"prompt": "a", "json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema", "two names"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"prompt": "a", "structured_outputs": {"whisper": 1}}, "structured_outputs", "whisper"),
    ],
)
def test_what_is_wrong_is_named(body, param, words):
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            error = error_of(await world.client.post(URL, json=body), 400)
            assert error["param"] == param and words in error["message"]
            assert error["type"] == "invalid_request_error" and not service.asked

    run(act())


@pytest.mark.parametrize(
    "given", [{"guided_json": {"type": "string"}}, {"structured_outputs": {"json": {"type": "string"}, "regex": None}}]
)
def test_vllms_names_of_structures_are_taken(given):
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            assert (await world.client.post(URL, json={"prompt": "a"} | given)).status_code == 200
            assert service.asked[0][1].params.json_schema == '{"type": "string"}'

    run(act())


def test_errors_of_the_service_keep_their_kind_and_name_fields_of_the_body():
    kinds = {
        ServiceError(Kind.INVALID, "bad.", field="params.top_p"): (400, "top_p"),
        ServiceError(Kind.NOT_FOUND, "none.", field="model"): (404, "model"),
        ServiceError(Kind.FORBIDDEN, "no."): (403, None),
        ServiceError(Kind.TOO_LATE, "late."): (408, None),
        ServiceError(Kind.UNAVAILABLE, "loading.", retry_after_s=5): (503, None),
        ServiceError(Kind.INTERNAL, "ours."): (500, None),
        RuntimeError("secret"): (500, None),
    }

    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            for error, (status, param) in kinds.items():
                service.script = (error,)
                for stream in (False, True):
                    told = error_of(await world.client.post(URL, json={"prompt": "a", "stream": stream}), status)
                    assert told["param"] == param and "secret" not in told["message"]
            assert CARD.id == "scripted" and len(service.refusals) == 2 * len(kinds)

    run(act())


FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": 1}}}


@pytest.mark.parametrize(
    "given, own, param",
    [
        ({"json_schema": {"a": 1}}, "json_schema", "json_schema"),
        ({"response_format": FORM}, "json_schema", "response_format.json_schema.schema"),
        ({"guided_json": {"a": 1}}, "json_schema", "guided_json"),
        ({"guided_grammar": "x"}, "grammar", "guided_grammar"),
        ({"structured_outputs": {"regex": "("}}, "regex", "structured_outputs.regex"),
    ],
)
@pytest.mark.parametrize("url, asked", [(URL, {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})])
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_named_as_the_body_names_it(given, own, param, url, asked, stream):
    refused = ServiceError(Kind.INVALID, f"{own}='x' is refused (no).", field=f"params.{own}")

    async def act():
        async with fronted(ScriptedService((refused,))) as world:
            told = await world.client.post(url, json={**asked, **given, "stream": stream})
            error = error_of(told, 400)
            assert (error["param"], error["message"]) == (param, f"{param}='x' is refused (no).")
            assert len(world.service.refusals) == 1

    run(act())


def test_a_limit_is_named_as_the_body_names_it():
    async def act():
        async with fronted(ScriptedService()) as world:
            for name in ("max_tokens", "max_completion_tokens"):
                told = await world.client.post("/v1/chat/completions", json={"messages": CHAT, name: -1})
                error = error_of(told, 400)
                assert error["param"] == name and error["message"].startswith(f"{name}=-1")

    run(act())


@pytest.mark.parametrize("url, body", [(URL, {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})])
def test_a_call_that_is_refused_before_it_said_anything_has_a_status(url, body):
    refused = ServiceError(Kind.INVALID, "nothing is allowed.", field="params.allowed_token_ids")

    async def act():
        async with fronted(ScriptedService((Delta(0, ""), refused))) as world:
            told = await world.client.post(url, json=body | {"stream": True, "return_token_ids": True})
            assert error_of(told, 400)["param"] == "allowed_token_ids"

    run(act())


def test_the_time_that_a_caller_has_goes_with_the_call():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            await world.client.post(URL, json={"prompt": "a"}, headers={"x-request-timeout": "1.5"})
            assert service.asked[0][1].info.timeout_s == 1.5

    run(act())
