# SPDX-License-Identifier: Apache-2.0
"""GenerateService's methods of one request, over a scripted service, by the client that grpc makes."""

import asyncio
import dataclasses

import grpc
import pytest

from metrale_jax.results import TokenLogprob
from serving.core.calls import Caller
from serving.core.events import Delta, Ended
from serving.grpc.stubs import generate_pb2 as pb
from tests.serving.grpc.fronts import asked, fronted, refused, run
from tests.serving.scripted import CARD, ScriptedService, answer, result


async def received(call) -> list[pb.GenerateResponse]:
    return [response async for response in call]


def test_an_answer_streams_and_ends_with_the_whole():
    async def check():
        async with fronted(ScriptedService()) as world:
            call = world.stub.Generate(asked("héllo", "q-1", max_tokens=4, seed=2**64 - 1))
            responses = await received(call)
            assert [one.WhichOneof("event") for one in responses] == ["delta"] * 4 + ["done"]
            assert {one.request_id for one in responses} == {"q-1"}
            assert [one.delta.text for one in responses[:4]] == ["h", "é", "l", "l"]
            assert responses[1].delta.token_ids == [0xC3, 0xA9]
            done = responses[-1].done
            assert (done.text, done.finish_reason, done.seed) == ("héll", pb.FINISH_REASON_LENGTH, 2**64 - 1)
            assert list(done.token_ids) == list("héll".encode())
            assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.generated_tokens) == (6, 1, 5)
            timings = done.timings
            assert (timings.queued_s, timings.first_token_s, timings.finished_s) == (0.25, 0.5, 2.5)
            assert (timings.decode_tokens_per_s, timings.num_preemptions) == (2.0, 1)
            assert not done.HasField("score")
            assert ("x-request-id", "q-1") in tuple(await call.initial_metadata())

    run(check())


def test_a_request_without_an_id_gets_a_fresh_one():
    async def check():
        async with fronted(ScriptedService()) as world:
            answers = [await world.stub.GenerateUnary(asked()) for _ in range(2)]
            ids = {one.request_id for one in answers}
            assert len(ids) == 2 and "" not in ids
            assert ids == set(world.service.ended)

    run(check())


def test_only_whole_answers_come_where_deltas_are_not_wanted():
    async def check():
        async with fronted(ScriptedService()) as world:
            request = asked(n=3)
            request.only_whole = True
            responses = await received(world.stub.Generate(request))
            assert [one.done.index for one in responses] == [0, 1, 2]

    run(check())


def test_all_answers_come_at_once_by_their_index():
    async def check():
        script = (Ended(1, result("b")), Delta(0, "aa", (97, 97)), Ended(0, result("aa", score=-1.5)))
        async with fronted(ScriptedService(script)) as world:
            whole = await world.stub.GenerateUnary(asked(n=2))
            assert [(one.index, one.text) for one in whole.answers] == [(0, "aa"), (1, "b")]
            assert (whole.usage.prompt_tokens, whole.usage.generated_tokens) == (3, 3)
            assert whole.model == CARD.id and whole.answers[0].score == -1.5

    run(check())


def test_log_probabilities_come_with_their_tokens():
    async def check():
        async with fronted(ScriptedService()) as world:
            responses = await received(world.stub.Generate(asked("ab", logprobs=2)))
            one = responses[0].delta.logprobs[0]
            assert (one.token_id, one.logprob, one.token) == (97, -0.5, b"a")
            assert [(top.token_id, top.logprob, top.token) for top in one.top] == [(97, -0.5, b"a"), (98, -1.5, b"b")]
            assert [one.token for one in responses[-1].done.logprobs] == [b"a", b"b"]

    run(check())


def test_a_prompts_log_probabilities_come_with_the_whole():
    async def check():
        known = (TokenLogprob(98, float("-inf"), ()),)
        script = (Ended(0, result("x", prompt_token_ids=(97, 98), prompt_logprobs=known)),)
        async with fronted(ScriptedService(script)) as world:
            (done,) = (await world.stub.GenerateUnary(asked())).answers
            assert list(done.prompt_token_ids) == [97, 98]
            assert done.prompt_logprobs[0].logprob == float("-inf")

    run(check())


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_why_an_answer_ended_is_told(reason):
    async def check():
        async with fronted(ScriptedService(answer("x", finish_reason=reason))) as world:
            whole = await world.stub.GenerateUnary(asked())
            assert pb.FinishReason.Name(whole.answers[0].finish_reason) == f"FINISH_REASON_{reason.upper()}"

    run(check())


