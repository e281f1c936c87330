# SPDX-License-Identifier: Apache-2.0
"""`Engine`: the host loop. Admits, plans, launches one step ahead of what it has read, and reads.

The input of a decode step is the token that the step before left on the device, so step n + 1 is dispatched before
the tokens of step n are seen. An answer that turns out to have ended gets one row too many, whose token is dropped.
Only a row whose next token depends on rules that the host keeps (a grammar) waits: its step over the layers is under
way when the host works out what may be drawn. Not safe for threads: callers hold a lock of their own.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine.admission import Ask, Limits, checked_request
from metrale_jax.engine.arrays import padded, score_targets, step_chunks
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.device import FAILURES, Device
from metrale_jax.engine.draws import Draws
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.reader import not_finite, read_prompt_scores, read_tokens
from metrale_jax.engine.request import Request
from metrale_jax.engine.scheduler import Budget, Filling, View, Waiting, plan_chunks
from metrale_jax.engine.search import Search, check_search, search_rows
from metrale_jax.engine.slots import SlotTable
from metrale_jax.engine.stats import Counters, EngineStats
from metrale_jax.engine.waiting import WaitingQueue, rank_of

Chunk = tuple[Request, int]


@dataclass(frozen=True)
class Launched:
    """A step that the host has not read: what it drew and the requests that have a token in it, by row; the scores of
    its prompt tokens and the chunks that they belong to; and searches with the candidates of their beams."""

    out: object
    rows: tuple[tuple[int, Request], ...]
    scores: object = None
    chunks: tuple[Chunk, ...] = ()
    searches: tuple[tuple[Search, list[Request], object], ...] = ()


class Engine:
    """Continuous batching of requests over one device. `recompute_len` is the model's (see `ModelConfig`)."""

    def __init__(
        self,
        device: Device,
        memory: Memory,
        shapes: ShapePlan,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.device, self.memory, self.shapes, self.limits, self.clock = device, memory, shapes, limits, clock
        self.slots = SlotTable(shapes.num_slots, shapes.table_width, len(memory.allocators))
        self.waiting = WaitingQueue()
        self.filling: list[Request] = []
        self.running: dict[int, Request] = {}
        self.counters = Counters()
        sizes = shapes.prefill_sizes if shapes.step_tokens else ()
        self._budget = Budget(shapes.prefill_tokens, shapes.prefill_rows, sizes, shapes.step_tokens)
        self._draws = Draws(self.slots, shapes, limits)
        self._unread: deque[Launched] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._refused = (0, 0, 0)
        self._num_resets = 0
        self._num_submitted = 0

    def submit(self, ask: Ask) -> list[Request]:
        """The `ask.params.n` requests for a prompt, queued; the first runs it, the others fork from it where it ends.

        A beam search is one request, with its answers in `hypotheses`. Raises `RequestError` for a prompt or parameters
        that can never be served.
        """
        width = ask.params.beam_width
        now, first = self.clock(), self._num_submitted + 1
        requests = [
            checked_request(first + sample, ask, sample, self.limits, now)
            for sample in range(1 if width else ask.params.n)
        ]
        if width:
            check_search(requests[0], self.limits)
        self._num_submitted += max(width, len(requests))
        for request in requests:
            request.rank = rank_of(request.request_id, ask.params.priority)
            if ask.params.deadline_s is not None:
                request.deadline = request.queued_at + ask.params.deadline_s
                heapq.heappush(self._deadlines, (request.deadline, request.request_id, request))
        if width:
            Search(requests[0], width)
        else:
            requests[0].followers = requests[1:]
        self.waiting.push(requests[0])
        return requests

    def cancel(self, request: Request) -> None:
        """Ends a request now, with what it has; a finished one stays as it is."""
        self._finish(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.filling or self.running or self._unread)

    def step(self) -> bool:
        """Plans and launches one step, reads what is due, and says whether work is left.

        Whatever it raises, an interrupt while it waits for the device, the engine goes on with the next call: what was
        under way is run again.
        """
        try:
            self._step()
        except BaseException:
            self._recover((), "", pool_lost=True)
            raise
        return self.has_work

    def _step(self) -> None:
        began = self.clock()
        self._end_late_ones(began)
        decoding, copies = self._rows_with_room()
        chunks = self._planned_chunks(len(decoding))
        if copies:
            self._guarded(decoding, lambda: self.device.copy_blocks(copies))
            decoding = [request for request in decoding if request.lease is not None]
            chunks = [chunk for chunk in chunks if chunk[0].lease is not None]
        planned = self.clock()
        num_launched = sum(self._launch(*part) for part in self._parts(decoding, chunks))
        launched = self.clock()
        while len(self._unread) > num_launched:
            self._read_oldest()
        self.counters.time_step(planned - began, launched - planned, self.clock() - launched)

    def stats(self) -> EngineStats:
        """How the engine stands now."""
        return self.counters.view(self)

    def check(self) -> None:
        """Asserts that everything held belongs to a request, and that an idle engine holds nothing."""
        self.slots.check()
        busy = [*self.filling, *self.running.values()]
        assert len({request.request_id for request in busy}) == len(busy), "a request is in two places"
        assert all(request.lease is not None and request.slot for request in busy)
        self.memory.check(idle=not busy)

    def _end_late_ones(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if not request.finished:
                request.error = RequestError(
                    f"deadline of {request.params.deadline_s} s passed after {len(request.output)} tokens; allow more "
                    "time, or ask for fewer tokens."
                )
                self._finish(request, "abort")

    # Decoding: who runs a token more, and with which blocks.

    def _rows_with_room(self) -> tuple[list[Request], list[BlockCopy]]:
        """Requests that decode in this step, each with a block for its token, and the block copies they need first.

        The newest requests give their blocks back while there are not enough.
        """
        if self.limits.recompute_len:
            self._restart_outgrown()
        copies: dict[Request, list[BlockCopy]] = {}
        while True:
            decoding = [request for request in self.running.values() if request.wants_more]
            for request in [one for one in decoding if one.seq_len >= one.lease.capacity]:
                changed = request.lease.drop_behind_windows(request.seq_len)
                first = len(request.lease.tables[0])
                grown = self.memory.grow(request, request.seq_len + 1)
                if grown is None:
                    self._preempt_newest()
                    break
                copies[request] = grown
                self.slots.write(request.slot, request.lease, 0 if changed or grown else first)
                self._draws.tables_changed()
            else:
                # Whoever was thrown out meanwhile has given back the blocks that it would have copied to.
                return decoding, [copy for request in decoding for copy in copies.get(request, ())]

    def _restart_outgrown(self) -> None:
        """Sends back requests at the length where their rotary frequencies change: their past is run again."""
        limit = self.limits.recompute_len
        outgrown = [r for r in self.running.values() if r.known_len <= limit <= r.seq_len]
        if outgrown:
            self._read_all()
        for request in outgrown:
            if not request.finished:
                self._requeue(request)

    def _preempt_newest(self) -> None:
        before = len(self.running)
        self._read_all()
        if len(self.running) < before:
            return  # some had ended
        victims = [*self.running.values(), *self.filling]
        if victims:
            victim = max(victims, key=lambda request: (request.rank, request.request_id))
            victim = victim.search.leader if victim.search is not None else victim
            victim.num_preemptions += 1
            self.counters.num_preemptions += 1
            self._requeue(victim)

    def _requeue(self, request: Request) -> None:
        """Back to the request's place in the queue; what it wrote stays cached as long as nobody needs the room."""
        self._withdraw(request, keep=True)
        if request.search is not None:
            request.search.restart()
        if len(request.prompt_logprobs) < len(request.prompt) - 1:
            request.prompt_logprobs.clear()
        self.waiting.push(request)

    # Prefilling: whose prompt goes on, and who enters.

    def _planned_chunks(self, num_decoding: int) -> list[Chunk]:
        if not self.filling and not self.waiting:
            return []
        offered: dict[int, Request] = {}
        view = View(
            filling=[Filling(request.request_id, request.remaining) for request in self.filling],
            waiting=self._offered(offered),
            num_decoding=num_decoding,
            free_slots=self.slots.num_free,
            free_blocks=self.memory.num_available,
        )
        by_id = {request.request_id: request for request in self.filling}
        chunks = [
            ((offered.pop if chunk.enters else by_id.get)(chunk.request_id), chunk.num_tokens)
            for chunk in plan_chunks(view, self._budget)
        ]
        for request in offered.values():  # what it was offered of the cache is needed by those who enter
            self.memory.end(request, keep=False)
            request.seq_len = 0
            self.waiting.push(request)
        for request, _ in chunks:
            if not request.slot:
                self._enter(request)
        for request in offered.values():
            self._refused = (request.request_id, self.memory.num_available, self.slots.num_free)
        return chunks

    def _offered(self, offered: dict[int, Request]) -> Iterator[Waiting]:
        """Requests in order of service, each holding what is cached of its tokens until the plan is made."""
        while (request := self.waiting.head()) is not None:
            refused, blocks, slots = self._refused
            if refused == request.request_id and self.memory.num_available <= blocks and self.slots.num_free <= slots:
                return  # nothing was given back since it did not fit
            self.waiting.pop()
            request.followers = [one for one in request.followers if not one.finished]
            known_len = max(request.known_len, len(request.prompt))
            outgrown = known_len <= self.limits.recompute_len < request.num_tokens
            request.known_len = request.num_tokens if outgrown else known_len
            missing = self.memory.begin(request)
            offered[request.request_id] = request
            yield Waiting(request.request_id, request.remaining, missing, 1 + len(request.followers))

    def _enter(self, request: Request) -> None:
        grown = self.memory.grow(request, request.num_tokens)
        assert grown == [], "a planned request finds its blocks, and writes to none that it shares"
        for one in (request, *request.followers):
            one.slot = self.slots.claim()
            one.started_at = one.started_at or self.clock()
        self.slots.write(request.slot, request.lease)
        if not request.output and not request.num_preemptions:
            request.cached_tokens = request.seq_len
            self.counters.count_prompt(len(request.prompt), request.cached_tokens)
        self.filling.append(request)

    # Launching.

    def _parts(self, decoding: list[Request], chunks: list[Chunk]) -> Iterator[tuple[list[Request], list[Chunk]]]:
        """What one program each runs of a step."""
        if self.shapes.mixes and decoding and chunks:
            yield decoding, chunks
            return
        if decoding:
            yield decoding, []
        chunks = [chunk for chunk in chunks if chunk[0].lease is not None]  # if decoding failed, they were sent back
        if chunks:
            yield [], chunks

    def _launch(self, decoding: list[Request], chunks: list[Chunk]) -> bool:
        """Dispatches a program; returns whether there is something to read of it."""
        if not decoding and not chunks:
            return False
        sizes = self.shapes.advance(len(decoding), sum(size for _, size in chunks), len(chunks))
        if not self.device.has_run(sizes) and self._unread:
            # What is drawn already need not wait for a compiler.
            self._read_all()
            return self._launch(
                [request for request in decoding if request.lease is not None],
                [chunk for chunk in chunks if chunk[0].lease is not None],
            )
        requests = [*decoding, *(one for request, _ in chunks for one in (request, *request.followers))]
        launched = self._guarded(requests, lambda: self._dispatched(decoding, chunks, sizes))
        if launched is not None:
            self._unread.append(launched)
        return launched is not None

    def _dispatched(self, decoding: list[Request], chunks: list[Chunk], sizes) -> Launched:
        rows = self._draws.decode_rows(decoding, sizes.decode_rows, self.device) if decoding else None
        fill = step_chunks(chunks, sizes, self.slots) if chunks else None
        hidden = self.device.advance(rows, fill)
        scores = self._scores(hidden, chunks, sizes)
        drawing = [(row, request) for row, request in enumerate(decoding)]
        for request in decoding:
            request.seq_len += 1
            request.in_flight += 1
        for row, (request, size) in enumerate(chunks, start=sizes.decode_rows):
            request.seq_len += size
            shares = self.memory.keep(request)
            if request.lease.drop_behind_windows(request.seq_len) or shares:
                self.slots.write(request.slot, request.lease)
            if not request.remaining:
                drawing += [(row, one) for one in self._joined(request)]
        if not drawing:
            return Launched(None, (), scores, tuple(chunks) if scores is not None else ())
        if any([request.constraint is not None for _, request in drawing]):
            resets = self._num_resets
            self._read_all()
            if resets != self._num_resets:
                return Launched(None, ())  # this step's pool is lost as well
        searching = search_rows(drawing)
        searches = tuple(
            (
                search,
                [request for _, request in rows],
                self._draws.candidates(self.device, hidden, rows, sizes.num_ends, search.num_candidates),
            )
            for search, rows in searching
        )
        if searching:
            drawing = [(row, request) for row, request in drawing if request.search is None]
        out = self._draws.draw(self.device, hidden, drawing, sizes.num_ends) if drawing else None
        by_row = tuple(enumerate([request for _, request in drawing]))
        return Launched(out, by_row, scores, tuple(chunks) if scores is not None else (), searches)

    def _scores(self, hidden, chunks: list[Chunk], sizes):
        wanted = [r.params.prompt_logprobs for r, _ in chunks if r.params.prompt_logprobs is not None and not r.output]
        if not wanted:
            return None
        count = self._draws.num_logprobs(max(wanted))
        return self.device.score(hidden, score_targets(chunks, sizes.chunk_tokens), count)

    def _joined(self, request: Request) -> list[Request]:
        """The request, whose prompt is done, and its followers, forked from it; all of them run from now on."""
        self.filling.remove(request)
        followers = [] if request.search else [one for one in request.followers if not one.finished]
        request.followers = []
        for one in followers:
            one.lease, one.seq_len, one.known_len = request.lease.fork(), request.seq_len, request.known_len
            one.cached_tokens = request.cached_tokens
            self.slots.write(one.slot, one.lease)
        for one in (request, *followers):
            one.in_flight += 1
            self.running[one.request_id] = one
        self._draws.slots_changed()
        return [request, *followers]

    # Failures.

    def _guarded(self, requests: Sequence[Request], run: Callable):
        """What `run` gives, or None after failing `requests` because it could not."""
        try:
            return run()
        except FAILURES as error:
            reason = f"the device could not run the step ({error})"
            self._recover(requests, reason, pool_lost=self.device.pool_lost)
            return None

    def _recover(self, requests: Sequence[Request], reason: str, pool_lost: bool) -> None:
        for request in requests:
            self._fail(request, RequestError(f"request {request.request_id}: {reason}; submit it again."))
        if pool_lost:
            # What others had in it is recomputed; tokens that nobody has read are drawn again.
            self._unread.clear()
            self.memory.forget()
            self.device.reset()
            self._num_resets += 1
            held = [one.search.leader if one.search else one for one in (*self.running.values(), *self.filling)]
            for request in dict.fromkeys(held):
                request.in_flight = 0
                self._requeue(request)

    def _fail(self, request: Request, error: MetraleError) -> None:
        if not request.finished:
            request.error = error
            self._finish(request, "error")

    # Reading and ending.

    def _read_all(self) -> None:
        while self._unread:
            self._read_oldest()

    def _read_oldest(self) -> None:
        launched = self._unread.popleft()
        try:
            found = tuple(candidates for _, _, candidates in launched.searches)
            host, scores, found = self.device.fetch((launched.out, launched.scores, found))
        except FAILURES as error:
            # A step that failed after its dispatch left nothing sound in the pool it returned.
            requests = [*(request for _, request in launched.rows), *(request for request, _ in launched.chunks)]
            requests += [search.leader for search, _, _ in launched.searches]
            self._recover(requests, f"the device could not run the step ({error})", pool_lost=True)
            return
        if scores is not None:
            read_prompt_scores(scores, launched.chunks)
        for (search, rows, _), candidates in zip(launched.searches, found, strict=True):
            self._advance_search(search, rows, candidates)
        if host is None:
            return
        if not host.finite.all() and not all(host.finite[row] for row, _ in launched.rows):
            self.memory.forget()  # what made it may be among the kept blocks
        ended = list(read_tokens(host, launched.rows, self.clock()))
        self.counters.generated_tokens += len(launched.rows)
        for request, reason, error in ended:
            if error is not None:
                self._fail(request, error)
            else:
                self._finish(request, reason)

    def _advance_search(self, search: Search, rows: list[Request], candidates) -> None:
        leader = search.leader
        if leader.finished:
            return
        for row in rows:
            row.in_flight = 0
        if not candidates.finite[: len(rows)].all():
            self._fail(leader, not_finite(leader))
            return
        leader.first_token_at = leader.first_token_at or self.clock()
        self.counters.generated_tokens += 1
        if search.advance(candidates.ids[: len(rows)], candidates.logprobs[: len(rows)]):
            leader.hypotheses = search.hypotheses
            leader.output = list(leader.hypotheses[0].tokens) if leader.hypotheses else []
            stopped = bool(leader.output) and leader.output[-1] in leader.stop_ids
            self._finish(leader, "stop" if stopped else "length")
            return
        for row in search.rows:
            self.running.pop(row.request_id, None)
        for row in search.beams:
            self.running[row.request_id] = row
            self.slots.write(row.slot, row.lease)
        slots, tokens = [row.slot for row in search.beams], [row.output[-1] for row in search.beams]
        self._draws.slots_changed()
        self.device.put_tokens(padded(slots, self.shapes.num_slots), padded(tokens, self.shapes.num_slots))

    def _finish(self, request: Request, reason: str) -> None:
        if request.search is not None:
            request = request.search.leader
        if request.finished:
            return
        request.finish_reason = reason
        request.finished_at = self.clock()
        self.counters.finished[reason] += 1
        self._withdraw(request, keep=reason != "error")
        if request.search is not None:
            return
        followers = [one for one in request.followers if not one.finished]
        if followers:
            # They go on without the one that ran their prompt.
            request.followers = []
            followers[0].followers = followers[1:]
            self.waiting.push(followers[0])

    def _withdraw(self, request: Request, keep: bool) -> None:
        """Takes back all that a request holds, its followers' slots and its beams included."""
        self.waiting.discard(request)
        if request in self.filling:
            self.filling.remove(request)
        beams = request.search.rows if request.search is not None else ()
        for one in dict.fromkeys((request, *request.followers, *beams)):
            self.running.pop(one.request_id, None)
            if one.slot:
                self.slots.release(one.slot)
                one.slot = 0
            self.memory.end(one, keep and one.search is None)
            one.seq_len = 0
