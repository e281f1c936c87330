# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with one request or one step, and what the others see of it: nothing."""

import jax
import numpy as np
import pytest

from metrale_jax.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LENGTHS = (27, 3, 45, 1, 16, 31, 8, 32, 20)


def crowd(kit, lengths=LENGTHS, vocab=130):
    rng = np.random.default_rng(sum(lengths))
    return [kit.job(rng.integers(3, vocab, length), seed=index) for index, length in enumerate(lengths)]


def assert_solo(kit, jobs, requests):
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == kit.solo(job), f"request of {len(job.prompt)} tokens: {request.error}"


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 20])
def test_cancelling_frees_at_once_and_disturbs_nobody(kit, after):
    kit = kit("gemma2")
    jobs = crowd(kit)
    engine = kit.engine(16, 14)
    requests = [kit.submit(engine, job) for job in jobs]
    for _ in range(after):
        engine.step()
    gone = requests[after % 3 :: 3]
    for request in gone:
        whole = list(request.output)
        done_before = request.finished
        engine.cancel(request)
        engine.cancel(request)
        assert request.finished and request.lease is None
        assert done_before or (request.finish_reason == "abort" and request.output == whole)
    engine.check()
    late = kit.submit(engine, jobs[0])
    kit.finish(engine)
    kept = [(job, request) for job, request in zip(jobs, requests, strict=True) if request not in gone]
    assert_solo(kit, *zip(*kept, (jobs[0], late), strict=True))
    for job, request in zip(jobs, requests, strict=True):
        assert request.output == kit.solo(job)[: len(request.output)], "nothing is appended wrongly before or after"


def test_a_row_that_has_ended_writes_to_blocks_of_others_no_more(kit):
    kit = kit("gemma2")
    first, second, third = crowd(kit, (17, 3, 45))
    engine = kit.engine(16, 9)
    leaving, staying = kit.submit(engine, first), kit.submit(engine, second)
    late = kit.submit(engine, third)
    while len(leaving.output) < 2:
        engine.step()
    assert late.lease is None, "too few blocks"
    engine.cancel(leaving)
    engine.step()
    assert late.lease is not None and 0 < late.seq_len < 45, "it has blocks that were another's, and waits for its turn"
    kit.finish(engine)
    assert_solo(kit, (second, third), (staying, late))


def test_cancelling_everything_leaves_an_idle_engine(kit):
    kit = kit("gemma2")
    engine = kit.engine(16, 14)
    requests = [kit.submit(engine, job) for job in crowd(kit)]
    for _ in range(7):
        engine.step()
    for request in requests:
        engine.cancel(request)
    kit.finish(engine, most_steps=2)


def test_logits_that_are_not_finite_end_their_request_alone(kit):
    kit = kit("phi3-longrope")
    # One token's embedding is broken; the head has weights of its own.
    params = kit.params.replace(embed=kit.params.embed.at[130].set(np.nan))
    jobs = crowd(kit)
    broken = kit.job([5, 6, 130, 9, *range(10, 30)])
    engine = kit.engine(16, 12, params)
    requests = [kit.submit(engine, job) for job in jobs]
    bad = kit.submit(engine, broken)
    kit.finish(engine)
    assert bad.finish_reason == "error" and bad.output == []
    assert f"logits of request {bad.request_id} are not finite after 24 tokens" in str(bad.error)
    unharmed = [(job, request) for job, request in zip(jobs, requests, strict=True) if 130 not in kit.solo(job)]
    assert len(unharmed) > 5
    assert_solo(kit, *zip(*unharmed, strict=True))


class Failing:
    """`Steps` whose `nth` program of one name raises, having taken the pool with it or not."""

    def __init__(self, steps, name, nth, takes_pool):
        self._steps, self._name, self._takes_pool = steps, name, takes_pool
        self._left = nth

    def executable(self, name, *arguments, **static):
        program = self._steps.executable(name, *arguments, **static)

        def run(*arguments):
            self._left -= name == self._name
            if name == self._name and self._left == 0:
                if self._takes_pool:
                    jax.tree.map(lambda leaf: leaf.delete(), arguments[1])
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return program(*arguments)

        return run


@pytest.mark.parametrize(
    ("step", "nth", "takes_pool"),
    [
        *(("advance", nth, takes_pool) for nth in (1, 2, 4, 12) for takes_pool in (True, False)),
        *(("finish", nth, False) for nth in (1, 5)),
    ],
)
@pytest.mark.parametrize("name", ["gemma2", "phi3-longrope"])
def test_a_step_that_the_device_refuses_fails_its_own_requests_only(kit, name, step, nth, takes_pool):
    kit = kit(name)
    jobs = crowd(kit)
    # Prompts in one piece or in several: what is drawn again must not be taken twice.
    engine = kit.engine(64 if nth == 2 else 16, 14)
    engine.device._steps = Failing(engine.device._steps, step, nth, takes_pool)
    requests = [kit.submit(engine, job) for job in jobs]
    kit.finish(engine)
    failed = [request for request in requests if request.finish_reason == "error"]
    assert failed and len(failed) < len(requests)
    for request in failed:
        assert "RESOURCE_EXHAUSTED" in str(request.error)
        assert str(request.request_id) in str(request.error)
    whole = [(job, request) for job, request in zip(jobs, requests, strict=True) if request not in failed]
    assert_solo(kit, *zip(*whole, strict=True))
    late = kit.submit(engine, jobs[0])
    kit.finish(engine)
    assert_solo(kit, [jobs[0]], [late])


def test_a_step_whose_failure_shows_when_it_is_read_fails_its_own_requests_only(kit, monkeypatch):
    kit = kit("gemma2")
    jobs = crowd(kit)
    engine = kit.engine(16, 20)
    requests = [kit.submit(engine, job) for job in jobs]
    for _ in range(9):
        engine.step()
    doomed = [request for _, request in engine.unread[0].rows if not request.finished]
    assert doomed

    def lost(out):
        monkeypatch.undo()
        raise jax.errors.JaxRuntimeError("INTERNAL: the device was lost")

    monkeypatch.setattr(engine.device, "fetch", lost)
    before = engine.device.pool
    kit.finish(engine)
    assert engine.device.pool is not before
    assert [request for request in requests if request.finish_reason == "error"] == doomed
    assert all("the device was lost" in str(request.error) for request in doomed)
    whole = [(job, request) for job, request in zip(jobs, requests, strict=True) if request not in doomed]
    assert whole
    assert_solo(kit, *zip(*whole, strict=True))