def test_branches_come_under_their_index():
    async def check():
        async with fronted(ScriptedService()) as world:
            branches = [pb.Branch(continuation=pb.Prompt(text=text)) for text in ("x", "yz")]
            request = pb.ForkRequest(request_id="f", prompt=pb.Prompt(text="ab"), branches=branches)
            responses = await received(world.stub.Fork(request))
            texts = ["".join(one.delta.text for one in responses if one.delta.index == index) for index in (0, 1)]
            assert texts == ["abx", "abyz"]
            assert [one.done.index for one in responses if one.WhichOneof("event") == "done"] == [0, 1]
            ((method, call, _),) = world.service.asked
            assert (method, call.info.method, call.info.request_id) == ("fork", "Fork", "f")

    run(check())


def test_texts_are_scored():
    async def check():
        async with fronted(ScriptedService()) as world:
            continuations = [pb.Prompt(text="xy"), pb.Prompt(text="z")]
            request = pb.ScoreRequest(
                prompt=pb.Prompt(text="abc"), continuations=continuations, num_top=1, request_id="s"
            )
            response = await world.stub.Score(request)
            assert [list(one.token_ids) for one in response.scores] == [[120, 121], [122]]
            assert [one.total_logprob for one in response.scores] == [-1.0, -0.5]
            assert response.scores[0].logprobs[1].top[0].token == b"y"
            assert response.scores[0].usage.prompt_tokens == 3 and response.request_id == "s"
            alone = await world.stub.Score(pb.ScoreRequest(prompt=pb.Prompt(text="abc")))
            assert len(alone.scores[0].token_ids) == len(alone.scores[0].logprobs) + 1 == 3

    run(check())


def test_texts_become_vectors():
    async def check():
        async with fronted(ScriptedService()) as world:
            request = pb.EmbedRequest(inputs=[pb.Prompt(text="a"), pb.Prompt(text="abc")], normalize=False)
            response = await world.stub.Embed(request)
            assert [list(one.values) for one in response.embeddings] == [[1, 1, 2, 2], [3, 1, 2, 2]]
            assert [one.num_tokens for one in response.embeddings] == [1, 3]

    run(check())


def test_text_becomes_tokens_and_tokens_text():
    async def check():
        async with fronted(ScriptedService()) as world:
            tokens = await world.stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="né")))
            assert list(tokens.tokens) == [b"n", b"\xc3", b"\xa9"]
            text = await world.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
            assert text.text == "né"

    run(check())


def test_models_are_listed():
    async def check():
        async with fronted(ScriptedService()) as world:
            (model,) = (await world.stub.ListModels(pb.ListModelsRequest())).models
            for name, value in dataclasses.asdict(CARD).items():
                told = getattr(model, name)
                assert (tuple(told) if isinstance(value, tuple) else told) == value, name
            world.service.cards = ()
            assert not (await world.stub.ListModels(pb.ListModelsRequest())).models

    run(check())


def test_the_model_asked_for_and_the_callers_deadline_reach_the_service():
    async def check():
        async with fronted(ScriptedService()) as world:
            request = asked(request_id="r")
            request.model = "other"
            await world.stub.GenerateUnary(request, timeout=12.5)
            await received(world.stub.Generate(asked()))
            (_, first, _), (_, second, _) = world.service.asked
            assert (first.info.model, first.info.method, first.info.request_id) == ("other", "GenerateUnary", "r")
            assert 11 < first.info.timeout_s < 14  # gRPC rounds up
            assert second.info.timeout_s is None and second.info.method == "Generate"

    run(check())


@pytest.mark.parametrize("request_id", ["a b", "ü", "x" * 129, "a\nb"])
def test_an_id_that_metadata_cannot_carry_is_refused(request_id):
    async def check():
        async with fronted(ScriptedService()) as world:
            error = await refused(
                world.stub.GenerateUnary(asked(request_id=request_id)), grpc.StatusCode.INVALID_ARGUMENT
            )
            assert "request_id" in error.details() and not world.service.asked

    run(check())


