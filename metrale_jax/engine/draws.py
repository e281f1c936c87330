# SPDX-License-Identifier: Apache-2.0
"""`Draws`: the arrays that decoding rows need, kept for as long as the same requests decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metrale_jax.core.sequence import SamplingState
from metrale_jax.engine.admission import Limits
from metrale_jax.engine.arrays import padded, step_rows
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.columns import SamplingColumns, sampling_row
from metrale_jax.engine.device import FAILURES, Device, Hidden
from metrale_jax.engine.reader import own_error
from metrale_jax.engine.request import Request
from metrale_jax.engine.rows import Rows
from metrale_jax.engine.slots import SlotTable
from metrale_jax.sampling.params import MAX_LOGPROBS
from metrale_jax.sampling.rows import sampling_extras
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates, DrawRows
from pallas_kernels.shapes import next_power_of_two

# To put an array on the device by itself costs the host as much as to pass it to so many programs.
RESIDENT_AFTER = 8
Drawing = Sequence[tuple[int, Request]]


class _Kept:
    """Arrays that nobody writes to, passed to each step from the host until it pays to leave them on the device."""

    def __init__(self, arrays: Any):
        self._arrays, self._uses = arrays, 0

    def on(self, device: Device) -> Any:
        self._uses += 1
        if self._uses == RESIDENT_AFTER:
            self._arrays = device.resident(self._arrays)
        return self._arrays


@dataclass
class _Drawn:
    """What the last draw was made of: its requests, their rows, and how much of each history is known.

    `rows` are slots, zeros for `DrawRows.pending`, and the state with all of its extras that stays. `mask` and
    `history` change; they are None without extras, and `history` without penalties too.
    """

    requests: list[Request]
    size: int
    rows: _Kept
    history: np.ndarray | None
    mask: np.ndarray | None
    known: list[int]
    num_logprobs: int


class Draws:
    """Turns requests into the rows of `Device.advance` and `Device.draw`."""

    def __init__(self, slots: SlotTable, shapes: ShapePlan, limits: Limits):
        self._slots, self._shapes, self._limits = slots, shapes, limits
        self._columns = SamplingColumns(shapes.num_slots, limits.vocab_size, shapes.stop_ids)
        self._decoding: list[Request] = []
        self._rows: Rows | None = None
        self._places = self._tables = _Kept(())
        self._tables_changed = False
        self._drawn: _Drawn | None = None

    def tables_changed(self) -> None:
        """To be called when a decoding request got or lost a block."""
        self._tables_changed = True

    def slots_changed(self) -> None:
        """To be called when a request got a slot: the same requests may decode in other ones."""
        self._rows = self._drawn = None

    def decode_rows(self, decoding: list[Request], size: int, device: Device) -> Rows:
        """The rows of `decoding`, padded to `size`."""
        rows = self._rows
        if rows is None or len(rows.slots) != size or decoding != self._decoding:
            rows = self._rows = step_rows(decoding, size, self._slots)
            self._decoding = list(decoding)
            self._places, self._tables = _Kept((rows.slots, rows.known_lens)), _Kept(rows.tables)
        elif self._tables_changed:
            self._tables = _Kept(self._slots.rows(rows.slots))
        self._tables_changed = False
        slots, known_lens = self._places.on(device)
        seq_lens = padded([request.seq_len for request in decoding], size)
        return Rows(slots, seq_lens, known_lens, self._tables.on(device))

    def draw(self, device: Device, hidden: Hidden, drawing: Drawing, num_ends: int) -> StepOutput:
        """A token for each of `drawing`, pairs of a row of `hidden.ends` and a request, in order."""
        drawn = self._drawn_for([request for _, request in drawing])
        rows = self._draw_rows(drawn, device)
        return device.draw(hidden, _picks(drawing, drawn.size, num_ends), rows, drawn.num_logprobs)

    def drafted(self, device: Device, requests: list[Request], lens: Sequence[int], width: int) -> StepOutput:
        """What stands of up to `lens` drafts of each request, at most `width`, and a token more; all that was drawn
        before is known to the host. Where a request is held to a form, the host waits for the drafts."""
        drawn = self._drawn_for(requests)
        rows, (_, _, sampling) = self.decode_rows(requests, drawn.size, device), drawn.rows.on(device)
        plain = sampling.replace(extras=())
        hidden, drafts = device.advance_drafts(rows, plain, padded(lens, drawn.size), width)
        guesses = None
        if any(request.constraint is not None for request in requests):
            tokens, counts = device.fetch((drafts.tokens, drafts.lens))
            guesses = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        return device.judge(hidden, drafts, self._judge_rows(drawn, device, width, guesses), drawn.num_logprobs)

    def _drawn_for(self, requests: list[Request]) -> _Drawn:
        size, drawn = self._shapes.row_bucket(len(requests)), self._drawn
        if drawn is None or drawn.size != size or requests != drawn.requests:
            drawn = self._drawn = self._fresh(requests, size)
        return drawn

    def _judge_rows(self, drawn: _Drawn, device: Device, width: int, guesses: list[list[int]] | None) -> DrawRows:
        slots, pending, sampling = drawn.rows.on(device)
        if drawn.mask is not None:
            mask = np.repeat(drawn.mask[:, None], width + 1, axis=1)
            for row, request in enumerate(drawn.requests if guesses else ()):
                if request.constraint is not None and not request.finished:
                    _fill_masks(mask[row], request, guesses[row])
            sampling = sampling.replace(extras=sampling.extras.replace(mask=mask))
        if drawn.history is not None:
            sampling = self._with_history(drawn, sampling)
        positions = padded([request.seq_len + 1 for request in drawn.requests], drawn.size)
        return DrawRows(slots, positions, pending, sampling)

    def candidates(self, device: Device, hidden: Hidden, drawing: Drawing, num_ends: int, num_top: int) -> Candidates:
        """The likeliest tokens of each of `drawing`, rows of one beam search."""
        size = self._shapes.row_bucket(len(drawing))
        drawn = self._fresh([request for _, request in drawing], size)  # a beam's past is another's at the next step
        rows = self._draw_rows(drawn, device)
        most = min(next_power_of_two(num_top), self._limits.vocab_size)
        return device.candidates(hidden, _picks(drawing, size, num_ends), rows, most)

    def num_logprobs(self, wanted: int) -> int:
        """How many likeliest tokens a program returns for `wanted`: all that may be asked for, or none."""
        return min(MAX_LOGPROBS, self._limits.vocab_size) if wanted >= 0 else 0

    def _fresh(self, requests: list[Request], size: int) -> _Drawn:
        slots = padded([request.slot for request in requests], size)
        sampling, history, mask, known = self._columns.rows(requests, slots), None, None, []
        if self._columns.extras[slots].any():
            penalties = self._columns.penalties[slots].any()
            known = [request.num_tokens if penalties else 0 for request in requests]
            rows = [sampling_row(one, one.tokens(0, count)) for one, count in zip(requests, known, strict=True)]
            wide = [*rows, *[None] * (size - len(rows))]
            extras = sampling_extras(wide, self._limits.vocab_size, self._limits.max_context_tokens)
            mask, history = extras.mask, extras.history if penalties else None
            sampling = sampling.replace(extras=extras.replace(mask=(), history=() if penalties else extras.history))
        num_logprobs = self.num_logprobs(int(self._columns.logprobs[slots].max()))
        rows = _Kept((slots, np.zeros(size, bool), sampling))
        return _Drawn(list(requests), size, rows, history, mask, known, num_logprobs)

    def _draw_rows(self, drawn: _Drawn, device: Device) -> DrawRows:
        slots, pending, sampling = drawn.rows.on(device)
        if drawn.mask is not None:
            sampling = self._with_mask(drawn, sampling)
        if drawn.history is not None:
            pending = padded([request.in_flight > 1 for request in drawn.requests], drawn.size).astype(bool)
            sampling = self._with_history(drawn, sampling)
        positions = padded([request.seq_len for request in drawn.requests], drawn.size)
        return DrawRows(slots, positions, pending, sampling)

    # What the device may still read of an earlier step is not written to.

    def _with_mask(self, drawn: _Drawn, sampling: SamplingState) -> SamplingState:
        mask = drawn.mask.copy()
        for row, request in enumerate(drawn.requests):
            if request.constraint is not None and not request.finished:
                mask[row] = _mask(request)
        return sampling.replace(extras=sampling.extras.replace(mask=mask))

    def _with_history(self, drawn: _Drawn, sampling: SamplingState) -> SamplingState:
        history = drawn.history = drawn.history.copy()
        for row, request in enumerate(drawn.requests):
            start, stop = drawn.known[row], request.num_tokens
            if stop > start:
                history[row, start:stop] = request.tokens(start, stop)
                drawn.known[row] = stop
        return sampling.replace(extras=sampling.extras.replace(history=history))


def _picks(drawing: Drawing, size: int, num_ends: int) -> np.ndarray | None:
    picks = [row for row, _ in drawing]
    in_order = size == num_ends and picks == list(range(len(picks)))
    return None if in_order else padded(picks, size)


def _mask(request: Request) -> np.ndarray | int:
    """The words of what may be drawn; none where the rule itself fails, which ends its own request alone."""
    request.fault = None
    try:
        return request.constraint.mask()
    except FAILURES as error:
        request.fault = own_error(request, error)
        return 0


def _fill_masks(masks: np.ndarray, request: Request, drafts: Sequence[int]) -> None:
    """What may be drawn at each position of a row, `masks [J + 1, W]`, if the drafts before it stand. Positions after a
    draft that may not be drawn, or that ends the answer, are not come to."""
    masks[0] = _mask(request)
    try:
        walker = request.constraint.fork() if drafts else None
        for place, token in enumerate(drafts):
            if token in request.stop_ids or not masks[place, token // 32] >> (token % 32) & 1:
                return
            masks[place + 1] = 0
            walker.accept(token)
            masks[place + 1] = walker.mask()
    except FAILURES as error:
        request.fault = own_error(request, error)
