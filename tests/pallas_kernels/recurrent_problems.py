# SPDX-License-Identifier: Apache-2.0
"""Rows of steps over slots for tests of recurrent kernels, with NaN in all memory that nobody owns."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from metrale_jax.aot.inspect_module import PoolArrays, inspect_module
from pallas_kernels.state_rows import StateRows

LAYERS, LAYER = 3, 1


def state_rows(starts, query_lens, num_pending, max_query_len: int, gap: int = 0) -> StateRows:
    """Rows in slots of their own, out of order; padding in slot 0. Ragged rows lie end to end."""
    used = [s for s, length in enumerate(query_lens) if length]
    slots = np.zeros(len(query_lens), np.int32)
    slots[used] = np.arange(1, len(used) + 1)[::-1] * (gap + 1)
    width = max_query_len
    begins = np.arange(len(query_lens)) * width if width else np.cumsum(query_lens) - query_lens
    arrays = (slots, starts, query_lens, begins, num_pending)
    return StateRows(*(jnp.asarray(array, jnp.int32) for array in arrays), max_query_len)


def owned(rng, shape, dtype, rows: StateRows, pending: bool = False, draw=None) -> np.ndarray:
    """Storage `[L, U, ...]` of NaN but for what rows may read of it: states that are begun, rows that are pending."""
    draw = draw or (lambda size: rng.normal(size=size))
    storage = np.full(shape, np.nan)
    starts, counts = np.asarray(rows.starts), np.asarray(rows.num_pending)
    for s, slot in enumerate(np.asarray(rows.slots)):
        if slot and pending and counts[s]:
            storage[LAYER, slot, : counts[s]] = draw((counts[s], *shape[3:]))
        elif slot and starts[s] and not pending:
            storage[LAYER, slot] = draw(shape[2:])
    return jnp.asarray(storage, jnp.dtype(dtype))


def assert_only_own_slots_changed(before, after, rows: StateRows) -> None:
    """Other layers, and slots of nobody in this step, are bit for bit as they were; slot 0 may hold anything."""
    before, after = np.asarray(before), np.asarray(after)
    others = [slot for slot in range(1, before.shape[1]) if slot not in set(np.asarray(rows.slots).tolist())]
    for layer in range(before.shape[0]):
        own = others if layer == LAYER else list(range(before.shape[1]))
        assert after[layer, own].tobytes() == before[layer, own].tobytes()


def assert_in_place(step, storage, *arguments) -> None:
    """`step(storage, *arguments)`, which gives the storage first, copies none of it once it is donated."""
    compiled = jax.jit(step, donate_argnums=0).lower(storage, *arguments).compile()
    sizes = tuple(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(storage))
    inspection = inspect_module(compiled.as_text(), PoolArrays(0, sizes))
    assert inspection.in_place, inspection.problems


def assert_no_races() -> None:
    """The kernel that a TPU's interpreter ran last touched no memory while a copy of it was under way."""
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found
