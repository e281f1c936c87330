# SPDX-License-Identifier: Apache-2.0
"""`SamplingColumns`: how each slot's request draws, so that a batch gathers its rows and builds none."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from metrale_jax.core.sequence import SamplingState
from metrale_jax.engine.request import Request
from metrale_jax.sampling.rows import SamplingRow, needs_extras, sampling_state


def sampling_row(request: Request, tokens: Sequence[int] = ()) -> SamplingRow:
    """The request as sampling sees it."""
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        stop_ids=sorted(request.stop_ids),
        prompt_len=len(request.prompt),
        tokens=tokens,
        mask=request.fixed_mask,
    )


class SamplingColumns:
    """Sampling parameters by slot, written when a request is first seen in it; slot 0 is padding.

    `extras [U]` says who needs `SamplingExtras` and `penalties [U]` who needs a history in them, `logprobs [U]` how
    many likeliest tokens are asked for, -1 for none.
    """

    def __init__(self, num_slots: int, vocab_size: int, num_stop_ids: int):
        self._sizes = vocab_size, num_stop_ids
        self._columns = _arrays(sampling_state([None] * (num_slots + 1), *self._sizes))
        self._owners = [0] * (num_slots + 1)
        self.extras, self.penalties = np.zeros((2, num_slots + 1), bool)
        self.logprobs = np.full(num_slots + 1, -1)

    def rows(self, requests: Sequence[Request], slots: np.ndarray) -> SamplingState:
        """The state, without extras, of `slots`: those of `requests`, and padding. One without a slot has ended."""
        owners = self._owners
        for request in requests:
            if request.slot and owners[request.slot] != request.request_id:
                self._write(request)
        return SamplingState(**{name: column[slots] for name, column in self._columns.items()})

    def _write(self, request: Request) -> None:
        slot, params = request.slot, request.params
        for name, row in _arrays(sampling_state([sampling_row(request)], *self._sizes)).items():
            self._columns[name][slot] = row[0]
        self.extras[slot] = needs_extras(params) or request.constraint is not None
        penalties = params.presence_penalty, params.frequency_penalty
        self.penalties[slot] = params.repetition_penalty != 1 or any(penalties)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._owners[slot] = request.request_id


def _arrays(state: SamplingState) -> dict[str, np.ndarray]:
    return {field.name: getattr(state, field.name) for field in fields(state) if field.name != "extras"}
