# SPDX-License-Identifier: Apache-2.0
"""Random state space problems: NaN in every slot, pending row and token that a case does not name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ssd.cases import Case
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens, ssd_ragged, ssd_rows
from pallas_kernels.ssd.reference import reference_ssd
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks

LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@partial(jax.jit, static_argnums=(0, 1))
def run_step(uniform, impl, tokens, heads, storage, rows):
    """Outputs and storage of either entry point, compiled."""
    if uniform:
        return ssd_rows(tokens, heads, storage, LAYER, rows, "cpu", impl)
    rows = rows.replace(chunks=cut_chunks(rows, len(tokens.x), CHUNK))
    return ssd_ragged(tokens, heads, storage, LAYER, rows, "cpu", impl)


def heads_of(rng, num_heads: int) -> SsdHeads:
    a, d = -np.exp(rng.normal(size=num_heads)), rng.normal(size=num_heads)
    return SsdHeads(*(jnp.asarray(part, jnp.float32) for part in (a, d)))


def tokens_of(rng, case: Case, count: int, dtype=np.float32) -> SsdTokens:
    """As numpy arrays; some steps are zero and some large."""
    dt = np.log1p(np.exp(rng.normal(size=(count, case.num_heads)) * 2))
    dt[rng.random(dt.shape) < 0.1] = 0
    x = rng.normal(size=(count, case.num_heads, case.head_dim))
    b, c = rng.normal(size=(2, count, case.num_groups, case.state_dim))
    return SsdTokens(x.astype(dtype), dt.astype(np.float32), b.astype(dtype), c.astype(dtype))


class Problem:
    """A case with its random contents. `slots` are drawn, so that rows are in no order."""

    def __init__(self, case: Case, dtype: str = "float32", state_dtype: str = "float32", num_padding: int = 5):
        rng = np.random.default_rng(len(case.name))
        self.case, self.uniform = case, case.row_width > 0
        num_rows = len(case.starts)
        num_slots = num_rows + 4
        lens = np.asarray(case.query_lens, np.int32)
        pending = np.asarray(case.num_pending or (0,) * num_rows, np.int32)
        slots = np.where(lens > 0, 1 + rng.permutation(num_slots - 1)[:num_rows], 0).astype(np.int32)
        begins = np.arange(num_rows) * case.row_width if self.uniform else np.cumsum(lens) - lens
        count = num_rows * case.row_width if self.uniform else int(lens.sum()) + num_padding
        starts = np.asarray(case.starts, np.int32)
        self.rows = StateRows(slots, starts, lens, begins.astype(np.int32), pending, case.row_width)
        self.rows = jax.tree.map(jnp.asarray, self.rows)
        there = np.zeros(count, bool)
        for first, size in zip(begins, lens, strict=True):
            there[first : first + size] = True
        self.there = there
        tokens = tokens_of(rng, case, count, jnp.dtype(dtype))
        for part in jax.tree.leaves(tokens):
            part[~there] = np.nan
        self.tokens = jax.tree.map(jnp.asarray, tokens)
        self.heads = heads_of(rng, case.num_heads)
        sizes = (case.num_heads, case.head_dim, case.state_dim)
        matrix = np.full((LAYERS, num_slots, *sizes), np.nan, np.float32)
        shapes = (sizes[:2], sizes[:1], (case.num_groups, case.state_dim))
        rooms = [np.full((LAYERS, num_slots, case.room, *shape), np.nan, np.float32) for shape in shapes]
        for slot, start, number in zip(slots, starts, pending, strict=True):
            if slot and start:
                matrix[LAYER, slot] = rng.normal(size=sizes)
                one = tokens_of(rng, case, int(number))
                for room, part in zip(rooms, (one.x, one.dt, one.b), strict=True):
                    room[LAYER, slot, :number] = part
        matrix = jnp.asarray(matrix).astype(state_dtype)
        self.storage = SsdStorage(matrix, tuple(map(jnp.asarray, rooms)) if case.room else ())
        self.tolerance = TOLERANCE[state_dtype]

    def run(self, impl: str = "auto"):
        """Outputs and storage by an implementation."""
        return run_step(self.uniform, impl, self.tokens, self.heads, self.storage, self.rows)

    def assert_right(self, impl: str = "auto") -> None:
        """Outputs and slots are the reference's, and what belongs to nobody is as it was."""
        outputs, storage = self.run(impl)
        wanted, expected = reference_ssd(self.tokens, self.heads, self.storage, LAYER, self.rows, self.uniform)
        outputs = np.asarray(outputs)
        assert outputs.dtype == np.float32 and not outputs[~self.there].any(), "outputs of padding are zero"
        close(outputs, wanted, 2e-5)
        close(storage.matrix[:, 1:], expected.matrix[:, 1:], self.tolerance)
        for part, other in zip(storage.pending, expected.pending, strict=True):
            for slot, length in zip(self.rows.slots, self.rows.query_lens, strict=True):
                if self.uniform and slot:
                    kept = int(length) - 1
                    np.testing.assert_array_equal(part[LAYER, slot, :kept], other[LAYER, slot, :kept])
            strangers = np.setdiff1d(np.arange(1, part.shape[1]), np.asarray(self.rows.slots))
            assert np.isnan(np.asarray(part[:, strangers])).all()


def close(found, wanted, tolerance: float) -> None:
    """Equal within `tolerance` of the largest number; NaN where NaN is wanted."""
    found, wanted = (np.asarray(part).astype(np.float32) for part in (found, wanted))
    known = wanted[~np.isnan(wanted)]
    largest = max(1.0, np.abs(known).max()) if known.size else 1.0
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * largest)
