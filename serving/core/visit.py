# SPDX-License-Identifier: Apache-2.0
"""`Visit`: one call's way through the service, from its admission to the record that it leaves."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from metrale_jax.results import GenerationResult
from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import Caller, CallInfo
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended, Event
from serving.core.link import AbstractReceiver, EngineLink
from serving.core.orders import Began, Order, Vectors
from serving.core.outbox import Outbox
from serving.core.parts import Parts
from serving.core.records import CallRecord
from serving.core.tracing import call_attributes, ended_attributes
from serving.core.turns import Turns

# What a call whose time is up may still get from the engine, which ends it too.
LAST_WORD_S = 0.25


@dataclass(frozen=True)
class Desk:
    """What every call of one model passes: `parts` of the service, the model's engine and turns in it, threads beside.
    `refuse()` raises `ServiceError` where the model takes no calls. `visits` are the calls inside."""

    parts: Parts
    link: EngineLink
    turns: Turns
    beside: Executor
    refuse: Callable[[], None]
    visits: set["Visit"] = field(default_factory=set)


@dataclass(frozen=True)
class Arrival:
    """A call as it comes: an `operation` as traces name it, of about `guessed_tokens`. Only what `queues` runs on the
    engine. `prompt_text` is for the record, where that keeps prompts."""

    info: CallInfo
    caller: Caller
    operation: str
    guessed_tokens: int
    params: SamplingParams | None = None
    prompt_text: str = ""
    queues: bool = True


class Visit(AbstractReceiver):
    """A context: entering it admits the call or raises `ServiceError`; leaving it, however, gives back all it held."""

    def __init__(self, desk: Desk, arrival: Arrival):
        self._desk, self._arrival = desk, arrival
        self._info, self._caller, self._guessed = arrival.info, arrival.caller, arrival.guessed_tokens
        self._outbox, self._job_id, self._num_left, self._ordered_s = Outbox(), 0, 0, 0.0
        self._permit = self._place = self._span = self._turn = None
        self._arrived = desk.parts.clock()
        timeout_s = self._info.timeout_s
        self._until = None if timeout_s is None else self._arrived + timeout_s
        self._moments: dict[str, float] = {}
        self._results: list[GenerationResult] = []
        self._num_answers = self._num_drawn = self._num_embedded = 0
        self._needs_model = True

    def __enter__(self) -> "Visit":
        desk, info, arrival = self._desk, self._info, self._arrival
        parts = desk.parts
        known = call_attributes(arrival.operation, info.model, arrival.params)
        self._span = parts.tracing.span(f"{arrival.operation} {info.model}", self._caller.trace, known)
        self._span.__enter__()
        try:
            parts.lifecycle.refuse_unless_serving()
            desk.refuse()
            if not info.background:
                self._permit = parts.meter.admit(self._caller.key_id, self._guessed)
            if arrival.queues and not info.background:
                self._place = parts.gate.enter(self._guessed, info.timeout_s)
        except ServiceError as error:
            self._leave(error)
            raise
        self._note("admitted_s")
        desk.visits.add(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)

    @property
    def left_s(self) -> float | None:
        """Seconds that the caller will still wait; None for no end."""
        return None if self._until is None else max(0.0, self._until - self._desk.parts.clock())

    @property
    def finished(self) -> bool:
        """Whether all that was ordered has come."""
        return self._num_left == 0

    @property
    def needs_model(self) -> bool:
        """Whether there is still something to come from the model."""
        return self._needs_model

    def fail(self, error: ServiceError) -> None:
        """Ends the call from outside."""
        self._needs_model = False
        if self._turn is not None:
            self._turn.end()
        self._outbox.fail(error)

    async def aside(self, work: Callable[[], Any]) -> Any:
        """What `work()` gives, run in another thread so that the loop goes on. Raises what it raises."""
        loop = asyncio.get_running_loop()
        async with self._in_time():
            return await loop.run_in_executor(self._desk.beside, work)

    async def order(self, make: Callable[[int], Order], num_answers: int) -> None:
        """Gives the engine its order when its turn comes; so many answers (or one set of vectors) are to come."""
        params = self._arrival.params
        async with self._in_time():
            priority = params.priority if params else 0
            taking = self._desk.turns.take(self._caller.key_id, priority, num_answers, self._info.background)
            self._turn = await taking
        self._num_left = self._num_answers = num_answers
        self._ordered_s = self._desk.parts.clock() - self._arrived
        self._job_id = self._desk.link.order(make, self)

    def receive(self, news: Event | Began | Vectors, last: bool) -> None:
        # Here and not in `next`, so that a reader that is slow holds neither its place nor its turn.
        if last:
            self._needs_model = False
            self._turn.end()
        if isinstance(news, Began):
            self._note("queued_s")
            if self._place is not None:
                self._place.started()
            return
        if isinstance(news, Ended):
            # The engine counts from when it got its order; who waits counts from when they asked.
            news = replace(news, result=replace(news.result, metrics=news.result.metrics.later(self._ordered_s)))
            self._results.append(news.result)
        elif isinstance(news, Delta):
            self._drawn(news)
        else:
            self._num_embedded = sum(one.num_tokens for one in news.embedded)
        self._outbox.put(news)

    async def next(self) -> Event | Vectors:
        """The next thing that came. Raises `ServiceError` where an only answer failed, or came too late."""
        async with self._in_time():
            news = await self._outbox.take()
        if not isinstance(news, Delta):
            self._num_left -= 1
        if isinstance(news, Ended):
            self._raise_failure(news.result)
        return news

    def _in_time(self) -> "_InTime":
        return _InTime(self.left_s, self._info.timeout_s)

    def _note(self, name: str) -> None:
        self._moments.setdefault(name, self._desk.parts.clock() - self._arrived)

    def _drawn(self, delta: Delta) -> None:
        self._num_drawn += len(delta.token_ids)
        if "first_token_s" not in self._moments:
            self._note("first_token_s")
            self._span.add_event("first_token")

    def _raise_failure(self, result: GenerationResult) -> None:
        if result.error is None:
            return
        if result.finish_reason == "abort" and self.left_s is not None and self.left_s < LAST_WORD_S:
            raise _too_late(self._info.timeout_s)
        if result.finish_reason == "error" and self._num_answers == 1:
            field_name = result.error.field
            if field_name:
                raise ServiceError(Kind.INVALID, str(result.error), field=f"params.{field_name}")
            raise ServiceError(Kind.INTERNAL, str(result.error))

    def _leave(self, error: BaseException | None) -> None:
        desk = self._desk
        desk.visits.discard(self)
        if self._job_id:
            desk.link.cancel(self._job_id)
        # A call that is left early has told of more tokens than its results hold, a beam search of none.
        generated = max(self._num_drawn, sum(result.usage.generated_tokens for result in self._results))
        if self._turn is not None:
            self._turn.end()
        if self._place is not None:
            self._place.left()
        if self._permit is not None:
            self._permit.close(generated + max(0, self._prompt_tokens() - self._guessed))
        if isinstance(error, ServiceError):
            error.recorded = True
        record = self._record(error, generated)
        self._span.set(ended_attributes(record))
        self._span.__exit__(type(error) if error else None, error, None)
        desk.parts.observer(record)

    def _prompt_tokens(self) -> int:
        return max((result.usage.prompt_tokens for result in self._results), default=self._num_embedded)

    def _record(self, error: BaseException | None, generated: int) -> CallRecord:
        info = self._info
        return CallRecord(
            method=info.method,
            request_id=info.request_id,
            key_id=self._caller.key_id,
            peer=self._caller.peer,
            model=info.model,
            outcome=_outcome(error),
            detail=str(error) if isinstance(error, ServiceError) else "",
            field=error.field if isinstance(error, ServiceError) else "",
            finish_reasons=tuple(result.finish_reason for result in self._results),
            prompt_tokens=self._prompt_tokens(),
            cached_tokens=max((result.usage.cached_tokens for result in self._results), default=0),
            generated_tokens=generated,
            finished_s=self._desk.parts.clock() - self._arrived,
            prompt_text=self._arrival.prompt_text,
            **self._moments,
        )


class _InTime:
    """A context in which waiting past a call's time ends with `ServiceError` (TOO_LATE)."""

    def __init__(self, left_s: float | None, timeout_s: float | None):
        self._timeout, self._timeout_s = asyncio.timeout(left_s), timeout_s

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind, error, trace) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise _too_late(self._timeout_s) from None


def _too_late(timeout_s: float | None) -> ServiceError:
    return ServiceError(
        Kind.TOO_LATE, f"timeout of {timeout_s:.3g} s passed before the answer was whole; allow more, or ask for less."
    )


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, ServiceError):
        return error.kind.value
    return Kind.CANCELLED.value if isinstance(error, asyncio.CancelledError | GeneratorExit) else Kind.INTERNAL.value
