# SPDX-License-Identifier: Apache-2.0
"""Kernels of recurrent layers and of mixtures of experts on the GPU that is here, for `benchmarks.device_kernels`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.static.layer_rows import (
    KIMI_LINEAR,
    MAMBA2,
    NEMOTRON_H,
    QWEN3_NEXT,
    WRITING,
    ConvSizes,
    DeltaSizes,
    ExpertSizes,
    SsdRaggedSizes,
    SsdSizes,
)
from benchmarks.static.layer_traffic import TRAFFIC, expert_least, ragged_flops
from benchmarks.static.row import LAYER, Row
from benchmarks.static.rows import arguments
from benchmarks.timing import seconds_a_call, seconds_an_update
from pallas_kernels.causal_conv1d import reference as conv_reference
from pallas_kernels.causal_conv1d.cases import SIZES as CONV_SIZES
from pallas_kernels.gated_delta import reference as delta_reference
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.grouped_matmul import reference as experts_reference
from pallas_kernels.grouped_matmul.cases import SWIGLU
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens
from pallas_kernels.ssd.reference import reference_ssd
from pallas_kernels.state_rows import CHUNK, StateRows, cut_chunks

QWEN3_EXPERTS = (128, 1536, 2048, SWIGLU), (128, 2048, 768)
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
TINY = {
    "gated_delta": DeltaSizes(2, 4, 32, 32, False, 2, width=2, room=2, slots=3),
    "gated_delta_ragged": DeltaSizes(2, 4, 32, 32, False, 2, width=140, slots=3),
    "ssd_rows": SsdSizes(4, 2, 32, 32, 2, width=2, room=2, slots=3),
    "ssd_ragged": SsdRaggedSizes(2, 1, 16, 16, 1, width=20, slots=3),
    "conv_rows": ConvSizes(64, 4, 1, width=2, room=1, slots=3),
    "grouped_matmul": ExpertSizes(6, 3, 64, 32, SWIGLU),
}
# Entries that give storage as several results.
SPREAD = ("gated_delta", "conv_rows")


def _row(entry: str, dtype: str, kept: str, sizes: Any) -> Row:
    return Row(entry, "triton", "cuda", dtype, kept, sizes)


def _rows() -> Iterator[Row]:
    for heads in (QWEN3_NEXT, KIMI_LINEAR):
        for count in (1, 8):
            sizes = DeltaSizes(*heads, num_sequences=count, width=2048, slots=count + 1)
            yield _row("gated_delta_ragged", "float32", "float32", sizes)
    for count in (8, 64):
        pool = {"num_sequences": count, "slots": count + 1}
        for kept in ("float32", "bfloat16"):
            yield _row("gated_delta", "float32", kept, DeltaSizes(*QWEN3_NEXT, **pool))
            yield _row("ssd_rows", "bfloat16", kept, SsdSizes(*MAMBA2, **pool))
        yield _row("ssd_rows", "bfloat16", "float32", SsdSizes(*NEMOTRON_H, **pool))
    drafts = {"width": 4, "room": 3, "slots": 65}
    yield _row("gated_delta", "float32", "float32", DeltaSizes(*QWEN3_NEXT, **drafts))
    yield _row("ssd_rows", "bfloat16", "float32", SsdSizes(*MAMBA2, **drafts))
    for count, width in ((1, 2048), (4, 2048), (4, 8192)):
        for heads in (MAMBA2, NEMOTRON_H):
            sizes = SsdRaggedSizes(*heads, num_sequences=count, width=width, slots=5)
            yield _row("ssd_ragged", "bfloat16", "float32", sizes)
    for channels, taps, width in CONV_SIZES:
        for count in (8, 64):
            sizes = ConvSizes(channels, taps, count, width, width - 1, slots=count + 1)
            yield _row("conv_rows", "bfloat16", "bfloat16", sizes)
    for num_rows in (64, 512, 4096):
        for experts in QWEN3_EXPERTS:
            yield _row("grouped_matmul", "bfloat16", "bfloat16", ExpertSizes(num_rows, *experts))


@dataclass(frozen=True)
class LayerCall:
    """One call to check and to time."""

    row: Row

    @property
    def entry(self) -> str:
        """Of which kernel it is."""
        return self.row.entry

    @property
    def name(self) -> str:
        """Names the call in the table."""
        return self.row.name

    @property
    def least_bytes(self) -> int:
        """What has to be read and written."""
        if self.entry == "grouped_matmul":
            return expert_least(self.row)
        return TRAFFIC[self.entry](self.row)["least_bytes"] * self.row.sizes.num_sequences

    @property
    def least_flops(self) -> int:
        """Of the products of matrices; states that rows of few tokens read are limited by memory alone."""
        sizes = self.row.sizes
        if self.entry == "ssd_ragged":
            return 4 * sizes.width * sizes.state_size
        if self.entry == "gated_delta_ragged":
            return ragged_flops(sizes)
        return 2 * sizes.num_rows * sizes.width * sizes.depth if self.entry == "grouped_matmul" else 0

    def on(self, platform: str, impl: str) -> "LayerCall":
        """The same call elsewhere."""
        return LayerCall(replace(self.row, platform=platform, impl=impl))

    def small(self) -> "LayerCall":
        """The same widths for as few sequences, or experts, as the oracle takes at its pace."""
        if self.entry == "grouped_matmul":
            return LayerCall(replace(self.row, sizes=replace(self.row.sizes, num_rows=40, experts=5)))
        if self.entry == "ssd_ragged":
            return LayerCall(replace(self.row, sizes=replace(self.row.sizes, num_sequences=2, width=140, slots=3)))
        if self.entry == "gated_delta_ragged":
            return LayerCall(replace(self.row, sizes=replace(self.row.sizes, num_sequences=2, width=260, slots=3)))
        return LayerCall(replace(self.row, sizes=replace(self.row.sizes, num_sequences=2, slots=3)))

    def tiny(self) -> "LayerCall":
        """A call of the same kernel that takes an interpreter no time."""
        return LayerCall(replace(self.row, sizes=TINY[self.entry]))

    def seconds(self, times: int) -> float:
        """The time of one call within a loop."""
        call, inputs = made(self.row)
        if self.entry not in WRITING:
            return seconds_a_call(call, inputs[0], times, *inputs[1:])
        storage, *rest = inputs
        again = (lambda s, *a: call(s, *a)[1:]) if self.entry in SPREAD else (lambda s, *a: call(s, *a)[1])
        return seconds_an_update(again, storage, times, *rest)

    def fault(self) -> str:
        """How far the answer is from the oracle's, or an empty string if it is near."""
        call, inputs = made(self.row)
        for found, want in zip(_answer(self.entry, jax.jit(call)(*inputs)), _expected(self.row, inputs), strict=True):
            found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
            off, limit = np.abs(found - want).max(), TOLERANCE[self.row.kv_format] * max(1.0, np.abs(want).max())
            if not off <= limit:
                return f"{self.name}: off by {off:.3g}, {limit:.3g} may be"
        return ""


