# SPDX-License-Identifier: Apache-2.0
"""Filters of logits by a threshold that is searched for, since sorting a whole vocabulary each step is too slow.

All filters but one keep the tokens whose logit reaches a bound, so that together they are one number a row; typical
sampling keeps an interval of logits. A float32's bits, reordered, are an integer of the same order: 32 halvings find
the exact bound, ties included.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from metrale_jax.core.sequence import SamplingState

LANES = 128


class Limits(NamedTuple):
    """Which tokens of a row survive: those with a logit of at least `bound`, and within `radius` of `centre`."""

    bound: Float[Array, " R"]
    centre: Float[Array, " R"]
    radius: Float[Array, " R"]


def filter_limits(scaled: Float[Array, "R V"], sampling: SamplingState, hot: Bool[Array, " R"]) -> Limits:
    """What all the filters of `sampling` keep; `scaled` is after temperature. Rows that are not `hot` may keep all."""
    bounded = (sampling.top_n_sigma > 0) | (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    none = jnp.zeros(scaled.shape[0], jnp.float32)
    bound = jax.lax.cond(
        jnp.any(bounded & hot),
        lambda x: filter_bound(x, sampling.top_n_sigma, sampling.top_k, sampling.top_p, sampling.min_p),
        lambda x: none - jnp.inf,
        scaled,
    )
    centre, radius = jax.lax.cond(
        jnp.any((sampling.typical_p < 1) & hot),
        lambda x, least: typical_interval(x, least, sampling.typical_p),
        lambda x, least: (none, none + jnp.inf),
        scaled,
        bound,
    )
    return Limits(bound, centre, radius)


def survives(scaled: Float[Array, "R V"], limits: Limits) -> Bool[Array, "R V"]:
    """Which tokens may be drawn."""
    near = jnp.abs(scaled - limits.centre[:, None]) <= limits.radius[:, None]
    return (scaled >= limits.bound[:, None]) & near


def filter_bound(
    scaled: Float[Array, "R V"],
    top_n_sigma: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
) -> Float[Array, " R"]:
    """The least logit that survives top_n_sigma, then top_k, top_p and min_p on what is left; after temperature.

    A token tied with the last survivor survives too. top_n_sigma 0, top_k below 1, top_p 1 and min_p 0 are off.
    """
    vocab = scaled.shape[1]
    tiles = _tiled(scaled)
    highest = jnp.max(scaled, axis=-1)
    keys = _ordered(tiles)
    ones = jnp.ones_like(tiles)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
    k_bound = jnp.maximum(_bound(keys, ones, wanted), _ordered(_sigma_bound(scaled, highest, top_n_sigma)))
    mass = jnp.exp(tiles - highest[:, None, None])
    kept = _total(jnp.where(keys >= k_bound[:, None, None], mass, 0))
    # A share that rounds to nothing would be reached by no token at all.
    share = jnp.maximum(top_p * kept, jnp.finfo(jnp.float32).tiny)
    p_bound = jnp.where(top_p < 1, _bound(keys, mass, share), k_bound)
    bound = _from_ordered(jnp.maximum(k_bound, p_bound))
    # The likeliest token always survives: p * kept may round above the whole mass, or min_p above 1.
    return jnp.minimum(jnp.maximum(bound, highest + jnp.log(min_p)), highest)


def _sigma_bound(scaled, highest, top_n_sigma):
    # Top-n-sigma (Tang et al. 2024): the deviation of the logits not masked away. Temperature scales both sides.
    real = scaled > -jnp.inf
    count = jnp.maximum(jnp.sum(real, axis=-1, dtype=jnp.int32), 1).astype(jnp.float32)
    below = jnp.where(real, scaled - highest[:, None], 0)
    mean = jnp.sum(below, axis=-1) / count
    variance = jnp.sum(jnp.where(real, (below - mean[:, None]) ** 2, 0), axis=-1) / count
    return jnp.where(top_n_sigma > 0, highest - top_n_sigma * jnp.sqrt(variance), -jnp.inf)


def typical_interval(
    scaled: Float[Array, "R V"], bound: Float[Array, " R"], typical_p: Float[Array, " R"]
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """Centre and radius of the logits that locally typical sampling keeps of those that reach `bound`.

    A token's information is `-log p = total - logit` and the entropy is its mean, so their distance is that of the
    logit from the mean logit (Meister et al. 2022). Kept are the nearest tokens up to a mass of `typical_p`, and what
    is tied with the last; 1 is off.
    """
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.where(scaled >= bound[:, None], jnp.exp(scaled - highest), 0)
    total = jnp.sum(mass, axis=-1)
    below = jnp.where(mass > 0, scaled - highest, 0)
    centre = highest[:, 0] + jnp.sum(mass * below, axis=-1) / total
    nearness = _tiled(-jnp.abs(scaled - centre[:, None]))
    share = jnp.maximum(typical_p * total, jnp.finfo(jnp.float32).tiny)
    radius = -_from_ordered(_bound(_ordered(nearness), _tiled(mass, 0), share))
    return centre, jnp.where(typical_p < 1, radius, jnp.inf)


def _tiled(x, padding=-jnp.inf):
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)), constant_values=padding).reshape(x.shape[0], -1, LANES)


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
