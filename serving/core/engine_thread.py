# SPDX-License-Identifier: Apache-2.0
"""`EngineThread`: the one thread that owns the model and its pool. Orders go in, reports come out, once a step."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from metrale_jax.core.errors import MetraleError
from metrale_jax.engine.device import FAILURES
from serving.core.changes import LoadAbandoned
from serving.core.errors import Kind, ServiceError
from serving.core.intake import as_service_error
from serving.core.jobs import EmbedJob, GenerateJob
from serving.core.orders import CancelOrder, EmbedOrder, GenerateOrder, Order, Report, StopOrder
from serving.core.pulse import Pulse

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

LOG = logging.getLogger(__name__)
# A step that raises is run again, for others' sake; if it raises again, whoever is in it is told so and dropped. An
# engine that cannot go on even so many times in a row, with others in it, is dead.
MAX_RAISED = 2
MAX_PURGES = 3


class EngineThread:
    """Runs `load()`, then steps it while there is work. `deliver(reports)` is called in the thread after each step that
    has news; `on_ready(llm)` once it is loaded and warm, `on_death(reason)` if the thread ends without being told to,
    by `error`. One that is told to end while it loads does so after the load, or when that asks (see `LoadProgress`).

    `pulse` says what it is at: "load", "warm", "step", "compile" (inside a step), "idle", "ended".
    """

    def __init__(
        self,
        load: Callable[[], "LLM"],
        deliver: Callable[[Sequence[Report]], None],
        on_loaded: Callable[["LLM"], None],
        on_ready: Callable[["LLM"], None],
        on_death: Callable[[str], None],
        warm_up: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._load, self._deliver, self._warm_up = load, deliver, warm_up
        self._on_loaded, self._on_ready, self._on_death = on_loaded, on_ready, on_death
        self.pulse = Pulse(clock)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._jobs: dict[int, GenerateJob] = {}
        self._embeds: deque[EmbedJob] = deque()
        self._stopping = self._ending = False
        self.error: BaseException | None = None
        self._num_raised = self._num_purges = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to load."""
        self._thread.start()

    def put(self, order: Order) -> None:
        """Hands in an order, from any thread; it is taken up before the next step."""
        self._orders.put(order)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Asks it to end; whether it has, after at most so long."""
        self._ending = True
        self.put(StopOrder())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            llm = self._loaded()
            if llm is not None:
                self._serve(llm)
        except LoadAbandoned:
            LOG.info("a load was given up")
        except BaseException as error:
            LOG.exception("the engine thread ends")
            self.error = error
            self.pulse.enter("ended")
            self._on_death(_told(error))
        finally:
            self.pulse.enter("ended")
            self._jobs.clear()
            self._embeds.clear()

    def _loaded(self) -> "LLM | None":
        self.pulse.enter("load")
        llm = self._load()
        if self._ending:
            return None
        steps = llm.loaded.steps
        inner = steps.on_compile
        steps.on_compile = lambda name: self._compiling(inner, name)
        self._on_loaded(llm)
        if self._warm_up:
            self.pulse.enter("warm")
            llm.warm_up()
        if self._ending:
            return None
        self._on_ready(llm)
        return llm

    @contextmanager
    def _compiling(self, inner: Callable, name: str) -> Iterator[None]:
        own = threading.current_thread() is self._thread and self.pulse.last.phase == "step"
        if own:
            self.pulse.enter("compile")
        try:
            with inner(name):
                yield
        finally:
            if own:
                self.pulse.enter("step")

    def _serve(self, llm: "LLM") -> None:
        busy = False
        while not self._stopping:
            self.pulse.enter("idle")
            # One that was cancelled may leave a step unread, so whoever is told to go on steps until nothing is left.
            self._take_orders(llm, wait=not busy)
            self.pulse.enter("step")
            reports: list[Report] = []
            busy = self._step(llm, reports)
            self._advance_embeds(reports)
            for job in list(self._jobs.values()):
                reports += job.news()
                if job.finished:
                    del self._jobs[job.job_id]
            if reports:
                self._deliver(reports)
            busy = busy or bool(self._embeds)
        llm.spill()  # what a lower tier can keep for the next start

    def _take_orders(self, llm: "LLM", wait: bool) -> None:
        try:
            while not self._stopping:
                self._take(llm, self._orders.get(block=wait))
                wait = False
        except queue.Empty:
            return

    def _take(self, llm: "LLM", order: Order) -> None:
        match order:
            case StopOrder():
                self._stopping = True
            case CancelOrder():
                job = self._jobs.pop(order.job_id, None)
                if job is not None:
                    job.cancel(llm)
                self._embeds = deque(embed for embed in self._embeds if embed.job_id != order.job_id)
            case EmbedOrder():
                self._embeds.append(EmbedJob(order, llm))
            case GenerateOrder():
                self._queue(llm, order)

    def _queue(self, llm: "LLM", order: GenerateOrder) -> None:
        answers = []
        try:
            if order.shared_tokens:
                answers = llm.submit_forks(order.prepared, order.shared_tokens)
            else:
                for prepared in order.prepared:
                    answers.append(llm.submit_prepared(prepared))
        except MetraleError as error:
            self._refuse(llm, order, answers, as_service_error(error, ""))
            return
        except Exception as error:
            LOG.error("an order could not be queued", exc_info=error)
            self._refuse(llm, order, answers, ServiceError(Kind.INTERNAL, "the request could not be queued."))
            return
        self._jobs[order.job_id] = GenerateJob(order.job_id, answers)

    def _refuse(self, llm: "LLM", order: GenerateOrder, answers: Sequence, error: ServiceError) -> None:
        llm.cancel(answers)
        self._deliver([Report(order.job_id, error, last=True)])

    def _step(self, llm: "LLM", reports: list[Report]) -> bool:
        try:
            busy = llm.step()
        except Exception as error:
            self._raised(llm, error, reports)
            return bool(self._jobs)
        self._num_raised = self._num_purges = 0
        return busy

    def _raised(self, llm: "LLM", error: Exception, reports: list[Report]) -> None:
        # The engine has sent everybody back to the queue: what was under way is run again.
        LOG.error("a step raised", exc_info=error)
        self._num_raised += 1
        if self._num_raised < MAX_RAISED:
            return
        self._num_raised, self._num_purges = 0, self._num_purges + 1
        if self._num_purges == MAX_PURGES:
            raise error
        for job in self._jobs.values():
            job.cancel(llm)
            failed = ServiceError(Kind.INTERNAL, "the engine could not run a step with this request; submit it again.")
            reports.append(Report(job.job_id, failed, last=True))
        self._jobs.clear()

    def _advance_embeds(self, reports: list[Report]) -> None:
        if not self._embeds:
            return
        job = self._embeds.popleft()
        try:
            news = job.advance()
        except MetraleError as error:
            news = Report(job.job_id, as_service_error(error, "inputs"), last=True)
        except FAILURES as error:
            LOG.error("an embedding failed", exc_info=error)
            news = Report(job.job_id, ServiceError(Kind.INTERNAL, "the device could not run it; try again."), last=True)
        if news is not None:
            reports.append(news)
        if news is None or not news.last:
            self._embeds.append(job)


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, MetraleError) else f"the engine ended with {type(error).__name__}"