def made(row: Row) -> tuple[Callable, tuple]:
    """The call of a row and its inputs: every sequence goes on in a slot of its own, all that is pending there
    stands, and rows are spread over experts."""
    call, shapes = arguments(row, None)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    drawn = jax.tree.map(lambda x: _normal(next(keys), x) if jnp.issubdtype(x.dtype, jnp.floating) else x, shapes)
    if row.entry == "grouped_matmul":
        x, weights, sizes, bias = drawn
        each = np.bincount(np.arange(x.shape[0]) * len(weights) // x.shape[0], minlength=sizes.shape[0])
        return call, (x, weights * weights.shape[2] ** -0.5, jnp.asarray(each, jnp.int32), bias)
    *others, rows = drawn
    count = row.sizes.num_sequences
    ones, steps = np.ones(count, np.int32), np.arange(count, dtype=np.int32)
    each = rows.max_query_len or row.sizes.width // count
    numbers = (steps + 1, ones * 9, ones * each, steps * each, ones * row.sizes.room)
    made_rows = StateRows(*map(jnp.asarray, numbers), rows.max_query_len)
    if not rows.max_query_len:
        made_rows = made_rows.replace(chunks=cut_chunks(made_rows, row.sizes.width, CHUNK))
    return call, (*map(_tamed, others), made_rows)


def _normal(key, x: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype))()


def _tamed(part: Any) -> Any:
    """Numbers as layers make them: keys of length one, decays and rates below zero, strengths and steps above it."""
    if isinstance(part, tuple):
        return tuple(map(_tamed, part))
    if isinstance(part, SsdStorage) and part.pending:
        x, dt, b = part.pending
        return part.replace(pending=(x, jnp.abs(dt), b))
    if isinstance(part, DeltaTokens):
        keys = part.keys / jnp.linalg.norm(part.keys.astype(jnp.float32), axis=-1, keepdims=True)
        signs = {"decays": -jnp.abs(part.decays), "strengths": jnp.abs(part.strengths)}
        return part.replace(keys=keys.astype(part.keys.dtype), **signs)
    if isinstance(part, SsdTokens):
        return part.replace(dt=jnp.abs(part.dt))
    return part.replace(a=-jnp.abs(part.a)) if isinstance(part, SsdHeads) else part


def _answer(entry: str, found: Any) -> tuple:
    if entry == "grouped_matmul":
        return (found,)
    if entry == "gated_delta_ragged":
        kept, _ = found[1]
    else:
        kept = found[1] if entry in SPREAD else found[1].matrix
    return found[0], kept[LAYER, 1:]


def _expected(row: Row, inputs: tuple) -> tuple:
    if row.entry == "grouped_matmul":
        return (experts_reference.matmul(*inputs, row.sizes.activation),)
    if row.entry == "gated_delta":
        (matrix, pending), q, tokens, rows = inputs
        return _answer(row.entry, delta_reference.delta_rows(q, tokens, matrix, pending, LAYER, rows))
    if row.entry == "conv_rows":
        (tail, pending), x, weight, bias, rows = inputs
        return _answer(row.entry, conv_reference.conv_rows(x, weight, bias, tail, pending, LAYER, rows, True))
    if row.entry == "gated_delta_ragged":
        (matrix, pending), q, tokens, rows = inputs
        out, matrix = delta_reference.delta_ragged(q, tokens, matrix, pending, LAYER, rows)
        return _answer(row.entry, (out, (matrix, pending)))
    storage, tokens, heads, rows = inputs
    uniform = rows.max_query_len > 0
    return _answer(row.entry, reference_ssd(tokens, heads, storage, LAYER, rows, uniform))


CALLS = tuple(LayerCall(row) for row in _rows())
