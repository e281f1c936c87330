# SPDX-License-Identifier: Apache-2.0
"""Paged append on a TPU: rows go to their slots as copies of their own, scales of rows by changing their blocks' tiles.

XLA's scatter is in place only where it likes the pool's order; for a few heads of narrow codes, and for a scale, which
is one lane of its block's tile `[K, B]`, it copies the whole pool into an order that pads less, and back.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_formats.pages import KvPages, encode_rows
from pallas_kernels.shapes import ceil_div

# Tokens whose copies are in flight together: enough to hide the latency of memory.
TOKENS_AT_A_TIME = 64


def supports(**facts) -> str:
    """Why a call with these facts is declined, or an empty string."""
    if facts["num_kv_heads"] == 1:
        return "num_kv_heads=1 puts tokens beside each other in words, of which it could not write one; more are served"
    return ""


def append(
    pages: KvPages,
    layer: int | Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T K H"],
    values: Float[Array, "T K Hv"],
    interpret: Any = False,
) -> KvPages:
    """See `op.kv_append`; slot 0 is left as it is. `interpret` is False or what `pallas_call` takes to run on a CPU."""
    rows, pools, scales = [], [pages.k, pages.v], []
    for new, scale in ((keys, pages.k_scale), (values, pages.v_scale)):
        of_heads = scale[layer] if pages.format.scaled and not pages.scale_per_row else ()
        codes, row_scales = encode_rows(new, pages.format, of_heads)
        rows.append(codes)
        scales.append(row_scales)
    if pages.scale_per_row:
        # A lane is set by choosing it from a whole row of the same number.
        rows += [jnp.broadcast_to(x[..., None], (*x.shape, pages.block_size)) for x in scales]
        pools += [pages.k_scale, pages.v_scale]
    k, v, *scales = _call(rows, pools, _numbers(layer, slots, pages.block_size), interpret)
    pages = pages.replace(k=k, v=v)
    return pages.replace(k_scale=scales[0], v_scale=scales[1]) if scales else pages


def _numbers(layer, slots, block_size):
    """The layer; each token's block and offset, and which token of its run is the first of that block."""
    steps = ceil_div(slots.shape[0], TOKENS_AT_A_TIME)
    slots = jnp.pad(slots, (0, steps * TOKENS_AT_A_TIME - slots.shape[0]))
    block, offset = (f(slots, jnp.int32(block_size)) for f in (jax.lax.div, jax.lax.rem))
    runs = block.reshape(steps, TOKENS_AT_A_TIME)
    leader = jnp.argmax(runs[:, :, None] == runs[:, None], axis=-1).astype(jnp.int32).reshape(-1)
    return jnp.asarray(layer, jnp.int32).reshape(1), block, offset, leader


def _call(rows, pools, numbers, interpret):
    num_tokens = numbers[1].size
    rows = [jnp.pad(x, ((0, num_tokens - x.shape[0]), (0, 0), (0, 0))) for x in rows]
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    of_run = [pl.BlockSpec((TOKENS_AT_A_TIME, *x.shape[1:]), lambda step, *_: (step, 0, 0)) for x in rows]
    tiles = [pltpu.VMEM((TOKENS_AT_A_TIME, *x.shape[2:]), x.dtype) for x in pools[2:]]
    return pl.pallas_call(
        partial(_body, len(pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(num_tokens // TOKENS_AT_A_TIME,),
            in_specs=[*of_run, *[in_place] * len(pools)],
            out_specs=[in_place] * len(pools),
            scratch_shapes=[*tiles, pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={len(numbers) + len(rows) + index: index for index in range(len(pools))},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name="append",
    )(*numbers, *rows, *pools)


def _body(count, layer, block, offset, leader, *refs):
    """One run of tokens. A block's tiles of scales are in the place of its first token in the run."""
    rows, pools, (*tiles, done) = refs[:count], refs[2 * count : 3 * count], refs[3 * count :]
    first = pl.program_id(0) * TOKENS_AT_A_TIME

    def each(chosen, copies):
        """Starts the copies of every chosen token, then waits for them. What goes to block 0 is padding."""
        for finish in (False, True):

            def visit(token, carry, finish=finish):
                @pl.when(chosen(token) & (block[first + token] > 0))
                def _():
                    for ends in copies(token):
                        copy = pltpu.make_async_copy(*ends, done)
                        copy.wait() if finish else copy.start()

                return carry

            jax.lax.fori_loop(0, TOKENS_AT_A_TIME, visit, None)

    def set_lane(token, carry):
        place = leader[first + token]
        for tile, new in zip(tiles, rows[2:], strict=True):
            lane = jax.lax.broadcasted_iota(jnp.int32, tile.shape[1:], 1)
            tile[place] = jnp.where(lane == offset[first + token], new[token], tile[place])
        return carry

    def codes(token):
        slot = layer[0], block[first + token], offset[first + token]
        return [(new.at[token], pool.at[slot]) for new, pool in zip(rows[:2], pools[:2], strict=True)]

    def scales(token):
        place = layer[0], block[first + token]
        return [(pool.at[place], tile.at[token]) for tile, pool in zip(tiles, pools[2:], strict=True)]

    def leads(token):
        return leader[first + token] == token

    each(lambda token: True, codes)
    if tiles:
        each(leads, scales)
        jax.lax.fori_loop(0, TOKENS_AT_A_TIME, set_lane, None)
        each(leads, lambda token: [ends[::-1] for ends in scales(token)])


append_interpreted = partial(append, interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))