HELD = ("Generate", "GenerateUnary", "Fork")


def held(world, method, **how):
    request = asked(request_id="held")
    if method == "Fork":
        request = pb.ForkRequest(request_id="held", prompt=request.prompt, branches=[pb.Branch()])
    return getattr(world.stub, method)(request, **how)


def waiting() -> ScriptedService:
    return ScriptedService(script=(Delta(0, "a", (97,)), asyncio.Event()))


@pytest.mark.parametrize("method", HELD)
def test_a_cancelled_call_ends_its_request(method):
    async def check():
        async with fronted(waiting()) as world:
            call = held(world, method)
            await world.service.until(lambda: world.service.num_pulled)
            call.cancel()
            await world.service.until(lambda: world.service.cancelled == ["held"])

    run(check())


@pytest.mark.parametrize("method", HELD)
def test_a_deadline_that_passes_ends_its_request(method):
    async def check():
        async with fronted(waiting()) as world:
            await refused(held(world, method, timeout=0.2), grpc.StatusCode.DEADLINE_EXCEEDED)
            await world.service.until(lambda: world.service.cancelled == ["held"])

    run(check())


@pytest.mark.parametrize("method", HELD)
def test_a_client_that_goes_away_ends_its_request(method):
    async def check():
        async with fronted(waiting()) as world:
            call = held(world, method)
            await world.service.until(lambda: world.service.num_pulled)
            await world.channel.close()
            await world.service.until(lambda: world.service.cancelled == ["held"])
            assert call.cancelled() or call.done()

    run(check())


KEYS = {"secret": Caller(key_id="k1", salt="s1")}


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Bearer secret"),),
        (("authorization", "bearer  secret "),),
        (("x-api-key", "secret"),),
        (("x-api-key", "other"), ("authorization", "Bearer secret")),
        (("x-api-key", "secret"), ("authorization", "Basic proxy")),
    ],
    ids=["bearer", "lower", "api-key", "both", "proxy"],
)
def test_a_key_is_read_from_metadata(metadata):
    async def check():
        async with fronted(ScriptedService(keys=KEYS)) as world:
            await world.stub.GenerateUnary(asked(), metadata=metadata)
            caller = world.service.asked[0][2]
            assert (caller.key_id, caller.salt) == ("k1", "s1") and caller.peer.startswith("ipv4:127.0.0.1:")

    run(check())


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "Bearer"),),
        (("authorization", "Basic secret"),),
        (("x-api-key", ""),),
        (("authorization-bin", b"Bearer secret"),),
    ],
    ids=["none", "wrong", "empty", "basic", "empty-api-key", "binary"],
)
def test_without_a_key_that_is_known_nothing_is_served(metadata):
    async def check():
        async with fronted(ScriptedService(keys=KEYS)) as world:
            for method, request in [
                ("Generate", asked()),
                ("GenerateUnary", asked()),
                ("Fork", pb.ForkRequest()),
                ("Score", pb.ScoreRequest()),
                ("Embed", pb.EmbedRequest()),
                ("Tokenize", pb.TokenizeRequest()),
                ("Detokenize", pb.DetokenizeRequest()),
                ("ListModels", pb.ListModelsRequest()),
            ]:
                call = getattr(world.stub, method)(request, metadata=metadata)
                error = await refused(call, grpc.StatusCode.UNAUTHENTICATED)
                assert "secret" not in error.details()
            await refused(world.stub.GenerateStream(metadata=metadata), grpc.StatusCode.UNAUTHENTICATED)
            assert not world.service.asked

    run(check())


def test_the_callers_trace_goes_along():
    async def check():
        trace = {
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "tracestate": "a=1",
            "baggage": "b=2",
        }
        async with fronted(ScriptedService()) as world:
            await world.stub.GenerateUnary(asked(), metadata=(*trace.items(), ("other", "x")))
            await world.stub.GenerateUnary(asked())
            assert [caller.trace for _, _, caller in world.service.asked] == [trace, {}]

    run(check())
