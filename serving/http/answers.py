# SPDX-License-Identifier: Apache-2.0
"""What the APIs that generate have in common: several calls as one, tokens counted up, faults of bodies."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from metrale_jax.core.errors import MetraleError, shown
from metrale_jax.results import GenerationResult
from serving.core.calls import Caller, GenerateCall
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended, Event
from serving.http.desk import Desk
from serving.openai_answer import Label, usage_of

# What OpenAI's clients know; a deadline cuts an answer off as a limit of tokens does.
FINISH_REASONS = {"abort": "length"}


@dataclass(frozen=True)
class Streaming:
    """Whether the answer is `wanted` as a stream, and `usage` at its end."""

    wanted: bool
    usage: bool


def streaming_of(body: Mapping[str, Any]) -> Streaming:
    """What the body says of streaming. Raises `ServiceError`."""
    wanted, options = switch(body, "stream", False), body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _fault("stream_options", options, "is no object; give one, or leave it out")
    if options is not None and not wanted:
        raise _fault("stream_options", options, "needs a stream; set stream to true, or leave it out")
    return Streaming(wanted, switch(options or {}, "include_usage", False))


def switch(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """The truth of that name. Raises `ServiceError` for what is none."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise _fault(name, value, "is neither true nor false; give one")
    return default if value is None else value


def without(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The body but for those fields."""
    return {name: value for name, value in body.items() if name not in names}


def known_only(body: Mapping[str, Any], names: Collection[str]) -> None:
    """Nothing. Raises `ServiceError` for a field that is none of those names."""
    for name, value in body.items():
        if name not in names and value is not None:
            message = f"{shown(name, 80)} is no known field; leave it out, or use one of {', '.join(sorted(names))}."
            raise ServiceError(Kind.INVALID, message, field=name[:80])


@contextmanager
def body_faults() -> Iterator[None]:
    """Out of it a `MetraleError` comes as the fault of the body's field."""
    try:
        yield
    except ServiceError:
        raise
    except MetraleError as error:
        raise ServiceError(Kind.INVALID, str(error), field=error.field) from error


def label_of(desk: Desk, name: str, model: str) -> Label:
    """What an answer says of itself."""
    model = model or "".join(card.id for card in desk.model.models()[:1])
    return Label(name, int(time.time()), model, lambda token: desk.model.token_text(token)[1])


def finish_reason(result: GenerationResult) -> str:
    """Why the answer ended. Raises `ServiceError` where it is none."""
    if result.finish_reason == "error":
        raise ServiceError(Kind.INTERNAL, str(result.error))
    return FINISH_REASONS.get(result.finish_reason, result.finish_reason)


def was_cut(result: GenerationResult) -> bool:
    """Whether the answer ended by a limit, wherever it was. Raises `ServiceError` where it is none."""
    return finish_reason(result) == "length"


@dataclass
class UsageSum:
    """Tokens of answers to several prompts: a prompt counts once."""

    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _generated: int = 0

    def add(self, place: int, result: GenerationResult) -> None:
        """Adds an answer to prompt number `place`."""
        usage = result.usage
        self._prompts[place] = max(usage.prompt_tokens, self._prompts.get(place, 0))
        self._cached[place] = max(usage.cached_tokens, self._cached.get(place, 0))
        self._generated += usage.generated_tokens

    def object(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return usage_of(sum(self._prompts.values()), self._generated, sum(self._cached.values()))


async def merged(desk: Desk, calls: Sequence[GenerateCall], caller: Caller) -> AsyncIterator[tuple[int, Event]]:
    """Events of all calls as they come, with the call's place; each is asked for the next when its last was taken.
    Pieces of nothing are left out: with the first event an answer has begun, and a call that is refused has none.

    Raises the first error of any, once the others are ended.
    """
    streams = [_telling(desk.model.generate(call, caller)) for call in calls]
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    pulls = {asyncio.create_task(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while pulls:
            done, _ = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            for pull in done:
                event, place = pull.result(), pulls[pull]
                if event is not None:
                    yield place, event
                    pulls[asyncio.create_task(_next(streams[place]))] = place
                del pulls[pull]
    finally:
        await _cancelled(pulls)
        for stream in streams:
            await stream.aclose()


async def results_of(desk: Desk, calls: Sequence[GenerateCall], caller: Caller) -> list[list[GenerationResult]]:
    """The answers of each call. Raises `ServiceError`."""
    found: list[dict[int, GenerationResult]] = [{} for _ in calls]
    async with aclosing(merged(desk, calls, caller)) as events:
        async for place, event in events:
            if isinstance(event, Ended):
                found[place][event.index] = event.result
    return [[answers[index] for index in sorted(answers)] for answers in found]


async def gathered(works: Sequence[Coroutine]) -> list[Any]:
    """What all of them give, run together. Raises the first error of any, once the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]
    finally:
        await _cancelled(tasks)


async def _telling(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    async with aclosing(events):
        async for event in events:
            if not isinstance(event, Delta) or event.text or event.token_ids or event.logprobs:
                yield event


async def _next(stream: AsyncIterator[Event]) -> Event | None:
    return await anext(stream, None)


async def _cancelled(tasks: Any) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fault(name: str, value: Any, fault: str) -> ServiceError:
    return ServiceError(Kind.INVALID, f"{name}={shown(value, 80)} {fault}.", field=name)
