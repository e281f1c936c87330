# SPDX-License-Identifier: Apache-2.0
"""Filters of logits by a threshold that is searched for, since sorting a whole vocabulary each step is too slow.

Every filter keeps the tokens whose logit reaches a bound, so all of them together are one number a row. A float32's
bits, reordered, are an integer of the same order: 32 halvings find the exact bound, ties included.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

LANES = 128


def filter_bound(
    scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"], min_p: Float[Array, " R"]
) -> Float[Array, " R"]:
    """The least logit that survives top_k, then top_p on what is left, then min_p; `scaled` is after temperature.

    A token tied with the last survivor survives too. top_k below 1, top_p 1 and min_p 0 are off.
    """
    num_rows, vocab = scaled.shape
    tiles = jnp.pad(scaled, ((0, 0), (0, -vocab % LANES)), constant_values=-jnp.inf).reshape(num_rows, -1, LANES)
    highest = jnp.max(scaled, axis=-1)
    keys = _ordered(tiles)
    ones = jnp.ones_like(tiles)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
    k_bound = _bound(keys, ones, wanted)
    mass = jnp.exp(tiles - highest[:, None, None])
    kept = _total(jnp.where(keys >= k_bound[:, None, None], mass, 0))
    # A share that rounds to nothing would be reached by no token at all.
    share = jnp.maximum(top_p * kept, jnp.finfo(jnp.float32).tiny)
    p_bound = jnp.where(top_p < 1, _bound(keys, mass, share), k_bound)
    bound = _from_ordered(jnp.maximum(k_bound, p_bound))
    # The likeliest token always survives: p * kept may round above the whole mass, or min_p above 1.
    return jnp.minimum(jnp.maximum(bound, highest + jnp.log(min_p)), highest)


def _bound(keys: UInt[Array, "R A B"], weights: Float[Array, "R A B"], wanted: Float[Array, " R"]) -> UInt[Array, " R"]:
    """The greatest key at or above which the weights reach `wanted`; 0 if they never do."""

    def halve(step, low):
        trial = low | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        reached = _total(jnp.where(keys >= trial[:, None, None], weights, 0)) >= wanted
        return jnp.where(reached, trial, low)

    return jax.lax.fori_loop(0, 32, halve, jnp.zeros(keys.shape[0], jnp.uint32))


def _total(x: Float[Array, "R A B"]) -> Float[Array, " R"]:
    # Summing across tiles first keeps the long sum in vector lanes.
    return jnp.sum(jnp.sum(x, axis=1), axis=1)


def _ordered(x: Float[Array, "*n"]) -> UInt[Array, "*n"]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _from_ordered(keys: UInt[Array, "*n"]) -> Float[Array, "*n"]:
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32(0x7FFFFFFF), ~keys)
    return jnp.where(keys == 0, -jnp.inf, jax.lax.bitcast_convert_type(bits, jnp.float32))
