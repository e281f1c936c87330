# SPDX-License-Identifier: Apache-2.0
"""The sync client against a scripted server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from serving.client import (
    CallCancelledError,
    Client,
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    RetryPolicy,
    ServerError,
    TopLogprob,
    UnauthenticatedError,
    UnavailableError,
    Usage,
)
from serving.client.connection import stays_here
from tests.serving.client.server import WAIT_S, fault

UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def client(target, clock):
    with Client(target, clock=clock) as client:
        yield client


def test_an_answer_comes_whole(client, servicer):
    found = client.generate("one two three", max_tokens=2, logprobs=1, seed=9, request_id="r", model="m")
    assert (found.text, found.token_ids, found.finish_reason) == ("one two ", (0, 1), "length")
    assert found.usage == Usage(5, 2, 2) and found.timings.num_preemptions == 1 and found.timings.queued_s == 0.25
    assert (found.seed, found.request_id, found.model, found.score) == (9, "r", "scripted", None)
    assert found.logprobs[1].token_id == 1 and found.logprobs[1].top == (TopLogprob(2, -0.25, b"\xff"),)
    (call,) = servicer.calls
    assert call[1].model == "m" and call[1].params.max_tokens == 2


def test_n_answers_come_as_one_that_holds_the_others(client):
    found = client.generate("one two", n=3, seed=1)
    assert [(one.index, one.seed) for one in found.choices] == [(0, 1), (1, 2), (2, 3)]
    assert found.total_usage == Usage(5, 2, 6)


def test_a_stream_gives_pieces_and_then_its_result(client):
    with client.stream("one two three", logprobs=0) as stream:
        assert stream.result is None
        pieces = list(stream)
    assert "".join(pieces) == stream.result.text == "one two three "
    assert [piece.token_ids for piece in pieces] == [(0,), (1,), (2,), ()]
    assert [len(piece.logprobs) for piece in pieces] == [1, 1, 1, 0]
    assert pieces[-1].result == stream.result and pieces[0].result is None and stream.request_id == "made-up"


def test_a_stream_of_n_answers_tells_them_apart(client):
    stream = client.stream("one two", n=2)
    pieces = list(stream)
    assert "".join(piece for piece in pieces if piece.index == 1) == "one two "
    assert [one.index for one in stream.result.choices] == [0, 1]


def test_all_other_methods_answer(client, servicer):
    forked = client.fork("one", [{"continuation": "two"}, {"continuation": "three", "seed": 4}], temperature=0)
    assert [(one.text, one.index, one.seed) for one in forked] == [("one two ", 0, 0), ("one three ", 1, 5)]
    assert [piece.index for piece in client.stream_fork("one", [{}, {}])] == [0, 1, 0, 1]
    (score,) = client.score("one", ["two"], num_top=1, cache_salt="s")
    assert score.token_ids == (1, 2) and score.total_logprob == -1.0 and score.logprobs[0].logprob == -0.5
    assert [one.vector for one in client.embed(["a", [1, 2]], pooling="last", normalize=False)] == [(0.5, 1.0)] * 2
    assert client.tokenize("one two").tokens == (b"one", b"two")
    assert client.detokenize([7, 8], skip_special_tokens=True) == "7 8"
    (model,) = client.models()
    assert (model.id, model.vocab_size, model.eos_token_ids) == ("scripted", 256, (0, 2))
    sent = {method: request for method, request, *_ in servicer.calls}
    assert sent["Score"].num_top == 1 and sent["Score"].cache_salt == "s" and sent["Detokenize"].skip_special_tokens
    assert sent["Embed"].HasField("normalize") and not sent["Embed"].normalize


def test_health_is_read_as_the_official_service_writes_it(client):
    assert client.health() == "SERVING" and client.health("metrale.v1.GenerateService") == "NOT_SERVING"
    with pytest.raises(NotFoundError):
        client.health("nobody")


def test_closing_a_stream_cancels_its_call(client, servicer):
    with client.stream("wait for me") as stream:
        assert next(stream) == "wait "
    assert servicer.gone.acquire(timeout=WAIT_S)
    assert list(stream) == [] and stream.result is None


def test_forgetting_a_stream_cancels_its_call(client, servicer):
    stream = client.stream("wait for me")
    assert next(stream) == "wait "
    del stream
    assert servicer.gone.acquire(timeout=WAIT_S)


def test_another_thread_can_close_a_stream_that_is_being_read(client, servicer):
    stream = client.stream("wait for me")
    assert next(stream) == "wait "
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        stream.close()
        assert rest.result(WAIT_S) == []
    assert servicer.gone.acquire(timeout=WAIT_S)


def test_a_stream_that_ends_without_its_answer_is_an_error(client):
    with pytest.raises(ServerError, match="0 of 1 answers"):
        list(client.stream("unfinished work"))


def test_an_error_carries_what_the_details_say(client, servicer):
    servicer.faults = [
        fault(grpc.StatusCode.INVALID_ARGUMENT, "too hot", field="params.temperature", reason="RANGE", domain="metrale")
    ]
    with pytest.raises(InvalidRequestError) as raised:
        client.generate("one")
    error = raised.value
    assert (error.code, error.message) == ("INVALID_ARGUMENT", "too hot")
    assert (error.field, error.reason, error.retry_after_s) == ("params.temperature", "RANGE", None)
    assert len(servicer.calls) == 1


def test_a_call_comes_again_while_the_server_is_unavailable(client, servicer, time):
    servicer.faults = [fault(UNAVAILABLE)] * 3
    assert client.generate("one").text == "one "
    assert time.waits == pytest.approx([0.1, 0.2, 0.4]) and len(servicer.calls) == 4


def test_a_call_gives_up_after_its_tries(target, servicer, clock):
    servicer.faults = [fault(UNAVAILABLE, "loading")] * 3
    few = RetryPolicy(max_attempts=3)
    with Client(target, clock=clock, retries=few) as client, pytest.raises(UnavailableError, match="loading"):
        client.generate("one")
    assert len(servicer.calls) == 3


def test_a_call_comes_again_when_the_server_says(client, servicer, time):
    servicer.faults = [fault(EXHAUSTED, retry_after_s=1.25)]
    assert client.generate("one").text == "one "
    assert time.waits == [1.25]


def test_a_call_does_not_wait_past_its_deadline(client, servicer, time):
    servicer.faults = [fault(EXHAUSTED, retry_after_s=1.25)]
    with pytest.raises(ExhaustedError) as raised:
        client.generate("one", timeout_s=1.2)
    assert raised.value.retry_after_s == 1.25 and time.waits == []


def test_all_tries_share_one_deadline(target, servicer, clock):
    servicer.faults = [fault(EXHAUSTED, retry_after_s=40)]
    with Client(target, clock=clock, retries=RetryPolicy(max_wait_s=60)) as client:
        client.generate("one", timeout_s=100)
    left = [left_s for *_, left_s in servicer.calls]
    assert 90 < left[0] < 102 and 50 < left[1] < 62  # gRPC rounds up


def test_a_stream_comes_again_before_its_first_piece_only(client, servicer, time):
    servicer.faults = [fault(UNAVAILABLE)] * 2
    assert "".join(client.stream("one two")) == "one two " and len(time.waits) == 2
    servicer.faults, servicer.num_before = [fault(UNAVAILABLE)], 1
    stream = client.stream("one two")
    assert next(stream) == "one "
    with pytest.raises(UnavailableError):
        next(stream)
    assert len(time.waits) == 2


def test_nobody_there_is_unavailable(clock):
    few = RetryPolicy(max_attempts=2)
    with Client("127.0.0.1:1", clock=clock, retries=few) as client, pytest.raises(UnavailableError):
        client.models()


def test_a_deadline_ends_calls_and_streams(client, servicer):
    with pytest.raises(DeadlineError):
        client.generate("wait", timeout_s=0.1)
    with pytest.raises(DeadlineError):
        list(client.stream("wait for me", timeout_s=0.1))
    assert servicer.gone.acquire(timeout=WAIT_S) and servicer.gone.acquire(timeout=WAIT_S)


def test_a_client_has_a_timeout_that_calls_can_lift(target, servicer, clock):
    with Client(target, timeout_s=50, clock=clock) as client:
        client.generate("one")
        client.generate("one", timeout_s=float("inf"))
        client.generate("one", timeout_s=20)
    first, second, third = (left_s for *_, left_s in servicer.calls)
    assert 40 < first < 52 and (second is None or second > 1e6) and 10 < third < 22  # gRPC rounds up


def test_a_token_goes_with_every_call(target, servicer, clock):
    with Client(target, token="secret", clock=clock) as client:
        client.generate("one")
        list(client.stream("one"))
        client.models()
        assert "secret" not in repr(client)
    assert [metadata["authorization"] for _, _, metadata, _ in servicer.calls] == ["Bearer secret"] * 3


def test_an_unknown_token_is_an_error_of_its_own(client, servicer):
    servicer.faults = [fault(grpc.StatusCode.UNAUTHENTICATED)]
    with pytest.raises(UnauthenticatedError):
        client.models()
    assert len(servicer.calls) == 1


def test_a_token_does_not_leave_the_machine_in_the_clear():
    with pytest.raises(ValueError, match="without TLS can be read"):
        Client("example.com:50051", token="secret")
    Client("example.com:50051", token="secret", insecure_token=True).close()
    for bad in ("", "line\nbreak", "ключ"):
        with pytest.raises(ValueError, match="no header carries"):
            Client("localhost:1", token=bad)


@pytest.mark.parametrize(
    ("target", "here"),
    [
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.0.1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("unix:/tmp/x", True),
        ("unix:///tmp/x", True),
        ("localhost.example.com:1", False),
        ("10.0.0.1:1", False),
        ("dns:///example.com:1", False),
        ("dns://localhost/example.com:1", False),
        ("127.0.0.1@example.com:1", False),
        ("", False),
    ],
)
def test_what_stays_on_this_machine(target, here):
    assert stays_here(target) is here


def test_sixteen_threads_share_a_client(client):
    def work(number):
        said = f"thread {number}"
        for _ in range(5):
            assert client.generate(said).text == f"{said} "
            assert "".join(client.stream(said)) == f"{said} "
        return number

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == list(range(16))


def test_closing_ends_streams_and_refuses_calls(target, servicer, clock):
    client = Client(target, clock=clock)
    stream = client.stream("wait for me")
    assert next(stream) == "wait "
    ended = threading.Event()

    def read():
        with pytest.raises(CallCancelledError):
            next(stream)
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    client.close()
    reader.join(WAIT_S)
    assert ended.is_set() and servicer.gone.acquire(timeout=WAIT_S)
    with pytest.raises(CallCancelledError, match="client is closed"):
        client.generate("one")
    with pytest.raises(CallCancelledError, match="client is closed"):
        client.stream("one")
