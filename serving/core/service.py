# SPDX-License-Identifier: Apache-2.0
"""`Service`: the one engine behind all fronts. Lives on their event loop; the model lives in the engine thread."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from metrale_jax.sampling.params import SamplingParams
from serving.chat.model import ChatModel
from serving.core.api import AbstractService
from serving.core.calls import (
    Caller,
    CallInfo,
    DetokenizeCall,
    EmbedCall,
    ForkCall,
    GenerateCall,
    Prompt,
    ScoreCall,
    TokenizeCall,
)
from serving.core.cards import chat_model, model_card
from serving.core.engine_thread import EngineThread
from serving.core.errors import Kind, ServiceError
from serving.core.events import Embedded, Ended, Event, ModelCard, Scored
from serving.core.gate import Gate
from serving.core.intake import (
    MAX_TEXTS,
    counted,
    embedding_tokens,
    guessed_tokens,
    prepared,
    prepared_fork,
    prepared_scores,
    prompt_tokens,
    shown_prompt,
    text_of,
)
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.link import EngineLink
from serving.core.orders import EmbedOrder, GenerateOrder
from serving.core.pulse import Watchdog
from serving.core.records import Observer, refusal
from serving.core.tracing import Tracing
from serving.core.turns import Turns
from serving.core.visit import Arrival, Desk, Visit

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

# Answers in the engine for each that can run: so that a slot that is given back is taken at once.
QUEUED_PER_SEQUENCE = 2


@dataclass(frozen=True)
class ServiceSettings:
    """`served_name` is the model's name to clients. `timeout_s` holds for calls that name none (0: as long as it
    takes), `max_timeout_s` for all (0: no bound). A step may take `stuck_after_s`, one that compiles
    `compile_after_s`, before the engine counts as stuck (0: never). `keep_prompts` puts prompts into records.
    `threads` prepare prompts beside the engine."""

    served_name: str
    timeout_s: float = 0.0
    max_timeout_s: float = 0.0
    stuck_after_s: float = 60.0
    compile_after_s: float = 600.0
    keep_prompts: bool = False
    warm_up: bool = True
    threads: int = 2


@dataclass(frozen=True)
class Parts:
    """What the service is put together from."""

    keys: KeyRing
    meter: Meter
    gate: Gate
    lifecycle: Lifecycle
    observer: Observer
    tracing: Tracing
    clock: Callable[[], float] = field(default=time.monotonic)


class Service(AbstractService):
    """`load()` makes the model, in the engine thread. To be made on the running event loop; `start` begins to load."""

    def __init__(self, load: Callable[[], "LLM"], settings: ServiceSettings, parts: Parts):
        self.settings, self.parts = settings, parts
        self._llm: LLM | None = None
        self._cards: tuple[ModelCard, ...] = ()
        self._chat_model: ChatModel | None = None
        self._beside = ThreadPoolExecutor(settings.threads, thread_name_prefix="prepare")
        self.engine = EngineThread(load, self._deliver, self._loaded, self._ready, self._die, settings.warm_up)
        self._link = EngineLink(asyncio.get_running_loop(), self.engine.put)
        self._desk = Desk(
            link=self._link,
            lifecycle=parts.lifecycle,
            meter=parts.meter,
            gate=parts.gate,
            turns=Turns(self._max_inside),
            observer=parts.observer,
            tracing=parts.tracing,
            beside=self._beside,
            clock=parts.clock,
        )
        limits = {"step": settings.stuck_after_s, "compile": settings.compile_after_s}
        self._watchdog = Watchdog(
            self.engine.pulse, {name: limit for name, limit in limits.items() if limit}, self._die
        )

    def start(self) -> None:
        """Begins to load; `lifecycle` tells how far it is."""
        self.engine.start()
        self._watchdog.start()

    async def drain(self, grace_s: float) -> int:
        """Takes no more calls and waits for those under way, at most `grace_s`; how many had to be ended then."""
        self.parts.lifecycle.move(State.DRAINING, "the server is shutting down")
        until = self.parts.clock() + grace_s
        while self._desk.visits and self.parts.clock() < until:
            await asyncio.sleep(0.02)
        left = list(self._desk.visits)
        error = ServiceError(
            Kind.UNAVAILABLE, "the server is shutting down; try again, or another one.", retry_after_s=1.0
        )
        for visit in left:
            visit.fail(error)
        return len(left)

    async def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the engine thread; whether it did in time."""
        self._watchdog.stop()
        stopped = await asyncio.get_running_loop().run_in_executor(None, self.engine.stop, timeout_s)
        self._beside.shutdown(wait=False, cancel_futures=True)
        self.parts.lifecycle.move(State.STOPPED)
        return stopped

    @property
    def llm(self) -> "LLM | None":
        """The model, for its stats; None until it is loaded."""
        return self._llm

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._desk.visits)

    def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Event]:
        return self._events(
            self._arrival(call.info, caller, _operation(call.prompt), call.prompt, params=call.params),
            call.params.n,
            partial(self._generate_order, call, caller),
        )

    def fork(self, call: ForkCall, caller: Caller) -> AsyncIterator[Event]:
        num_branches = counted("branches", call.branches)
        return self._events(
            self._arrival(call.info, caller, "fork", call.prompt), num_branches, partial(self._fork_order, call, caller)
        )

    async def score(self, call: ScoreCall, caller: Caller) -> Sequence[Scored]:
        if len(call.continuations) > MAX_TEXTS:
            counted("continuations", call.continuations)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=call.num_top, cache_salt=call.cache_salt, ignore_eos=True
        )
        with Visit(self._desk, self._arrival(call.info, caller, "score", call.prompt, *call.continuations)) as visit:
            made, skips = await visit.aside(
                lambda: prepared_scores(
                    self._model(call.info), call.prompt, call.continuations, _in_time(params, visit), caller
                )
            )
            await visit.order(lambda job_id: GenerateOrder(job_id, made), len(made))
            found: dict[int, Scored] = {}
            while not visit.finished:
                event = await visit.next()
                if isinstance(event, Ended):
                    found[event.index] = _scored(event, skips[event.index])
            return [found[index] for index in sorted(found)]

    async def embed(self, call: EmbedCall, caller: Caller) -> Sequence[Embedded]:
        counted("inputs", call.inputs)
        with Visit(self._desk, self._arrival(call.info, caller, "embeddings", *call.inputs)) as visit:
            llm = self._model(call.info)
            tokens = await visit.aside(lambda: embedding_tokens(llm, call.inputs))
            await visit.order(lambda job_id: EmbedOrder(job_id, tokens, call.pooling, call.normalize), 1)
            return (await visit.next()).embedded

    async def tokenize(self, call: TokenizeCall, caller: Caller) -> Sequence[int]:
        with Visit(self._desk, self._arrival(call.info, caller, "tokenize", call.prompt, queues=False)) as visit:
            llm = self._model(call.info)
            return await visit.aside(lambda: prompt_tokens(llm, call.prompt))

    async def detokenize(self, call: DetokenizeCall, caller: Caller) -> str:
        given = Prompt(token_ids=call.token_ids)
        with Visit(self._desk, self._arrival(call.info, caller, "detokenize", given, queues=False)) as visit:
            llm = self._model(call.info)
            return await visit.aside(lambda: text_of(llm, call.token_ids, call.skip_special_tokens))

    def models(self) -> Sequence[ModelCard]:
        return self._cards

    def chat_model(self) -> ChatModel:
        self.parts.lifecycle.refuse_unless_serving()
        return self._chat_model

    def authenticate(self, token: str | None, peer: str) -> Caller:
        return self.parts.keys.authenticate(token, peer)

    def refused(self, method: str, peer: str, error: ServiceError) -> None:
        if not error.recorded:
            error.recorded = True
            self.parts.observer(refusal(method, peer, error))

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._llm.loaded.tokenizer if self._llm else None
        spelling = tokenizer.token_bytes(token_id) if tokenizer else b""
        return spelling.decode("utf-8", "replace"), spelling

    async def _events(
        self, arrival: Arrival, num_answers: int, order: Callable[[Visit], Callable]
    ) -> AsyncIterator[Event]:
        with Visit(self._desk, arrival) as visit:
            self._model(arrival.info)
            await visit.order(await visit.aside(lambda: order(visit)), num_answers)
            while not visit.finished:
                yield await visit.next()

    def _generate_order(self, call: GenerateCall, caller: Caller, visit: Visit) -> Callable:
        llm = self._model(call.info)
        made = prepared(llm, prompt_tokens(llm, call.prompt), _in_time(call.params, visit), caller, "")
        return lambda job_id: GenerateOrder(job_id, (made,))

    def _fork_order(self, call: ForkCall, caller: Caller, visit: Visit) -> Callable:
        branches = [replace(branch, params=_in_time(branch.params, visit)) for branch in call.branches]
        made, shared = prepared_fork(self._model(call.info), call.prompt, branches, caller)
        return lambda job_id: GenerateOrder(job_id, made, shared)

    def _arrival(self, info: CallInfo, caller: Caller, operation: str, *prompts: Prompt, **more) -> Arrival:
        own = self.settings.timeout_s or None if info.timeout_s is None else info.timeout_s
        times = [limit for limit in (own, self.settings.max_timeout_s or None) if limit is not None]
        info = replace(info, timeout_s=min(times, default=None), model=info.model or self.settings.served_name)
        text = "\n".join(map(shown_prompt, prompts)) if self.settings.keep_prompts else ""
        return Arrival(info, caller, operation, sum(map(guessed_tokens, prompts)), prompt_text=text, **more)

    def _model(self, info: CallInfo) -> "LLM":
        name = self.settings.served_name
        if info.model not in ("", name):
            raise ServiceError(
                Kind.NOT_FOUND, f"model {info.model[:200]!r} is not served here; ask for {name!r}.", field="model"
            )
        assert self._llm is not None, "calls are let in once the model is there"
        return self._llm

    def _max_inside(self) -> int:
        return QUEUED_PER_SEQUENCE * self._llm.config.max_sequences if self._llm else 0

    # From the engine's and the watchdog's threads.

    def _deliver(self, reports: Sequence) -> None:
        self._link.deliver(reports)

    def _loaded(self, llm: "LLM") -> None:
        self._cards = (model_card(llm, self.settings.served_name),)
        self._chat_model = chat_model(llm)
        self._llm = llm
        self.parts.lifecycle.move(State.WARMING)

    def _ready(self, llm: "LLM") -> None:
        self.parts.lifecycle.move(State.SERVING)

    def _die(self, reason: str) -> None:
        self.parts.lifecycle.move(State.FAILED, reason)
        self._link.sever(ServiceError(Kind.UNAVAILABLE, f"{reason}; the server has to be started again."))


def _in_time(params: SamplingParams, visit: Visit) -> SamplingParams:
    """The params with the call's deadline, where that is the earlier one."""
    left_s = visit.left_s
    if left_s is None or (params.deadline_s is not None and params.deadline_s < left_s):
        return params
    return replace(params, deadline_s=max(left_s, 1e-3))


def _operation(prompt: Prompt) -> str:
    return "text_completion" if prompt.messages is None else "chat"


def _scored(event: Ended, skip: int) -> Scored:
    result = event.result
    tokens, logprobs = result.prompt_token_ids[skip:], result.prompt_logprobs[max(0, skip - 1) :]
    return Scored(tokens, logprobs, len(result.prompt_token_ids), result.usage.cached_tokens)
