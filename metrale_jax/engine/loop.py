# SPDX-License-Identifier: Apache-2.0
"""`Engine`: the host loop. Admits, plans, launches one step ahead of what it has read, and reads.

The input of a decode step is the token that the step before left on the device, so step n + 1 is dispatched before
the tokens of step n are seen. An answer that turns out to have ended gets one row too many, whose token is dropped.
Only a row whose next token depends on rules that the host keeps (a grammar) waits: its step over the layers is under
way when the host works out what may be drawn. Not safe for threads: callers hold a lock of their own.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine import forks, moves
from metrale_jax.engine.admission import Admitted, Ask, Limits, Watch, admitted
from metrale_jax.engine.arrays import padded, score_targets, step_chunks
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.deadlines import Deadlines
from metrale_jax.engine.device import FAILURES, Device
from metrale_jax.engine.draft_steps import DraftSteps
from metrale_jax.engine.drafting import Drafting
from metrale_jax.engine.draws import Draws
from metrale_jax.engine.hooks import Hook, ignore, told
from metrale_jax.engine.launched import Launched
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.reader import not_finite, read_prompt_scores, read_tokens
from metrale_jax.engine.request import Request
from metrale_jax.engine.roster import Chunk, Roster
from metrale_jax.engine.search import Search, search_rows
from metrale_jax.engine.slots import SlotTable
from metrale_jax.engine.stats import Counters, EngineStats
from metrale_jax.engine.waiting import WaitingQueue, rank_of


class Engine:
    """Continuous batching of requests over one device. `recompute_len` is the model's (see `ModelConfig`).

    `on_finish(request)` is called once for each request that was taken, however it ends, the answers of n each and a
    beam search as one; what it raises is logged. It runs inside a step, so it must be quick and not call the engine.
    """

    def __init__(
        self,
        device: Device,
        memory: Memory,
        shapes: ShapePlan,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        on_finish: Hook = ignore,
        drafting: Drafting | None = None,
    ):
        self.device, self.shapes, self.limits, self.clock = device, shapes, limits, clock
        self.on_finish, self.drafting = on_finish, drafting
        self.counters = Counters(clock())
        self.slots = SlotTable(shapes.num_slots, shapes.table_width, len(memory.allocators))
        self.roster = Roster(memory, self.slots, shapes, limits, self.counters, clock)
        self.draws = Draws(self.slots, shapes, limits)
        self.draft_steps = DraftSteps(self)
        self.unread: deque[Launched] = deque()
        self._deadlines = Deadlines()
        self._num_resets = 0
        self._num_submitted = 0

    def submit(self, ask: Ask, watches: Sequence[Watch | None] = ()) -> list[Request]:
        """As `enqueue`. Raises `RequestError` for a prompt or parameters that can never be served."""
        return self.enqueue(admitted(ask, self.limits), watches)

    def enqueue(self, admitted: Admitted, watches: Sequence[Watch | None] = ()) -> list[Request]:
        """The `params.n` requests for a prompt, queued; the first runs it, the others fork from it where it ends.

        `watches[i]` sees what answer i gets. A beam search is one request, with its answers in `hypotheses`.
        """
        width, num_answers = admitted.ask.params.beam_width, admitted.ask.params.n
        watches = watches or (None,) * num_answers
        requests = [self._made(admitted, sample, watches[sample]) for sample in range(1 if width else num_answers)]
        if width:
            self._num_submitted += width - 1
            Search(requests[0], width)
        else:
            requests[0].followers = requests[1:]
        self.roster.waiting.push(requests[0])
        return requests

    def enqueue_forks(
        self, parts: Sequence[Admitted], shared_tokens: int, watches: Sequence[Watch | None]
    ) -> list[Request]:
        """A request for each of `parts`, whose prompts begin with the same `shared_tokens`: the first runs these for
        all. Raises `RequestError` for such as cannot share them."""
        forks.check_forks(parts, shared_tokens, self.limits)
        requests = [self._made(part, 0, watch) for part, watch in zip(parts, watches, strict=True)]
        for request in forks.led(requests, shared_tokens):
            self.roster.waiting.push(request)
        return requests

    def _made(self, admitted: Admitted, sample: int, watch: Watch | None) -> Request:
        self._num_submitted += 1
        request, params = admitted.request(self._num_submitted, sample, self.clock(), watch), admitted.ask.params
        request.rank = rank_of(request.request_id, params.priority)
        if params.deadline_s is not None:
            request.deadline = request.queued_at + params.deadline_s
            self._deadlines.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request now, with what it has; a finished one stays as it is."""
        self._finish(request, "abort")

    def settle(self) -> None:
        """Waits for all that is under way: then every request has the tokens that were drawn for it."""
        while self.unread:
            self._read_oldest()

    @property
    def memory(self) -> Memory:
        """The blocks, and what is kept of them."""
        return self.roster.memory

    @property
    def waiting(self) -> WaitingQueue:
        """Requests that hold nothing yet."""
        return self.roster.waiting

    @property
    def filling(self) -> list[Request]:
        """Requests whose prompt is under way."""
        return self.roster.filling

    @property
    def running(self) -> dict[int, Request]:
        """Requests past their prompt, by id."""
        return self.roster.running

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.roster.num_waiting or self.roster.busy or self.unread)

    def step(self) -> bool:
        """Plans and launches one step, reads what is due, and says whether work is left.

        Whatever it raises, an interrupt while it waits for the device, the engine goes on with the next call: what was
        under way is run again.
        """
        try:
            self._step()
        except BaseException:
            self.recover((), "", pool_lost=True)
            raise
        finally:
            self.counters.enter("idle", self.clock())
        return self.has_work

    def _step(self) -> None:
        began = self.clock()
        self.counters.enter("plan", began)
        for request in self._deadlines.passed(began, self.roster.num_waiting + len(self.roster.busy)):
            self._finish(request, "abort")
        drafts = self.draft_steps.planned()
        decoding, copies = self._rows_with_room()
        lens = self.draft_steps.with_room(decoding, drafts, copies)
        chunks = self.roster.planned_chunks(len(decoding))
        if copies:
            self.guarded(decoding, lambda: self.device.copy_blocks(copies))
        if moves.into_slots(self, chunks) or copies:
            decoding, chunks = self._still_there(decoding, chunks)
        self.counters.enter("launch", self.clock())
        num_launched = 0
        if whole := [request for request, size in chunks if not size]:
            num_launched += self._launch_whole(whole)
            decoding, chunks = self._still_there(decoding, chunks)
        if any([lens.get(request) for request in decoding]):
            num_launched += self.draft_steps.launch(decoding, lens, drafts.width, alone=not chunks)
            decoding, chunks = self._still_there(decoding, chunks)
            decoding = [request for request in decoding if request.search is not None]
        num_launched += sum(self._launch(*part) for part in self._parts(decoding, chunks))
        while len(self.unread) > num_launched:
            self._read_oldest()
        moves.settle_spilled(self)

    def stats(self) -> EngineStats:
        """How the engine stands now."""
        return self.counters.view(self)

    def check(self) -> None:
        """Asserts that everything held belongs to a request, and that an idle engine holds nothing."""
        self.roster.check()

    # Decoding: who runs a token more, and with which blocks.

    def grown(self, request: Request, num_tokens: int) -> list[BlockCopy] | None:
        """The copies that make room for so many tokens of a request; None if there are too few blocks."""
        changed = request.lease.drop_behind_windows(request.seq_len)
        first = len(request.lease.tables[0])
        grown = self.roster.memory.grow(request, num_tokens)
        if grown is not None or changed:
            self.slots.write(request.slot, request.lease, 0 if changed or grown else first)
            self.draws.tables_changed()
        return grown

    def _rows_with_room(self) -> tuple[list[Request], list[BlockCopy]]:
        """Requests that decode in this step, each with a block for its token, and the block copies they need first.

        The newest requests give their blocks back while there are not enough.
        """
        if self.limits.recompute_len:
            self._restart_outgrown()
        copies: dict[Request, list[BlockCopy]] = {}
        while True:
            decoding = [request for request in self.roster.running.values() if request.wants_more]
            for request in [one for one in decoding if one.seq_len >= one.lease.capacity]:
                grown = self.grown(request, request.seq_len + 1)
                if grown is None:
                    self._preempt_newest()
                    break
                copies[request] = grown
            else:
                # Whoever was thrown out meanwhile has given back the blocks that it would have copied to.
                return decoding, [copy for request in decoding for copy in copies.get(request, ())]

    def _restart_outgrown(self) -> None:
        """Sends back requests at the length where their rotary frequencies change: their past is run again."""
        limit = self.limits.recompute_len
        outgrown = [r for r in self.roster.running.values() if r.known_len <= limit <= r.seq_len]
        if outgrown:
            self.settle()
        for request in outgrown:
            if not request.finished:
                self.roster.requeue(request)

    def _preempt_newest(self) -> None:
        before = len(self.roster.running)
        self.settle()
        if len(self.roster.running) < before:
            return  # some had ended
        victim = max(self.roster.busy, key=lambda request: (request.rank, request.request_id), default=None)
        if victim is not None:
            victim.num_preemptions += 1
            self.counters.num_preemptions += 1
            saved = moves.saved_state(self, victim) if self.roster.memory.swap.takes_any else None
            if victim.lease is None:
                return  # the pool was lost, and all were sent back
            self.roster.requeue(victim)
            if saved is not None and self.roster.memory.swap.put(victim.request_id, saved):
                self.counters.num_swaps += 1

    # Launching.

    def _still_there(self, decoding: list[Request], chunks: list[Chunk]) -> tuple[list[Request], list[Chunk]]:
        """Those of a step's requests that were not sent back, ended, or moved on."""
        filling = set(self.roster.filling)
        chunks = [chunk for chunk in chunks if chunk[0].lease is not None and chunk[0] in filling]
        return [request for request in decoding if request.lease is not None], chunks

    def _launch_whole(self, requests: list[Request]) -> bool:
        """Draws the first tokens of requests of which all is there, the row after their last token too."""
        followers = [one for request in requests for one in request.followers]
        launched = self.guarded([*requests, *followers], lambda: self._drawn_whole(requests))
        if launched is not None:
            self.unread.append(launched)
        return launched is not None

    def _drawn_whole(self, requests: list[Request]) -> Launched:
        hidden = self.device.kept_rows
        drawing, copies = [], moves.Copies()
        for request in requests:
            unit = request.drawn_from
            drawing += [(unit, one) for one in self._joined(request, copies)]
        copies.run(self, None, 0)
        return self._launched(hidden, drawing, self.shapes.pool_slots)

    def _joined(self, request: Request, copies: moves.Copies) -> list[Request]:
        """A request that is through its prompt, and those that fork from it."""
        joined = self.roster.join(request)
        copies.slots |= {one.slot: request.slot for one in joined[1:]}
        self.draws.slots_changed()
        return joined

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
        if not self.device.has_run(sizes) and self.unread:
            # What is drawn already need not wait for a compiler: the next step runs this one.
            self.settle()
            return False
        requests = [*decoding, *(one for request, _ in chunks for one in (request, *request.followers))]
        timing = self.draft_steps.plain_timing(decoding, chunks)
        launched = self.guarded(requests, lambda: self._dispatched(decoding, chunks, sizes))
        if launched is not None:
            launched = replace(launched, timing=timing)
            self.counters.num_steps += 1
            self.unread.append(launched)
        return launched is not None

    def _dispatched(self, decoding: list[Request], chunks: list[Chunk], sizes) -> Launched:
        rows = self.draws.decode_rows(decoding, sizes.decode_rows, self.device) if decoding else None
        fill = step_chunks(chunks, sizes, self.slots) if chunks else None
        hidden = self.device.advance(rows, fill)
        scores = self._scores(hidden, chunks, sizes)
        drawing = [(row, request) for row, request in enumerate(decoding)]
        copies = moves.Copies()
        for request in decoding:
            request.seq_len += 1
            request.in_flight += 1
            copies.slots[self.roster.memory.checkpoint(request, request.seq_len - 1)] = request.slot
            copies.limit(request, self.limits.norm_tokens)
        for row, (request, size) in enumerate(chunks):
            request.seq_len += size
            shares = self.roster.memory.keep(request)
            copies.add(request, self.roster.memory.at_chunk_end(request), row)
            copies.limit(request, self.limits.norm_tokens)
            if request.lease.drop_behind_windows(request.seq_len) or shares:
                self.slots.write(request.slot, request.lease)
            drawing += [(sizes.decode_rows + row, one) for one in forks.forked(self, request, copies)]
            if not request.remaining:
                drawing += [(sizes.decode_rows + row, one) for one in self._joined(request, copies)]
        copies.run(self, hidden, sizes.chunk_rows)
        scored = tuple(chunks) if scores is not None else ()
        if not drawing:
            return Launched(None, (), scores, scored, mark=hidden)
        return self._launched(hidden, drawing, sizes.num_ends, scores, scored)

    def _launched(self, hidden, drawing: list[tuple[int, Request]], num_ends: int, scores=None, chunks=()) -> Launched:
        """What is drawn from the rows of `hidden`, for the requests that go with them."""
        if any([request.constraint is not None for _, request in drawing]):
            resets = self._num_resets
            self.settle()
            if resets != self._num_resets:
                return Launched(None, ())  # this step's pool is lost as well
        searching = search_rows(drawing)
        searches = tuple(
            (
                search,
                [request for _, request in rows],
                self.draws.candidates(self.device, hidden, rows, num_ends, search.num_candidates),
            )
            for search, rows in searching
        )
        if searching:
            drawing = [(row, request) for row, request in drawing if request.search is None]
        out = self.draws.draw(self.device, hidden, drawing, num_ends) if drawing else None
        by_row = tuple(enumerate([request for _, request in drawing]))
        return Launched(out, by_row, scores, chunks, searches)

    def _scores(self, hidden, chunks: list[Chunk], sizes):
        wanted = [r.params.prompt_logprobs for r, _ in chunks if r.params.prompt_logprobs is not None and not r.output]
        if not wanted:
            return None
        count = self.draws.num_logprobs(max(wanted))
        return self.device.score(hidden, score_targets(chunks, sizes.chunk_tokens), count)

    # Failures.

    def guarded(self, requests: Sequence[Request], run: Callable):
        """What `run` gives, or None after failing `requests` because it could not."""
        try:
            return run()
        except FAILURES as error:
            reason = f"the device could not run the step ({error})"
            self.recover(requests, reason, pool_lost=self.device.pool_lost)
            return None

    def recover(self, requests: Sequence[Request], reason: str, pool_lost: bool) -> None:
        """Fails `requests`; where the pool is lost, everybody else begins again."""
        for request in requests:
            self._fail(request, RequestError(f"request {request.request_id}: {reason}; submit it again."))
        if pool_lost:
            # What others had in it is recomputed; tokens that nobody has read are drawn again.
            self.unread.clear()
            self.roster.memory.forget(distrusted=False)
            self.device.reset()
            self.roster.forget_moves()
            self._num_resets += 1
            for request in self.roster.busy:
                request.in_flight = 0
                self.roster.requeue(request)

    def _fail(self, request: Request, error: MetraleError) -> None:
        if not request.finished:
            request.error = error
            self._finish(request, "error")

    # Reading and ending.

    def _read_oldest(self) -> None:
        before = self.counters.enter("read", self.clock())
        try:
            self._read(self.unread.popleft())
        finally:
            self.counters.enter(before, self.clock())

    def _read(self, launched: Launched) -> None:
        try:
            found = tuple(candidates for _, _, candidates in launched.searches)
            host, scores, found = self.device.fetch((launched.out, launched.scores, found))
            if launched.mark is not None:
                self.device.wait(launched.mark)
        except FAILURES as error:
            # A step that failed after its dispatch left nothing sound in the pool it returned.
            requests = [*(request for _, request in launched.rows), *(request for request, _ in launched.chunks)]
            requests += [search.leader for search, _, _ in launched.searches]
            self.recover(requests, f"the device could not run the step ({error})", pool_lost=True)
            return
        if scores is not None:
            read_prompt_scores(scores, launched.chunks)
        resets = self._num_resets
        for (search, rows, _), candidates in zip(launched.searches, found, strict=True):
            if resets == self._num_resets:
                self._advance_search(search, rows, candidates)
        if host is None or resets != self._num_resets:
            return  # where the pool was lost meanwhile, all begin again
        if not host.finite.all() and not all(host.finite[row] for row, _ in launched.rows):
            self.roster.memory.forget(distrusted=True)  # what made it may be among the kept blocks
        if launched.drafted:
            self.draft_steps.went_on(launched.rows, host.num_tokens)
            if resets != self._num_resets:
                return
        now, before = self.clock(), sum([len(request.output) for _, request in launched.rows])
        ended = list(read_tokens(host, launched.rows, now))
        self.counters.count_generated(sum([len(request.output) for _, request in launched.rows]) - before, now)
        if self.drafting is not None:
            requests, compiles = [request for _, request in launched.rows], self.device.num_compiles
            self.drafting.read(launched.timing, requests, host.num_tokens, host.num_drafts, now, compiles)
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
        now = self.clock()
        leader.first_token_at = leader.first_token_at or now
        self.counters.count_generated(1, now)
        if search.advance(candidates.ids[: len(rows)], candidates.logprobs[: len(rows)]):
            leader.hypotheses = search.hypotheses
            leader.output = list(leader.hypotheses[0].tokens) if leader.hypotheses else []
            stopped = bool(leader.output) and leader.output[-1] in leader.stop_ids
            self._finish(leader, "stop" if stopped else "length")
            return
        self.roster.run_beams(search)
        self.guarded([leader], lambda: self.device.copy_slots(search.copies))
        if leader.finished:
            return
        slots, tokens = [row.slot for row in search.beams], [row.output[-1] for row in search.beams]
        self.draws.slots_changed()
        self.device.put_tokens(padded(slots, self.shapes.num_slots), padded(tokens, self.shapes.num_slots))

    def _finish(self, request: Request, reason: str) -> None:
        if request.search is not None:
            request = request.search.leader
        if request.finished:
            return
        request.finish_reason = reason
        if self.drafting is not None:
            self.drafting.forget(request)
        request.finished_at = self.clock()
        self.counters.finished[reason] += 1
        self.roster.withdraw(request, keep=reason != "error")
        followers = [one for one in request.followers if not one.finished] if request.search is None else []
        if followers:
            # They go on without the one that ran their prompt.
            request.followers = []
            followers[0].followers = followers[1:]
            self.roster.waiting.push(followers[0])
        if not told(self.on_finish, request):
            self.counters.num_unreported += 1
