# SPDX-License-Identifier: Apache-2.0
"""`Engine`: the host loop. Admits, plans, launches one step ahead of what it has read, and reads.

The input of a decode step is the token that the step before left on the device, so step n + 1 is dispatched before
the tokens of step n are seen. An answer that turns out to have ended gets one row too many, whose token is dropped.
The pool is rebound in the statement that donates it. Not safe for threads: callers hold a lock of their own.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine import batcher
from metrale_jax.engine.admission import Ask, Limits, checked_request
from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.buckets import ShapePlan, make_shape_plan
from metrale_jax.engine.lease import BlockCopy, Lease
from metrale_jax.engine.reader import read_tokens
from metrale_jax.engine.request import Request
from metrale_jax.engine.scheduler import Budget, View, Waiting, plan_step
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from metrale_jax.state.pool import make_pool, zeros
from metrale_jax.steps.build import Steps
from metrale_jax.steps.outcome import StepOutput
from pallas_kernels.shapes import ceil_div


@dataclass(frozen=True)
class Launched:
    """A step whose tokens the host has not read: its output and the requests that have a token in it, by row."""

    out: StepOutput
    rows: tuple[tuple[int, Request], ...]


class Engine:
    """Continuous batching of requests over one model. `fill` makes the pool's arrays (tests pass NaN)."""

    def __init__(
        self,
        model: Model,
        params: DecoderParams,
        config: EngineConfig,
        steps: Steps | None = None,
        fill: Callable = zeros,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model, self.params, self.config, self.clock = model, params, config, clock
        self.steps = steps or Steps(model)
        self.shapes: ShapePlan = make_shape_plan(config, len(model.config.eos_token_ids))
        num_groups = len(model.layout.groups)
        count = blocks_for(model.layout, config)
        self.allocators = tuple(BlockAllocator(count) for _ in range(num_groups))
        self.limits = Limits(
            config.max_context_tokens, model.config.vocab_size, config.block_size, count - 1, self.shapes.stop_ids
        )
        self._fresh_pool = partial(make_pool, model.layout, (count,) * num_groups, fill)
        self.pool = self._fresh_pool()
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = []
        self.joining: list[Request] = []
        self.unread: deque[Launched] = deque()
        self._state = None
        self._stale = False
        self._last_was_prefill = False
        self._ids = itertools.count(1)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        eos_token_ids: tuple[int, ...],
        watch: Callable[[list[int]], bool] = lambda tokens: False,
    ) -> Request:
        """A request, queued. Raises `RequestError` for a prompt or parameters that can never be served."""
        ask = Ask(prompt, params, seed, eos_token_ids, watch)
        request = checked_request(next(self._ids), ask, self.limits, self.clock())
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request now, with what it has; a finished one stays as it is."""
        if not request.finished:
            self._finish(request, "abort")

    def step(self) -> bool:
        """Plans and launches one step, reads what is due, and says whether work is left."""
        plan = plan_step(self._view(), Budget(self.config.prefill_tokens, self.config.prefill_rows))
        self._last_was_prefill = bool(plan.prefill)
        if plan.prefill:
            by_id = {request.request_id: request for request in self.waiting}
            self._launch_prefill([(by_id[chunk.request_id], chunk.num_tokens) for chunk in plan.prefill])
        elif plan.decode:
            self._launch_decode()
        else:
            self._read_all()
        while len(self.unread) > 1:
            self._read_oldest()
        return bool(self.waiting or self.running or self.unread)

    @property
    def running(self) -> list[Request]:
        """Requests past their prompt, in order of rows."""
        return [row for row in self.rows if row is not None] + self.joining

    def check(self) -> None:
        """Asserts that an idle engine holds nothing."""
        for allocator in self.allocators:
            allocator.check()
            if not self.waiting and not self.running:
                assert allocator.num_free == allocator.num_usable, "an idle engine holds blocks"

    def _view(self) -> View:
        front = list(itertools.islice(self.waiting, self.config.prefill_rows))
        holding = sum(request.lease is not None for request in front)
        return View(
            waiting=[
                Waiting(
                    request.request_id,
                    request.num_tokens - request.seq_len,
                    ceil_div(request.num_tokens + 1, self.config.block_size),
                    request.lease is not None,
                )
                for request in front
            ],
            running=[request.request_id for request in self.running],
            free_rows=self.config.max_sequences - len(self.running) - holding,
            free_blocks=min(allocator.num_free for allocator in self.allocators),
            last_was_prefill=self._last_was_prefill,
        )

    def _launch_prefill(self, chunks: list[tuple[Request, int]]) -> None:
        for request, _ in chunks:
            if request.lease is None:
                self._admit(request)
        num_tokens, num_rows = self.shapes.prefill_shape(sum(size for _, size in chunks), len(chunks))
        requests = [request for request, _ in chunks]
        padded = [*requests, *[None] * (num_rows - len(requests))]
        state = batcher.rows_state(padded, self.shapes, len(self.allocators), self.model.config.vocab_size)
        tokens, lengths = batcher.chunk_tokens(chunks, num_tokens, num_rows)
        out = self._run("prefill", requests, state, tokens, lengths)
        if out is None:
            return
        for request, size in chunks:
            request.seq_len += size
            if request.lease.drop_behind_windows(request.seq_len):
                self._stale = True
        done = tuple((row, request) for row, request in enumerate(requests) if request.seq_len == request.num_tokens)
        for _, request in done:
            self.waiting.remove(request)
            request.in_flight += 1
            self.joining.append(request)
        self.unread.append(Launched(out, done))

    def _admit(self, request: Request) -> None:
        windows = tuple(spec.window for spec in self.model.layout.groups)
        request.lease = Lease(self.allocators, windows, self.config.block_size)
        request.lease.grow(request.num_tokens, 0)
        request.known_len = max(request.known_len, len(request.prompt))
        request.started_at = request.started_at or self.clock()

    def _launch_decode(self) -> None:
        self._settle_rows()
        active = [row for row in self.rows if row is not None]
        if not active or not self._make_room(active):
            return
        if self._stale:
            tables = batcher.block_tables(self.rows, self.shapes, len(self.allocators))
            self._state = self._state.replace(block_tables=tables, seq_len=batcher.seq_lens(self.rows))
            self._stale = False
        out = self._run("decode", active, self._state)
        if out is None:
            return
        for request in active:
            request.seq_len += 1
            request.in_flight += 1
        self.unread.append(Launched(out, tuple((i, row) for i, row in enumerate(self.rows) if row is not None)))

    def _settle_rows(self) -> None:
        """Rows without the requests that want no more, with those that join; rebuilt from the host's own knowledge
        when a request joins or half of the rows stand empty, which needs every token read first."""
        leaving = [row for row in self.running if not row.wants_more or self._outgrown(row)]
        kept = len(self.running) - len(leaving)
        if leaving or self.joining or (kept and self.shapes.decode_rows(kept) < len(self.rows)):
            self._read_all()
        for row in leaving:
            if row.lease is not None:
                self._requeue(row)
        if self.joining or (self.running and self.shapes.decode_rows(len(self.running)) < len(self.rows)):
            members = self.running
            self.joining = []
            self.rows = [*members, *[None] * (self.shapes.decode_rows(len(members)) - len(members))] if members else []
            self._state = batcher.rows_state(self.rows, self.shapes, len(self.allocators), self.model.config.vocab_size)

    def _outgrown(self, request: Request) -> bool:
        limit = self.model.config.recompute_len
        return bool(limit) and request.known_len <= limit <= request.seq_len

    def _make_room(self, active: list[Request]) -> bool:
        """Blocks for one more token of each row, or false after giving back the newest request's."""
        copies: list[BlockCopy] = []
        fits = True
        for request in active:
            fits = request.lease.can_grow(request.seq_len + 1, request.seq_len)
            if not fits:
                break
            if request.lease.missing(request.seq_len + 1):
                self._stale = True
                request.lease.drop_behind_windows(request.seq_len)
            copies += request.lease.grow(request.seq_len + 1, request.seq_len)
        if copies:
            self._copy(copies)
        if not fits:
            self._read_all()
            # What is read may have ended some. A lone one lacks what a half-filled prompt holds, which goes on next.
            if len(self.running) > 1:
                self._requeue(max(self.running, key=lambda row: row.request_id))
        return fits

    def _copy(self, copies: list[BlockCopy]) -> None:
        groups = range(len(self.allocators))
        pairs = [[(c.source, c.target) for c in copies if c.group == group] for group in groups]
        width = max(len(pair) for pair in pairs)
        padded = np.asarray([pair + [(0, 0)] * (width - len(pair)) for pair in pairs], np.int32)
        sources, targets = (tuple(np.ascontiguousarray(x) for x in padded[:, :, side]) for side in (0, 1))
        self.pool = self.steps.run("copy_blocks", self.pool, sources, targets)
        self._stale = True

    def _run(self, name: str, requests: list[Request], state, *arguments) -> StepOutput | None:
        """The output of a step, or None after failing its requests because the device could not run it."""
        wanted = max((r.params.logprobs if r.params.logprobs is not None else -1 for r in requests), default=-1)
        most = min(MAX_LOGPROBS, self.model.config.vocab_size)
        num_logprobs = 0 if wanted < 0 else 1 if wanted <= 1 else most
        try:
            self.pool, state, out = self.steps.run(
                name, self.params, self.pool, state, *arguments, num_logprobs=num_logprobs
            )
        except jax.errors.JaxRuntimeError as error:
            lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool))
            self._recover(requests, error, pool_lost=lost)
            return None
        if name == "decode":
            self._state = state
        return out

    def _recover(self, requests: Sequence[Request], error: Exception, pool_lost: bool) -> None:
        for request in requests:
            self._fail(request, RequestError(f"{request.request_id}: the device could not run the step ({error})."))
        if pool_lost:
            # What others had in it is recomputed; tokens that nobody has read are drawn again.
            self.unread.clear()
            self.pool = self._fresh_pool()
            others = [*self.running, *(r for r in self.waiting if r.lease is not None)]
            for request in sorted(others, key=lambda r: r.request_id, reverse=True):
                request.in_flight = 0
                self._requeue(request)

    def _read_all(self) -> None:
        while self.unread:
            self._read_oldest()

    def _read_oldest(self) -> None:
        launched = self.unread.popleft()
        if not launched.rows:
            return
        try:
            read = list(read_tokens(launched.out, launched.rows, self.clock))
        except jax.errors.JaxRuntimeError as error:
            # A step that failed after its dispatch left nothing sound in the pool it returned.
            self._recover([request for _, request in launched.rows], error, pool_lost=True)
            return
        for request, reason, error in read:
            if error is not None:
                self._fail(request, error)
            elif reason:
                self._finish(request, reason)

    def _fail(self, request: Request, error: MetraleError) -> None:
        if not request.finished:
            request.error = error
            self._finish(request, "error")

    def _finish(self, request: Request, reason: str) -> None:
        if request.finished:
            return
        request.finish_reason = reason
        request.finished_at = self.clock()
        self._withdraw(request)

    def _requeue(self, request: Request) -> None:
        """Back to the head of the queue; its past is recomputed, under its new length where that matters.

        A half-filled prompt stays before it: behind one that cannot enter it would hold its blocks for good.
        """
        if self._outgrown(request):
            request.known_len = request.num_tokens
        else:
            request.num_preemptions += 1
        self._withdraw(request)
        request.seq_len = 0
        self.waiting.insert(sum(other.lease is not None for other in self.waiting), request)

    def _withdraw(self, request: Request) -> None:
        if request.lease is not None:
            request.lease.release()
            request.lease = None
        if request in self.rows:
            self.rows[self.rows.index(request)] = None
            self._stale = True
        elif request in self.joining:
            self.joining.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
