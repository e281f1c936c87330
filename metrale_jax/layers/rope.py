# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), half-split as Hugging Face checkpoints expect."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.core.config import RopeConfig


def rope_tables(
    rope: RopeConfig, positions: Int[Array, " T"], rope_lens: Int[Array, " T"]
) -> tuple[Float[Array, "T Half"], Float[Array, "T Half"]]:
    """Cosines and sines of each token's angles, float32, `attention_factor` included.

    `rope_lens` is each token's governing sequence length: only LongRoPE and dynamic NTK look at it.
    """
    frequencies = jnp.asarray(rope.inv_freq, jnp.float32)
    if rope.ntk_max_len:
        frequencies = _ntk_frequencies(rope, rope_lens)
    elif rope.switch_len:
        long = jnp.asarray(rope.long_inv_freq, jnp.float32)
        frequencies = jnp.where(rope_lens[:, None] > rope.switch_len, long, frequencies)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def _ntk_frequencies(rope: RopeConfig, rope_lens: Int[Array, " T"]) -> Float[Array, "T Half"]:
    # base' = base * (f * L / M - (f - 1)) ^ (d / (d - 2)), L the longer of the sequence and M (bloc97, emozilla 2023).
    half = len(rope.inv_freq)
    width = 2 * half
    length = jnp.maximum(rope_lens, rope.ntk_max_len).astype(jnp.float32)
    stretch = rope.ntk_factor * length / rope.ntk_max_len - (rope.ntk_factor - 1)
    log_base = jnp.log(rope.ntk_theta) + jnp.log(stretch) * (width / (width - 2))
    return jnp.exp(-log_base[:, None] * (2 * jnp.arange(half, dtype=jnp.float32) / width))


def apply_rope(
    x: Float[Array, "T N H"], cos: Float[Array, "T Half"], sin: Float[Array, "T Half"]
) -> Float[Array, "T N H"]:
    """`x` with its first `2 * Half` widths rotated; widths beyond pass through (partial rotary)."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x.dtype)
