# SPDX-License-Identifier: Apache-2.0
"""The engine thread takes orders between steps, tells what came of them, and survives what a step raises."""

import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from metrale_jax.sampling.params import SamplingParams
from serving.core.changes import LoadProgress, Stage
from serving.core.engine_thread import MAX_PURGES, MAX_RAISED, EngineThread
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from serving.core.orders import Began, CancelOrder, EmbedOrder, GenerateOrder, Vectors
from tests.serving.core.fake_llm import FakeLLM


class Heard:
    """What a thread tells."""

    def __init__(self):
        self.reports, self.deaths = [], []
        self.ready, self.dead = threading.Event(), threading.Event()
        self._news = threading.Condition()

    def deliver(self, reports):
        with self._news:
            self.reports += reports
            self._news.notify_all()

    def die(self, reason):
        self.deaths.append(reason)
        self.dead.set()

    def until(self, found, timeout_s=10):
        with self._news:
            assert self._news.wait_for(lambda: found(self.reports), timeout_s), self.reports
            return list(self.reports)

    def of(self, job_id):
        return [report.news for report in self.reports if report.job_id == job_id]


def ended(*job_ids):
    return lambda reports: {report.job_id for report in reports if report.last} >= set(job_ids)


@pytest.fixture
def started():
    threads = []

    def start(llm, load=None, **options):
        heard = Heard()
        thread = EngineThread(
            load or (lambda: llm), heard.deliver, lambda llm: None, lambda llm: heard.ready.set(), heard.die, **options
        )
        threads.append(thread)
        thread.start()
        return thread, heard

    yield start
    for thread in threads:
        assert thread.stop(10)


def order(job_id, *max_tokens, prompt=(1, 2), shared=0):
    return GenerateOrder(
        job_id,
        tuple(SimpleNamespace(prompt=prompt, params=SamplingParams(max_tokens=count)) for count in max_tokens),
        shared,
    )


def test_an_order_comes_back_as_deltas_and_an_end(started):
    llm = FakeLLM()
    thread, heard = started(llm)
    assert heard.ready.wait(5) and llm.num_warmed == 1
    thread.put(order(1, 3))
    heard.until(ended(1))
    began, *deltas, end = heard.of(1)
    assert isinstance(began, Began)
    assert deltas == [Delta(0, "a", (0,)), Delta(0, "b", (1,)), Delta(0, "c", (2,))]
    assert isinstance(end, Ended) and end.result.text == "abc"
    assert [delta.usage.generated_tokens for delta in deltas] == [1, 2, 3] and deltas[0].usage == replace(
        end.result.usage, generated_tokens=1
    )


def test_branches_are_told_apart_and_the_last_one_ends_the_job(started):
    thread, heard = started(llm := FakeLLM())
    thread.put(order(1, 1, 3, 2, shared=2))
    heard.until(ended(1))
    ends = [news.index for news in heard.of(1) if isinstance(news, Ended)]
    assert ends == [0, 2, 1] and llm.forks == [(3, 2)]
    assert [report.last for report in heard.reports if isinstance(report.news, Ended)] == [False, False, True]


def test_a_cancelled_job_is_given_back_before_the_next_step(started):
    gate, entered = threading.Semaphore(0), threading.Semaphore(0)

    def wait():
        entered.release()
        gate.acquire()

    llm = FakeLLM(wait)
    thread, heard = started(llm)
    thread.put(order(1, 1000))
    entered.acquire()
    thread.put(CancelOrder(1))
    steps = llm.num_steps
    gate.release()
    entered.acquire()  # one step with nobody left in it
    assert llm.cancelled and llm.num_steps == steps + 1 and not llm.running
    thread.put(order(2, 1))
    gate.release(1000)
    heard.until(ended(2))
    assert not any(isinstance(news, Ended) for news in heard.of(1))


def test_an_order_that_cannot_be_queued_is_told_and_the_rest_of_it_taken_back(started):
    llm = FakeLLM()
    thread, heard = started(llm)
    good, bad = order(1, 5).prepared[0], order(1, 5, prompt=()).prepared[0]
    thread.put(GenerateOrder(1, (good, bad)))
    heard.until(ended(1))
    (error,) = heard.of(1)
    assert isinstance(error, ServiceError) and error.kind is Kind.INVALID and error.field == "prompt"
    assert len(llm.cancelled) == 1


