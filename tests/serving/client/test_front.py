# SPDX-License-Identifier: Apache-2.0
"""The client against the project's own front, over a scripted service: what both make of the contract."""

import asyncio

import pytest

from serving.client import AsyncClient, CallCancelledError, ExhaustedError, InvalidRequestError, UnauthenticatedError
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.grpc.server import make_server
from serving.grpc.settings import GrpcSettings
from tests.serving.scripted import ScriptedService, ids_of

PATIENCE_S = 10


def run(work, service, **options):
    """Runs `work(client)` with a client of a front over `service`."""

    async def whole():
        front = make_server(service, GrpcSettings(port=0))
        await front.start()
        front.set_serving(True)
        try:
            async with asyncio.timeout(PATIENCE_S), AsyncClient(f"127.0.0.1:{front.port}", **options) as client:
                await work(client)
        finally:
            await front.stop()

    asyncio.run(whole())


def test_all_methods_understand_each_other():
    async def work(client):
        whole = await client.generate("abc", n=2, seed=5, logprobs=2, max_tokens=None)
        assert [(one.text, one.seed, one.finish_reason) for one in whole.choices] == [
            ("abc", 5, "stop"),
            ("abc", 6, "stop"),
        ]
        assert whole.logprobs[0].token == b"a" and [top.token for top in whole.logprobs[0].top] == [b"a", b"b"]
        assert whole.model == "scripted" and whole.request_id and whole.timings.queued_s == 0.25
        stream = client.stream([97, 98], max_tokens=1)
        assert [piece async for piece in stream] == ["a", ""]
        assert stream.result.token_ids == (97,) and stream.result.finish_reason == "length"
        assert stream.result.usage.prompt_tokens == 2 and stream.request_id == stream.result.request_id
        forked = await client.fork("a", ["b", {"continuation": [99]}], max_tokens=None)
        assert [one.text for one in forked] == ["ab", "ac"]
        (score,) = await client.score("a", ["bc"], num_top=1)
        assert score.token_ids == ids_of("bc") and score.total_logprob == -1.0 and score.usage.prompt_tokens == 1
        assert [len(one.vector) for one in await client.embed(["a", [1, 2]])] == [4, 4]
        chat = await client.tokenize([{"role": "user", "content": "hi"}])
        assert b"".join(chat.tokens) == b"user:hi\n" and bytes(chat.token_ids) == b"user:hi\n"
        assert await client.detokenize([104, 105]) == "hi"
        assert [model.id for model in await client.models()] == ["scripted"]
        assert await client.health() == await client.health("metrale.v1.GenerateService") == "SERVING"

    run(work, ScriptedService())


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_told_before_anything_is_sent(timeout_s):
    async def work(client):
        with pytest.raises(ValueError, match="not above 0"):
            await client.generate("abc", timeout_s=timeout_s)

    run(work, ScriptedService())


def test_every_parameter_arrives_as_it_was_given():
    service = ScriptedService()
    given = {
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["x"],
        "logit_bias": {3: 1.5},
        "bad_words": ["no", [1, 2]],
        "allowed_token_ids": [97],
        "early_stopping": "never",
        "json_schema": {"type": "object"},
        "top_k": -1,
        "cache_salt": "s",
    }

    async def work(client):
        await client.generate("abc", **given, timeout_s=60)

    run(work, service)
    call = service.asked[0][1]
    assert (call.params.temperature, call.params.max_tokens, call.params.stop) == (0.5, 7, ("x",))
    assert call.params.logit_bias == ((3, 1.5),) and call.params.bad_words == ("no", (1, 2))
    assert call.params.allowed_token_ids == (97,) and call.params.early_stopping == "never"
    assert call.params.json_schema == '{"type": "object"}' and call.params.top_k == -1 and call.params.cache_salt == "s"
    assert 50 < call.info.timeout_s < 62


def test_errors_arrive_with_their_details():
    service = ScriptedService(keys={"good": Caller(key_id="k")})

    async def work(client):
        with pytest.raises(InvalidRequestError, match="temperature") as raised:
            await client.generate("abc", temperature=-1)
        assert raised.value.field == "params.temperature" and raised.value.reason == "INVALID"
        service.failure = ServiceError(Kind.EXHAUSTED, "Come later.", retry_after_s=99.5)
        with pytest.raises(ExhaustedError, match="Come later") as raised:
            await client.score("abc")
        assert raised.value.retry_after_s == 99.5

    run(work, service, token="good")

    async def refused(client):
        with pytest.raises(UnauthenticatedError):
            await client.models()

    run(refused, service, token="bad")


def test_closing_and_leaving_end_requests_in_the_service():
    never = asyncio.Event()
    service = ScriptedService(script=(Delta(0, "a", ids_of("a")), never))

    async def work(client):
        async with client.stream("abc", request_id="closed") as stream:
            assert await anext(stream) == "a"
        await service.until(lambda: service.cancelled == ["closed"])
        left = client.stream("abc", request_id="left")
        assert await anext(left) == "a"
        await client.close()
        await service.until(lambda: service.cancelled == ["closed", "left"])

    run(work, service)


def test_a_session_runs_cancels_and_finishes():
    service = ScriptedService()

    async def work(client):
        never = asyncio.Event()
        service.scripts["held"] = (Delta(0, "a", ids_of("a")), never)
        async with client.session() as session:
            held = session.stream("abc", request_id="held")
            assert await anext(held) == "a"
            answers = await asyncio.gather(*(session.generate(f"request {number}") for number in range(20)))
            assert [one.text for one in answers] == [f"request {number}" for number in range(20)]
            session.cancel("held")
            with pytest.raises(CallCancelledError):
                await anext(held)
            await service.until(lambda: "held" in service.cancelled)
            with pytest.raises(InvalidRequestError) as raised:
                await session.generate("abc", temperature=-1)
            assert raised.value.field == "params.temperature"
            last = session.stream("last")
            await session.finish()
            assert "".join([piece async for piece in last]) == "last"

    run(work, service)
