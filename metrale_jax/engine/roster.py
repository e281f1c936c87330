# SPDX-License-Identifier: Apache-2.0
"""`Roster`: where each request of an engine is, waiting, filling or running, and what it holds there."""

from collections.abc import Callable, Iterator

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.admission import Limits
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.request import Request
from metrale_jax.engine.saved import SavedState
from metrale_jax.engine.scheduler import ANYWHERE, Budget, Cuts, Filling, View, Waiting, plan_chunks
from metrale_jax.engine.search import Search
from metrale_jax.engine.slots import SlotTable
from metrale_jax.engine.stats import Counters
from metrale_jax.engine.waiting import WaitingQueue

Chunk = tuple[Request, int]


class Roster:
    """Requests by place. `filling` have a prompt under way, `running` are past it; both hold a slot and a lease.

    The followers of a request that fills hold slots already, so that they can run where its prompt ends. A sequence
    that enters past `recompute_len`, where rotary frequencies change, runs under its new length.
    """

    def __init__(
        self,
        memory: Memory,
        slots: SlotTable,
        shapes: ShapePlan,
        limits: Limits,
        counters: Counters,
        clock: Callable[[], float],
    ):
        self._recompute_len, self._norm_tokens = limits.recompute_len, limits.norm_tokens
        self.memory, self.slots = memory, slots
        self.waiting = WaitingQueue()
        self.filling: list[Request] = []
        self.running: dict[int, Request] = {}
        sizes = shapes.prefill_sizes if shapes.step_tokens else ()
        self._budget = Budget(shapes.prefill_tokens, shapes.prefill_rows, sizes, shapes.step_tokens)
        self._counters, self._clock = counters, clock
        self._refused = (0, 0, 0)
        self._restores: list[tuple[int, int]] = []
        self._tails: list[BlockCopy] = []
        self._returned: list[tuple[Request, SavedState | None]] = []
        self._begun: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self.waiting)

    @property
    def busy(self) -> list[Request]:
        """Requests that hold something, a beam search as its leader."""
        held = [one.search.leader if one.search else one for one in (*self.running.values(), *self.filling)]
        return list(dict.fromkeys(held))

    def check(self) -> None:
        """Asserts that everything held belongs to a request, and that an idle roster holds nothing."""
        self.slots.check()
        held = [*self.filling, *self.running.values()]
        assert len({request.request_id for request in held}) == len(held), "a request is in two places"
        assert all(request.lease is not None and request.slot for request in held)
        self.memory.check(idle=not held)

    def planned_chunks(self, num_decoding: int) -> list[Chunk]:
        """Requests that prefill in the next step and how many tokens of each; who enters has all that it needs."""
        if not self.filling and not self.waiting:
            return []
        offered: dict[int, Request] = {}
        view = View(
            filling=[Filling(one.request_id, one.remaining, self._cuts(one)) for one in self.filling],
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
            outgrown = known_len <= self._recompute_len < request.num_tokens
            request.known_len = request.num_tokens if outgrown else known_len
            missing = self.memory.begin(request)
            for branch in [one for one in request.followers if 0 < one.fork_len <= request.seq_len]:
                # What they would wait for is cached, for them too.
                request.followers.remove(branch)
                self.leave(branch)
            offered[request.request_id] = request
            slots = 1 + len(request.followers)
            yield Waiting(request.request_id, request.remaining, missing, slots, self._cuts(request))

    def _cuts(self, request: Request) -> Cuts:
        forks = {one.fork_len - request.seq_len for one in request.followers if one.fork_len > request.seq_len}
        if self.memory.snapshots is None and not self._norm_tokens:
            return Cuts(tuple(sorted(forks))) if forks else ANYWHERE
        size = self.memory.block_size if self.memory.snapshots is not None else 1
        stops = forks | {length - request.seq_len for length in request.cuts if length > request.seq_len}
        if self._norm_tokens:
            stops.add(self._norm_tokens - request.seq_len % self._norm_tokens)
        return Cuts(tuple(sorted(stops)), -request.seq_len % size, size)

    def _enter(self, request: Request) -> None:
        grown = self.memory.grow(request, request.num_tokens)
        assert grown == [], "a planned request finds its blocks, and writes to none that it shares"
        for one in (request, *request.followers):
            one.slot = self.slots.claim()
            one.started_at = one.started_at or self._clock()
        self.slots.write(request.slot, request.lease)
        try:
            saved = self.memory.returned(request)
            if saved is not None:
                self._returned.append((request, saved))
        except ConfigError:
            self._returned.append((request, None))
        self._begun.append(request)
        if request.resume:
            self._restores.append((request.resume, request.slot))
            self._tails += self.memory.tail_copies(request)
            request.resume = 0
        if not request.entered:
            request.cached_tokens, request.entered = request.seq_len, True
            self._counters.count_prompt(len(request.prompt), request.cached_tokens)
        self.filling.append(request)

    def restores(self) -> tuple[list[tuple[int, int]], list[BlockCopy]]:
        """Snapshots and the slots that they have to be copied to before the next step, and copies of blocks that go
        with them; told once."""
        restores, self._restores, self._tails = (self._restores, self._tails), [], []
        return restores

    def forget_moves(self) -> None:
        """What was still to be put into the pool is not: whom it was for begins again."""
        self._restores, self._tails, self._returned, self._begun = [], [], [], []

    def begun(self) -> list[Request]:
        """Requests that got a slot and have not run there; told once."""
        begun, self._begun = self._begun, []
        return begun

    def returned(self) -> list[tuple[Request, SavedState | None]]:
        """Requests that came back and what has to be put into their blocks before the next step, None where that cannot
        be read and they have to begin again; told once."""
        returned, self._returned = self._returned, []
        return returned

    def resume(self, request: Request) -> None:
        """A request that came back, and lacks nothing but the run of its last token, decodes on."""
        self.filling.remove(request)
        self.running[request.request_id] = request

    def join(self, request: Request) -> list[Request]:
        """The request, whose prompt is done, and its followers, forked from it; all of them run from now on."""
        self.filling.remove(request)
        request.drawn_from = 0
        followers = [] if request.search else [one for one in request.followers if not one.finished]
        request.followers = []
        for one in followers:
            one.lease, one.seq_len, one.known_len = request.lease.fork(), request.seq_len, request.known_len
            one.cached_tokens, one.entered = request.cached_tokens, True
            self.slots.write(one.slot, one.lease)
        for one in (request, *followers):
            one.in_flight += 1
            self.running[one.request_id] = one
        return [request, *followers]

    def take(self, branch: Request) -> bool:
        """Whether a branch that has left the one that ran its beginning has more of its prompt to run, which it fills
        from now on; else it runs."""
        branch.fork_len, branch.cached_tokens, branch.entered = 0, branch.seq_len, True
        self._counters.count_prompt(len(branch.prompt), branch.seq_len)
        if branch.remaining:
            self.filling.append(branch)
            return True
        branch.in_flight += 1
        self.running[branch.request_id] = branch
        return False

    def leave(self, branch: Request) -> None:
        """Queues a branch that does not follow any longer."""
        if branch.slot:
            self.slots.release(branch.slot)
        branch.slot = branch.seq_len = branch.fork_len = 0
        self.waiting.push(branch)

    def run_beams(self, search: Search) -> None:
        """Lets the beams of a search, and no other of its rows, run on."""
        for row in search.rows:
            self.running.pop(row.request_id, None)
        for row in search.beams:
            self.running[row.request_id] = row
            self.slots.write(row.slot, row.lease)

    def requeue(self, request: Request) -> None:
        """Back to the request's place in the queue; what it wrote stays cached as long as nobody needs the room."""
        self.withdraw(request, keep=True)
        if request.search is not None:
            request.search.restart()
        if len(request.prompt_logprobs) < len(request.prompt) - 1:
            request.prompt_logprobs.clear()
        self.waiting.push(request)

    def withdraw(self, request: Request, keep: bool) -> None:
        """Takes back all that a request holds, its followers' slots and its beams included."""
        self.waiting.discard(request)
        self.memory.swap.drop(request.request_id)
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
