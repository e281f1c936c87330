# SPDX-License-Identifier: Apache-2.0
"""`DraftSteps`: what an engine does of a step that drafts: plan it, make room, launch it, take in how far it got."""

from collections.abc import Sequence
from typing import Any

from metrale_jax.engine import moves
from metrale_jax.engine.drafting import NO_DRAFTS, DraftStep, Timing
from metrale_jax.engine.launched import Launched
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.request import Request
from metrale_jax.engine.roster import Chunk


class DraftSteps:
    """Those of `engine`, whose queue of unread steps and blocks they share."""

    def __init__(self, engine: Any):
        self._engine = engine

    def planned(self) -> DraftStep:
        """What this step drafts; if anything, all that was drawn before is read."""
        if self._engine.drafting is None:
            return NO_DRAFTS
        if any(launched.drafted for launched in self._engine.unread):
            self._engine.settle()
        drafts = self._engine.drafting.planned(self._engine.roster.running.values())
        if drafts.width:
            self._engine.settle()
        return drafts

    def with_room(self, decoding: list[Request], drafts: DraftStep, copies: list[BlockCopy]) -> dict[Request, int]:
        """How many tokens to draft of each request that decodes, fewer where blocks are short; what its blocks need
        first is added to `copies`."""
        lens: dict[Request, int] = {}
        for request in decoding if drafts.width else ():
            if request.search is None:
                wanted = min(drafts.lens.get(request.request_id, 0), self._engine.drafting.room(request))
                if wanted and request.seq_len + 1 + wanted > request.lease.capacity:
                    copies += self._engine.grown(request, request.seq_len + 1 + wanted) or ()
                lens[request] = min(wanted, request.lease.capacity - request.seq_len - 1)
        return lens

    def launch(self, decoding: list[Request], lens: dict[Request, int], width: int, alone: bool) -> bool:
        """Dispatches the drafting and verifying of all but beams; returns whether there is something to read of it."""
        requests = [request for request in decoding if request.search is None]
        num_rows = self._engine.shapes.row_bucket(len(requests))
        counts = tuple([lens[request] for request in requests])
        timing = Timing(
            self._engine.clock(), width, num_rows, self._engine.device.num_compiles if alone else -1, counts
        )
        out = self._engine.guarded(
            requests, lambda: self._engine.draws.drafted(self._engine.device, requests, counts, width)
        )
        if out is None:
            return False
        for request in requests:
            request.in_flight += 1
        self._engine.counters.num_steps += 1
        self._engine.unread.append(Launched(out, tuple(enumerate(requests)), timing=timing))
        return True

    def plain_timing(self, decoding: list[Request], chunks: list[Chunk]) -> Timing | None:
        """What a step that decodes without drafts is timed by, where anybody wants to know."""
        if self._engine.drafting is None or chunks or any(request.search is not None for request in decoding):
            return None
        return Timing(
            self._engine.clock(), 0, self._engine.shapes.row_bucket(len(decoding)), self._engine.device.num_compiles
        )

    def went_on(self, rows: Sequence[tuple[int, Request]], counts) -> None:
        """Requests stand where their accepted drafts end; what is kept of their state on the way is."""
        copies = moves.Copies()
        for row, request in rows:
            if not request.finished:
                before = request.seq_len
                request.seq_len += int(counts[row])
                copies.slots[self._engine.roster.memory.checkpoint(request, before)] = request.slot
                if request.seq_len - before == 1:
                    copies.limit(request, self._engine.limits.norm_tokens)
        requests = [request for _, request in rows if request.slot in copies.limited]
        self._engine.guarded(requests, lambda: copies.run(self._engine, None, 0))
