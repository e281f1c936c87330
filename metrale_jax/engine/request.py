# SPDX-License-Identifier: Apache-2.0
"""`Request`: the life of one answer, as the host keeps it. Mutable; never enters `jit`."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metrale_jax.core.errors import MetraleError
from metrale_jax.engine.beam import Hypothesis
from metrale_jax.engine.lease import Lease
from metrale_jax.engine.leaves import Node
from metrale_jax.engine.snapshots import Checkpoint
from metrale_jax.sampling.constraints import Constraint
from metrale_jax.sampling.params import SamplingParams


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a drawn token and of the likeliest ones, `(token id, log-probability)`, before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds since the request was queued, on a monotonic clock; 0 where the point was not reached.

    `queued_s` is when its prompt began to run, so how long it was queued; `first_token_s` when the host had its first
    token, which is also when its prompt was done: the step that runs a prompt's end draws from it. `finished_s` is when
    it ended. A request that is run again keeps the moments that it has.
    """

    queued_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int

    def later(self, seconds: float) -> "RequestMetrics":
        """The same moments, counted from so many seconds earlier."""
        moments = (self.queued_s, self.first_token_s, self.finished_s)
        return RequestMetrics(*(moment + seconds if moment else 0.0 for moment in moments), self.num_preemptions)

    def decode_tokens_per_s(self, num_tokens: int) -> float:
        """Tokens after the first over the time they took; 0 for fewer than two."""
        span = self.finished_s - self.first_token_s
        return (num_tokens - 1) / span if num_tokens > 1 and span > 0 else 0.0


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way to an answer.

    `stop_ids` end the answer, `seed` drives its noise. `watch(new_tokens) -> bool` sees tokens as they stand and ends
    the request by returning true (stop strings live there). `fixed_mask` are the words of the tokens that may ever be
    drawn, `constraint` says which may come next (it covers the fixed ones too); each may be None.
    `namespace` is what its cached blocks are valid for beside their tokens.

    `seq_len` counts tokens whose keys and values are dispatched; `in_flight` counts drawn tokens that the host has not
    seen yet. `known_len` is the length under which the sequence was first run, which length-dependent rotary
    embeddings go by. `slot` is its row of the engine's slot table, 0 for none. `followers` are the other answers to
    the same prompt: they fork from this one where its prompt ends, or where it has run `fork_len` tokens of it, which
    is all that their own prompts have in common with it. `entered` says that its prompt was begun, be it to
    be run again, and is counted. `search` is the beam search that this is a row of, or None; such rows wait for each
    step to be read. `fault` is what its constraint raised when it was last asked for a mask: it ends the request, as
    its `error`, once the step that it left nothing to draw is read.

    Where layers keep recurrent state, `resume` is the snapshot that its slot is to begin with, 0 for none, `cuts` are
    lengths at which chunks of its prompt end, and `checkpoint` is what was last kept of its state while it decoded. One
    whose tokens were all found draws its next one from the row of the unit `drawn_from`, and pins the node `ending`
    until that node's content is where it goes on from.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    max_tokens: int
    queued_at: float
    watch: Callable[[list[int]], bool] | None = None
    fixed_mask: np.ndarray | None = None
    constraint: Constraint | None = None
    namespace: Hashable = ()
    rank: int = 0
    deadline: float = 0.0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    followers: list["Request"] = field(default_factory=list)
    fork_len: int = 0
    search: Any = None
    hypotheses: tuple[Hypothesis, ...] = ()
    lease: Lease | None = None
    resume: int = 0
    drawn_from: int = 0
    ending: Node | None = None
    cuts: tuple[int, ...] = ()
    checkpoint: Checkpoint | None = None
    slot: int = 0
    seq_len: int = 0
    in_flight: int = 0
    known_len: int = 0
    cached_tokens: int = 0
    entered: bool = False
    finish_reason: str = ""
    fault: MetraleError | None = None
    error: MetraleError | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not dispatched yet, the last one drawn included."""
        return self.num_tokens - self.seq_len

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return bool(self.finish_reason)

    @property
    def wants_more(self) -> bool:
        """Whether another token may be dispatched: the limit counts tokens still in flight."""
        if self.finish_reason or (self.search is not None and self.in_flight):
            return False
        return len(self.output) + self.in_flight < self.max_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens `start` to `stop` of prompt and answer."""
        size = len(self.prompt)
        if stop <= size:
            return list(self.prompt[start:stop])
        return [*self.prompt[start:], *self.output[max(0, start - size) : stop - size]]

    def metrics(self) -> RequestMetrics:
        """When what happened."""

        def since(moment):
            return moment - self.queued_at if moment else 0.0

        return RequestMetrics(
            since(self.started_at), since(self.first_token_at), since(self.finished_at), self.num_preemptions
        )
