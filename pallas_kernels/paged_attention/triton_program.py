# SPDX-License-Identifier: Apache-2.0
"""One program of the GPU's paged attention: its rows, the tokens they see, and the running softmax over them."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kv_formats.registry import format_named
from pallas_kernels.paged_attention.op import MAX_TREE, AttentionParams
from pallas_kernels.paged_attention.splits import split_start
from pallas_kernels.triton_arrays import both, columns, parts_of

MASKED = -1e30
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """Static sizes of a call: rows and tokens a tile, the widest part of a head, programs a row tile's past and the
    tokens of the first of them (see `splits`), and Triton's own."""

    row_tile: int
    key_tile: int
    widest_part: int
    splits: int
    split_tokens: int
    num_warps: int
    num_stages: int


class Inputs(NamedTuple):
    """What a program reads: references to whole arrays, or `()`."""

    q: Any
    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    layer: Any
    block_tables: Any
    kv_lens: Any
    query_lens: Any
    query_starts: Any
    tree: Any
    sinks: Any


@dataclass(frozen=True)
class Call:
    """Static facts of a call that its programs are traced with. Scales of values are multiplied by `v_factor`, and the
    results divided, to stay in the range of `compute_dtype`."""

    tiling: Tiling
    params: AttentionParams
    group: int
    query_len: int
    row_tiles: int
    ragged: bool
    kv_format: str
    compute_dtype: jnp.dtype
    v_factor: float
    v_dim: int
    interpret: bool


def key_columns(call: Call, head_dim: int):
    """The columns of each part of a key. Parts end where values do that are the first numbers of the keys."""
    latent, widest = call.params.latent, call.tiling.widest_part
    if latent:
        yield from columns(latent, widest)
    if latent < head_dim:
        yield from columns(head_dim - latent, widest, latent)


def program(call: Call, inputs: Inputs, *outputs):
    """Attends with the rows of program `(kv head and row tile, split, sequence)`. `outputs` end in the results `[T, N,
    Hv]`, or in those of splits and their weights; the zeros that a ragged step begins with come before, aliased."""
    head, row0 = pl.program_id(0) // call.row_tiles, pl.program_id(0) % call.row_tiles * call.tiling.row_tile
    rows = _Rows(call, inputs, head, row0)
    q_parts = [
        plgpu.load(
            inputs.q.at[rows.token[:, None], rows.head[:, None], cols[None, :]],
            mask=both(rows.used[:, None], inside),
            other=0.0,
        )
        for cols, inside in key_columns(call, inputs.q.shape[-1])
    ]
    walk = _Walk(call, inputs, rows, head, [part.astype(call.compute_dtype) for part in q_parts])
    highest, total, weighted = walk.run()
    some = total > 0
    inverse = jnp.where(some, 1.0 / jnp.where(some, total * call.v_factor, 1.0), 0.0)
    out_ref = outputs[-1] if call.tiling.splits == 1 else outputs[-2]
    where = () if call.tiling.splits == 1 else (rows.split,)
    # Splits that a row sees nothing of are not read again: their weight says so.
    stored = rows.used if call.ragged else rows.inside
    kept = stored & some if where else stored
    for (cols, inside), part in zip(columns(call.v_dim, call.tiling.widest_part), weighted, strict=True):
        plgpu.store(
            out_ref.at[(*where, rows.token[:, None], rows.head[:, None], cols[None, :])],
            jnp.where(rows.used[:, None], part * inverse[:, None], 0.0).astype(out_ref.dtype),
            mask=both(kept[:, None], inside),
        )
    if where:
        weight = jnp.where(some & rows.used, highest + jnp.log2(jnp.where(some, total, 1.0)), MASKED)
        plgpu.store(outputs[-1].at[rows.split, rows.token, rows.head], weight, mask=stored)