def test_vectors_are_made_between_the_steps_of_others(started):
    thread, heard = started(llm := FakeLLM())
    thread.put(order(1, 20))
    thread.put(EmbedOrder(2, ((1, 2, 3), (4,)), "mean", True))
    heard.until(ended(1, 2))
    began, vectors = heard.of(2)
    assert isinstance(began, Began) and isinstance(vectors, Vectors)
    assert [one.vector for one in vectors.embedded] == [(3.0, 0.5), (1.0, 0.5)]
    place = [report.news for report in heard.reports].index(vectors)
    assert 3 <= sum(report.job_id == 1 for report in heard.reports[:place]) <= 10 and llm.num_steps >= 20


def raising(times, error=RuntimeError):
    """A step that raises so many times, then goes on."""
    left = [times]

    def step():
        if left[0] > 0:
            left[0] -= 1
            raise error("a fault")

    return step


@pytest.mark.parametrize("num_faults", range(1, MAX_RAISED))
def test_a_step_that_raises_now_and_then_costs_nobody_anything(started, caplog, num_faults):
    caplog.set_level(logging.CRITICAL)
    thread, heard = started(FakeLLM(raising(num_faults)))
    thread.put(order(1, 3))
    heard.until(ended(1))
    assert isinstance(heard.of(1)[-1], Ended) and not heard.deaths


def test_who_is_in_steps_that_keep_raising_is_told_and_others_are_served(started, caplog):
    caplog.set_level(logging.CRITICAL)
    thread, heard = started(llm := FakeLLM(raising(MAX_RAISED)))
    thread.put(order(1, 3))
    heard.until(ended(1))
    (error,) = heard.of(1)
    assert isinstance(error, ServiceError) and error.kind is Kind.INTERNAL and "a fault" not in str(error)
    assert len(llm.cancelled) == 1
    thread.put(order(2, 2))
    heard.until(ended(2))
    assert heard.of(2)[-1].result.text == "ab" and not heard.deaths


def test_an_engine_that_cannot_go_on_dies_with_a_reason(started, caplog):
    caplog.set_level(logging.CRITICAL)
    thread, heard = started(FakeLLM(raising(MAX_RAISED * MAX_PURGES)))
    for job_id in range(MAX_PURGES):
        thread.put(order(job_id, 3))
        if job_id < MAX_PURGES - 1:
            heard.until(ended(job_id))
    assert heard.dead.wait(10)
    assert heard.deaths == ["the engine ended with RuntimeError"] and thread.pulse.last.phase == "ended"


def test_a_model_that_does_not_load_is_told(started, caplog):
    caplog.set_level(logging.CRITICAL)

    def load():
        raise ValueError("secret path")

    _, heard = started(None, load)
    assert heard.dead.wait(10) and heard.deaths == ["the engine ended with ValueError"] and not heard.ready.is_set()


@pytest.mark.parametrize("stage", ["load", "warm"])
def test_one_that_is_told_to_end_while_it_loads_serves_nobody(stage):
    goes, came = threading.Event(), threading.Event()
    heard, llm = Heard(), FakeLLM()

    def wait():
        came.set()
        goes.wait(10)
        return llm

    if stage == "warm":
        llm.warm_up = wait
    thread = EngineThread(
        wait if stage == "load" else lambda: llm,
        heard.deliver,
        lambda llm: None,
        lambda llm: heard.ready.set(),
        heard.die,
    )
    thread.start()
    assert came.wait(10) and not thread.stop(0.01)
    goes.set()
    assert thread.stop(10) and not heard.ready.is_set() and not heard.deaths and llm.num_spilled == 0


def test_a_load_that_is_given_up_is_no_death():
    heard, progress = Heard(), LoadProgress()

    def load():
        while True:
            progress("load", 1, 2)

    thread = EngineThread(load, heard.deliver, lambda llm: None, lambda llm: heard.ready.set(), heard.die)
    thread.start()
    progress.abandon()
    assert thread.stop(10) and not heard.deaths and not heard.ready.is_set()
    assert progress.stages == (Stage("load", 1, 2),)


def test_compiling_inside_a_step_is_a_phase_of_its_own(started):
    seen = []

    def compile_something():
        seen.append(thread.pulse.last.phase)
        with llm.loaded.steps.on_compile("x"):
            seen.append(thread.pulse.last.phase)
        seen.append(thread.pulse.last.phase)

    llm = FakeLLM(compile_something)
    thread, heard = started(llm)
    thread.put(order(1, 1))
    heard.until(ended(1))
    assert seen[:3] == ["step", "compile", "step"]


def test_an_idle_thread_runs_no_steps_and_keeps_prefixes_when_it_ends(started):
    llm = FakeLLM()
    thread, heard = started(llm)
    thread.put(order(1, 1))
    heard.until(ended(1))
    assert thread.stop(10)
    assert llm.num_steps <= 2 and llm.num_spilled == 1
