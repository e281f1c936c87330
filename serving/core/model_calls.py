# SPDX-License-Identifier: Apache-2.0
"""`ModelCalls`: the calls of a service on one model, the one that serves when the first of them comes."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from metrale_jax.sampling.params import SamplingParams
from serving.chat.model import ChatModel
from serving.core.api import AbstractCalls
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
from serving.core.errors import Kind, ServiceError
from serving.core.events import Embedded, Ended, Event, ModelCard, Scored
from serving.core.hosted_model import HostedModel
from serving.core.intake import (
    MAX_INPUTS,
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
from serving.core.orders import EmbedOrder, GenerateOrder
from serving.core.visit import Arrival, Visit

if TYPE_CHECKING:
    from metrale_jax.llm import LLM


@dataclass(frozen=True)
class CallLimits:
    """`timeout_s` holds for calls that name none (0: as long as it takes), `max_timeout_s` for all (0: no bound).
    `keep_prompts` puts prompts into records."""

    timeout_s: float = 0.0
    max_timeout_s: float = 0.0
    keep_prompts: bool = False


class ModelCalls(AbstractCalls):
    """`host()` is the model that serves now; it is asked once, at the first call or question."""

    def __init__(self, host: Callable[[], HostedModel], limits: CallLimits):
        self._find, self._limits = host, limits
        self._found: HostedModel | None = None
        self._served = self._called = self._planned = False

    def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Event]:
        visit = partial(self._visit, call.info, caller, _operation(call.prompt), call.prompt, params=call.params)
        return self._events(visit, call.info, call.params.n, partial(self._generate_order, call, caller))

    def fork(self, call: ForkCall, caller: Caller) -> AsyncIterator[Event]:
        num_branches = counted("branches", call.branches)
        visit = partial(self._visit, call.info, caller, "fork", call.prompt)
        return self._events(visit, call.info, num_branches, partial(self._fork_order, call, caller))

    async def score(self, call: ScoreCall, caller: Caller) -> Sequence[Scored]:
        if len(call.continuations) > MAX_TEXTS:
            counted("continuations", call.continuations)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=call.num_top, cache_salt=call.cache_salt, ignore_eos=True
        )
        with self._visit(call.info, caller, "score", call.prompt, *call.continuations) as visit:
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
        counted("inputs", call.inputs, MAX_INPUTS)
        with self._visit(call.info, caller, "embeddings", *call.inputs) as visit:
            tokens = await visit.aside(lambda: embedding_tokens(self._model(call.info), call.inputs))
            await visit.order(lambda job_id: EmbedOrder(job_id, tokens, call.pooling, call.normalize), 1)
            return (await visit.next()).embedded

    async def tokenize(self, call: TokenizeCall, caller: Caller) -> Sequence[int]:
        with self._visit(call.info, caller, "tokenize", call.prompt, queues=False) as visit:
            return await visit.aside(lambda: prompt_tokens(self._model(call.info), call.prompt))

    async def detokenize(self, call: DetokenizeCall, caller: Caller) -> str:
        given = Prompt(token_ids=call.token_ids)
        with self._visit(call.info, caller, "detokenize", given, queues=False) as visit:
            return await visit.aside(lambda: text_of(self._model(call.info), call.token_ids, call.skip_special_tokens))

    def models(self) -> Sequence[ModelCard]:
        card = self._host.card
        return (card,) if self._served and card is not None else ()

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._host.tokenizer
        spelling = tokenizer.token_bytes(token_id) if tokenizer else b""
        return spelling.decode("utf-8", "replace"), spelling

    def chat_model(self) -> ChatModel:
        self._host.desk.parts.lifecycle.refuse_unless_serving()
        self._planned = True
        return self._host.chat

    @property
    def _host(self) -> HostedModel:
        if self._found is None:
            self._found = self._find()
            self._served = self._found.serves
            self._found.askers.add(self)
        return self._found

    async def _events(
        self, enter: Callable[[], Visit], info: CallInfo, num_answers: int, order: Callable[[Visit], Callable]
    ) -> AsyncIterator[Event]:
        with enter() as visit:
            self._model(info)
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

    def _visit(self, info: CallInfo, caller: Caller, operation: str, *prompts: Prompt, **more) -> Visit:
        if self._found is not None and self._found.closed and not self._called and not self._planned:
            self._found = None  # it was asked about and is gone by now, and nothing was made for it
        self._called = True
        limits = self._limits
        own = limits.timeout_s or None if info.timeout_s is None else info.timeout_s
        times = [limit for limit in (own, limits.max_timeout_s or None) if limit is not None]
        info = replace(info, timeout_s=min(times, default=None), model=info.model or self._host.name)
        text = "\n".join(map(shown_prompt, prompts)) if limits.keep_prompts else ""
        arrival = Arrival(info, caller, operation, sum(map(guessed_tokens, prompts)), prompt_text=text, **more)
        host = self._host
        host.askers.discard(self)
        return Visit(host.desk, arrival)

    def _model(self, info: CallInfo) -> "LLM":
        name = self._host.name
        if info.model not in ("", name):
            raise ServiceError(
                Kind.NOT_FOUND, f"model {info.model[:200]!r} is not served here; ask for {name!r}.", field="model"
            )
        return self._host.model()


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