class _Rows:
    """The rows of a program: what token and head each is, which exist, and the tokens they see."""

    def __init__(self, call: Call, inputs: Inputs, head, row0):
        # Read here: interpreted loops do not know their program.
        sequence = pl.program_id(2)
        if call.ragged:
            # Of a long prompt's pieces the last ones take the longest: they begin first.
            sequence = pl.num_programs(2) - 1 - sequence
        self.sequence = sequence
        self.split = pl.program_id(1)
        window, group = call.params.window, call.group
        row = row0 + jax.lax.iota(jnp.int32, call.tiling.row_tile)
        self.query = row // group
        self.kv_len, query_len = inputs.kv_lens[sequence], inputs.query_lens[sequence]
        self.first = self.kv_len - query_len
        self.inside = self.query < call.query_len
        self.used = self.query < query_len
        start = sequence * call.query_len if isinstance(inputs.query_starts, tuple) else inputs.query_starts[sequence]
        self.token = start + self.query
        self.head = head * group + row % group
        self.tree = None
        least, most = row0 // group, jnp.minimum((row0 + call.tiling.row_tile - 1) // group, query_len - 1)
        if isinstance(inputs.tree, tuple):
            self.depth = self.query
        else:
            least, most = 0, query_len - 1
            self.tree = plgpu.load(inputs.tree.at[sequence, self.query], mask=self.inside, other=0)
            self.depth = jax.lax.population_count(self.tree) - 1
        # Tokens from `low` to before `high` are seen by some row, those from `all_low` to before `all_high` by all.
        self.low = jnp.maximum(self.first + least - window + 1, 0) if window else 0
        # Rows of no query see nothing.
        self.high = jnp.where(row0 // group < query_len, self.first + most + 1, 0)
        self.all_low = jnp.maximum(self.first + most - window + 1, 0) if window else 0
        self.all_high = self.first + least + 1

    def see(self, token, window: int):
        """Which rows see the tokens `[t]`: `[rows, t]`."""
        if self.tree is None:
            seen = token[None, :] <= (self.first + self.depth)[:, None]
        else:
            new = token - self.first
            bit = jnp.right_shift(self.tree[:, None], jnp.clip(new, 0, MAX_TREE - 1)[None, :]) & 1
            seen = (new < 0)[None, :] | ((bit > 0) & (new < self.kv_len - self.first)[None, :])
        if window:
            seen &= token[None, :] > (self.first + self.depth - window)[:, None]
        return seen


class _Walk:
    """The running softmax of a program's rows over the tokens they see."""

    def __init__(self, call: Call, inputs: Inputs, rows: _Rows, head, q_parts):
        self.call, self.inputs, self.rows, self.head, self.q_parts = call, inputs, rows, head, q_parts
        self.layer = inputs.layer[0]
        self.format = format_named(call.kv_format)
        self.dtype = call.compute_dtype
        widest = max(jnp.dtype(ref.dtype).itemsize for ref in (inputs.q, inputs.k))
        self.precision = None
        if self.dtype == jnp.float32:
            # TF32 holds bfloat16 and float16 as they are; float32 takes three products.
            exact = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if widest > 2 else jax.lax.Precision.DEFAULT
            self.precision = jax.lax.Precision.HIGHEST if call.interpret else exact

    def run(self):
        """Highest logit (of base 2), sum of weights and weighted values of each row."""
        tiling, rows = self.call.tiling, self.rows
        size = tiling.key_tile
        begin, end = rows.low // size, (rows.high + size - 1) // size
        if tiling.splits > 1:
            begin = jnp.maximum(begin, split_start(rows.split, tiling.split_tokens) // size)
            end = jnp.minimum(end, split_start(rows.split + 1, tiling.split_tokens) // size)
        carry = self._start()
        if not self.call.ragged:
            return jax.lax.fori_loop(begin, end, partial(self._tile, True), carry)
        # Only tiles at the edges of what is seen need masks.
        all_begin = jnp.minimum((rows.all_low + size - 1) // size, end) if self.call.params.window else begin
        all_end = jnp.clip(rows.all_high // size, all_begin, jnp.maximum(end, all_begin))
        if self.call.params.window:
            carry = jax.lax.fori_loop(begin, all_begin, partial(self._tile, True), carry)
        carry = jax.lax.fori_loop(all_begin, all_end, partial(self._tile, False), carry)
        return jax.lax.fori_loop(all_end, end, partial(self._tile, True), carry)

    def _start(self):
        row_tile = self.call.tiling.row_tile
        highest, total = jnp.full(row_tile, MASKED, jnp.float32), jnp.zeros(row_tile, jnp.float32)
        if not isinstance(self.inputs.sinks, tuple):
            # A sink is a logit seen before all others, whose value is zero.
            sink = plgpu.load(self.inputs.sinks.at[self.rows.head], mask=self.rows.inside, other=0.0)
            here = self.rows.split == 0
            highest = jnp.where(here, sink.astype(jnp.float32) * LOG2_E, highest)
            total = jnp.where(here, 1.0, total)
        widths = [size for _, size in parts_of(self.call.v_dim, self.call.tiling.widest_part)]
        return highest, total, tuple(jnp.zeros((row_tile, width), jnp.float32) for width in widths)

    def _tile(self, masked: bool, index, carry):
        highest, total, weighted = carry
        rows, params = self.rows, self.call.params
        token = index * self.call.tiling.key_tile + jax.lax.iota(jnp.int32, self.call.tiling.key_tile)
        held = (token >= rows.low) & (token < rows.high) if masked else None
        place = self._place(token, held)
        keys, logits = [], 0
        for q, column in zip(self.q_parts, key_columns(self.call, self.inputs.k.shape[-1]), strict=True):
            keys.append(self._read(self.inputs.k, place, held, *column))
            logits += self._dot(q, keys[-1], 1)
        k_scale = self._scale(self.inputs.k_scale, place, held)
        factor = params.scale if params.softcap else params.scale * LOG2_E
        logits *= factor if k_scale is None else k_scale * factor
        if params.softcap:
            # tanh by way of the exponential that there is an instruction for.
            power = jnp.exp2(logits * (2 * LOG2_E / params.softcap))
            logits = (params.softcap * LOG2_E) * (1 - 2 / (power + 1))
        if masked:
            seen = rows.see(token, params.window)
            logits = jnp.where(seen, logits, MASKED)
        new = jnp.maximum(highest, jnp.max(logits, axis=1))
        # What a row does not see weighs nothing once it has seen something, before or after.
        weights = jnp.exp2(logits - new[:, None])
        old = jnp.exp2(highest - new)
        total = total * old + jnp.sum(weights, axis=1)
        v_scale = k_scale if params.latent else self._scale(self.inputs.v_scale, place, held)
        if v_scale is not None:
            weights *= v_scale * self.call.v_factor
        weights = weights.astype(self.dtype)
        weighted = tuple(
            part * old[:, None] + self._dot(weights, values, 0)
            for part, values in zip(weighted, self._values(keys, place, held), strict=True)
        )
        return new, total, weighted

    def _values(self, keys, place, held):
        """The parts of a tile's values, which are the first ones of its keys where they are not read."""
        parts = columns(self.call.v_dim, self.call.tiling.widest_part)
        if self.call.params.latent:
            return keys[: len(list(parts))]
        return (self._read(self.inputs.v, place, held, *column) for column in parts)

    def _place(self, token, held):
        """Block and offset of each token; block 0 where there is nothing to read."""
        block_size = self.inputs.k.shape[2]
        ref = self.inputs.block_tables.at[self.rows.sequence, token // block_size]
        block = plgpu.load(ref) if held is None else plgpu.load(ref, mask=held, other=0)
        return block, token % block_size

    def _read(self, ref, place, held, cols, inside):
        """Numbers `[t, width]` of some columns of a tile, zero where none may be read."""
        block, offset = place
        ref = ref.at[self.layer, block[:, None], offset[:, None], self.head, cols[None, :]]
        mask = inside if held is None else both(held[:, None], inside)
        codes = plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))
        return self.format.decode(codes, self.dtype)

    def _scale(self, ref, place, held):
        """The tile's scales as they multiply `[rows, t]`, or None."""
        if isinstance(ref, tuple):
            return None
        if ref.ndim == 2:
            return ref[self.layer, self.head]
        block, offset = place
        ref = ref.at[self.layer, block, self.head, offset]
        return (plgpu.load(ref) if held is None else plgpu.load(ref, mask=held, other=0.0))[None, :]

    def _dot(self, a, b, contracted: int):
        numbers = (((1,), (contracted,)), ((), ()))
        return jax.lax.dot_general(a, b, numbers, precision=self.precision, preferred_element_type=jnp.float32)
