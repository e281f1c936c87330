# SPDX-License-Identifier: Apache-2.0
"""Arrays for the named cases of paged attention, with NaN in all memory that nobody owns, and their right answers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.pages import abstract_pages
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.op import AttentionParams, SequenceRows, decode_attention, prefill_attention
from pallas_kernels.paged_attention.reference import attend as reference
from pallas_kernels.shapes import ceil_div

LAYERS, LAYER = 2, 1
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


class Problem:
    """A case's arrays: pages of NaN but for the tokens that a query may see, tables with holes behind windows.

    Queries have `dtype`; keys and values lie in `kv_format`, that of the queries by default. The reference reads the
    codes as they lie, so that what is compared is the kernel and not the rounding of the format.
    """

    def __init__(self, case: Case, dtype: str = "float32", seed: int = 0, kv_format: str = ""):
        rng = np.random.default_rng(seed)
        self.case, self.dtype = case, dtype
        self.query_width = max(case.query_lens)
        needed = [ceil_div(kv_len, case.block_size) for kv_len in case.kv_lens]
        num_blocks = sum(needed) + 3
        free = list(rng.permutation(np.arange(1, num_blocks)))
        self.tables = np.zeros((len(needed), max(needed) + 1), np.int32)
        slots = []
        for row, (kv_len, query_len) in enumerate(zip(case.kv_lens, case.query_lens, strict=True)):
            oldest = max(0, kv_len - query_len - case.window + 1) if case.window else 0
            for index in range(oldest // case.block_size, needed[row]):
                self.tables[row, index] = free.pop()
            tokens = np.arange(oldest, kv_len)
            slots.append(self.tables[row, tokens // case.block_size] * case.block_size + tokens % case.block_size)
        self.pages = self._pages(np.concatenate(slots), num_blocks, kv_format or dtype, rng)
        shape = (len(needed), self.query_width, case.num_heads, case.head_dim)
        self.q = jnp.asarray(rng.normal(size=shape), jnp.dtype(dtype))
        self.sinks = jnp.asarray(rng.normal(size=case.num_heads) + 1, jnp.float32) if case.sinks else ()
        self.tree = self._tree(rng) if case.tree else ()
        self.params = AttentionParams(case.head_dim**-0.5, case.window, case.softcap, case.latent)

    def _pages(self, slots, num_blocks, kv_format, rng):
        case = self.case
        shape = (LAYERS, num_blocks, case.block_size, case.num_kv_heads)
        empty = jax.tree.map(_unowned, abstract_pages(kv_format, shape, case.head_dim, case.v_head_dim))
        rows = (
            jnp.asarray(rng.normal(size=(len(slots), case.num_kv_heads, width)), jnp.float32)
            for width in (case.head_dim, case.v_head_dim)
        )
        return jax.jit(kv_append, static_argnums=(1, 5))(empty, LAYER, jnp.asarray(slots, jnp.int32), *rows, "cpu")

    def _tree(self, rng):
        """Random parents: each new token sees its ancestors and itself."""
        bits = np.zeros((len(self.tables), self.query_width), np.int32)
        for row, query_len in enumerate(self.case.query_lens):
            for node in range(query_len):
                parent = rng.integers(-1, node)
                bits[row, node] = (1 << min(node, 30)) | (bits[row, parent] if parent >= 0 else 0)
        return jnp.asarray(bits)

    def rows(self, query_starts, max_query_len) -> SequenceRows:
        lens = (jnp.asarray(x, jnp.int32) for x in (self.case.kv_lens, self.case.query_lens, query_starts))
        return SequenceRows(jnp.asarray(self.tables), *lens, max_query_len)

    def uniform(self) -> SequenceRows:
        starts = np.arange(len(self.tables)) * self.query_width
        return self.rows(starts, self.query_width).replace(tree=self.tree)

    def run(self, entry, q, rows, platform: str = "cpu", impl: str = "auto"):
        attend = partial(entry, layer=LAYER, params=self.params, platform=platform, impl=impl)
        return jax.jit(lambda q, pages, rows, sinks: attend(q, pages, rows=rows, sinks=sinks))(
            q, self.pages, rows, self.sinks
        )

    def expected(self) -> np.ndarray:
        q = np.asarray(self.q, np.float32)
        return reference(q, self.pages, LAYER, self.uniform(), self.params, self.sinks)

    def run_decode(self, **how):
        return self.run(decode_attention, self.q, self.uniform(), **how)

    def assert_decode_is_right(self, **how):
        out = self.run_decode(**how)
        assert out.dtype == self.q.dtype
        assert out.shape == (*self.q.shape[:3], self.params.v_dim(self.pages))
        close(out, self.expected(), self.dtype)

    def assert_ragged_is_right(self, num_padding: int = 5, **how):
        lens = np.asarray(self.case.query_lens)
        starts = np.cumsum(lens) - lens
        flat = [np.asarray(self.q[row, :length], np.float32) for row, length in enumerate(lens)]
        padding = np.full((num_padding, *self.q.shape[2:]), np.nan, np.float32)
        q = jnp.asarray(np.concatenate([*flat, padding]), jnp.dtype(self.dtype))
        out = self.run(prefill_attention, q, self.rows(starts, q.shape[0]), **how)
        assert out.dtype == self.q.dtype
        expected = [part[:length] for part, length in zip(self.expected(), lens, strict=True)]
        empty = np.zeros((num_padding, *out.shape[1:]))
        close(out, np.concatenate([*expected, empty]), self.dtype)


def _unowned(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """NaN, or the largest code of a format that has none; its scales are NaN."""
    whole = jnp.issubdtype(spec.dtype, jnp.integer)
    return jnp.full(spec.shape, jnp.iinfo(spec.dtype).max if whole else jnp.nan, spec.dtype)


def close(out, expected: np.ndarray, dtype: str) -> None:
    """Equal within what `dtype` allows, and exactly zero where no query is."""
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    unused = ~expected.reshape(*expected.shape[:-2], -1).any(axis=-1)
    assert not out[unused].any(), "rows that hold no query are exactly zero"
