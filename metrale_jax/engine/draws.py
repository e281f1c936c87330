# SPDX-License-Identifier: Apache-2.0
"""`Draws`: the arrays that decoding rows need, kept on the device for as long as the same requests decode."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from metrale_jax.core.errors import MetraleError
from metrale_jax.core.sequence import SamplingState
from metrale_jax.engine.admission import Limits
from metrale_jax.engine.arrays import padded, step_rows
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.device import Device, Hidden, Rows
from metrale_jax.engine.request import Request
from metrale_jax.engine.slots import SlotTable
from metrale_jax.sampling.params import MAX_LOGPROBS
from metrale_jax.sampling.rows import SamplingRow, needs_extras, sampling_state
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates, DrawRows
from pallas_kernels.shapes import next_power_of_two

Drawing = Sequence[tuple[int, Request]]


@dataclass
class _Drawn:
    """What the last draw was made of: its requests, their rows on the device, and how much of each history is known."""

    requests: list[Request]
    slots: Any
    sampling: SamplingState
    known: list[int]
    num_logprobs: int


class Draws:
    """Turns requests into the rows of `Device.advance` and `Device.draw`."""

    def __init__(self, slots: SlotTable, shapes: ShapePlan, limits: Limits):
        self._slots, self._shapes, self._limits = slots, shapes, limits
        self._decoding: list[Request] = []
        self._rows: Rows | None = None
        self._drawn: _Drawn | None = None

    def tables_changed(self) -> None:
        """To be called when a decoding request got or lost a block."""
        self._rows = None

    def slots_changed(self) -> None:
        """To be called when a request got a slot: the same requests may decode in other ones."""
        self._rows = self._drawn = None

    def decode_rows(self, decoding: list[Request], size: int, device: Device) -> Rows:
        """The rows of `decoding`, padded to `size`."""
        seq_lens = padded([request.seq_len for request in decoding], size)
        if self._rows is None or len(self._rows.seq_lens) != size or decoding != self._decoding:
            rows = step_rows(decoding, size, self._slots)
            places, known_lens, tables = device.resident((rows.slots, rows.known_lens, rows.tables))
            self._decoding, self._rows = list(decoding), Rows(places, seq_lens, known_lens, tables)
        return replace(self._rows, seq_lens=seq_lens)

    def draw(self, device: Device, hidden: Hidden, drawing: Drawing, num_ends: int) -> StepOutput:
        """A token for each of `drawing`, pairs of a row of `hidden.ends` and a request, in order."""
        size = self._shapes.row_bucket(len(drawing))
        requests = [request for _, request in drawing]
        drawn = self._drawn
        if drawn is None or len(drawn.known) != size or requests != drawn.requests:
            drawn = self._drawn = self._fresh(device, requests, size)
        rows = _draw_rows(requests, size, drawn.slots, self._sampling(drawn))
        return device.draw(hidden, _picks(drawing, size, num_ends), rows, drawn.num_logprobs)

    def candidates(self, device: Device, hidden: Hidden, drawing: Drawing, num_ends: int, num_top: int) -> Candidates:
        """The likeliest tokens of each of `drawing`, rows of one beam search."""
        size = self._shapes.row_bucket(len(drawing))
        requests = [request for _, request in drawing]
        drawn = self._fresh(device, requests, size)  # a beam's past is another's at the next step
        rows = _draw_rows(requests, size, drawn.slots, drawn.sampling)
        most = min(next_power_of_two(num_top), self._limits.vocab_size)
        return device.candidates(hidden, _picks(drawing, size, num_ends), rows, most)

    def num_logprobs(self, wanted: int) -> int:
        """How many likeliest tokens a program returns for `wanted`: all that may be asked for, or none."""
        return min(MAX_LOGPROBS, self._limits.vocab_size) if wanted >= 0 else 0

    def _fresh(self, device: Device, requests: list[Request], size: int) -> _Drawn:
        extras = any(needs_extras(request.params) for request in requests)
        rows = [
            SamplingRow(
                params=request.params,
                seed=request.seed,
                stop_ids=sorted(request.stop_ids),
                prompt_len=len(request.prompt),
                tokens=request.tokens(0, request.num_tokens) if extras else (),
                mask=request.fixed_mask,
            )
            for request in requests
        ]
        history_len = self._limits.max_context_tokens if extras else 0
        wide = [*rows, *[None] * (size - len(rows))]
        sampling = sampling_state(wide, self._limits.vocab_size, self._shapes.stop_ids, history_len)
        kept = device.resident(sampling.replace(extras=()))
        if extras:
            still = device.resident(sampling.extras.replace(history=(), mask=()))
            extras = still.replace(history=sampling.extras.history, mask=sampling.extras.mask)
            kept = kept.replace(extras=extras)
        wanted = max(-1 if r.params.logprobs is None else r.params.logprobs for r in requests)
        slots = device.resident(padded([request.slot for request in requests], size))
        known = [request.num_tokens for request in requests] + [0] * (size - len(requests))
        return _Drawn(list(requests), slots, kept, known, self.num_logprobs(wanted))

    def _sampling(self, drawn: _Drawn) -> SamplingState:
        """The state with histories and masks as they are now; the device may still read those of earlier steps."""
        extras = drawn.sampling.extras
        if isinstance(extras, tuple):
            return drawn.sampling
        history, mask = extras.history.copy(), extras.mask.copy()
        for row, request in enumerate(drawn.requests):
            start, stop = drawn.known[row], request.num_tokens
            if stop > start:
                history[row, start:stop] = request.tokens(start, stop)
                drawn.known[row] = stop
            if request.constraint is not None and not request.finished:
                mask[row] = _mask(request)
        drawn.sampling = drawn.sampling.replace(extras=extras.replace(history=history, mask=mask))
        return drawn.sampling


def _draw_rows(requests: list[Request], size: int, slots: Any, sampling: SamplingState) -> DrawRows:
    pending = [request.seq_len > request.num_tokens for request in requests]
    return DrawRows(
        slots=slots,
        positions=padded([request.seq_len for request in requests], size),
        pending=np.asarray(pending + [False] * (size - len(requests))),
        sampling=sampling,
    )


def _picks(drawing: Drawing, size: int, num_ends: int) -> np.ndarray | None:
    picks = [row for row, _ in drawing]
    in_order = size == num_ends and picks == list(range(len(picks)))
    return None if in_order else padded(picks, size)


def _mask(request: Request) -> np.ndarray | int:
    """The words of what may be drawn; none where the rule itself fails, which ends its own request alone."""
    try:
        return request.constraint.mask()
    except MetraleError as error:
        request.error = error
        return 0
