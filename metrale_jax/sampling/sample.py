# SPDX-License-Identifier: Apache-2.0
"""Drawing a token: Gumbel-max with noise that depends on the request's seed and the token's position alone."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.params import GREEDY_BELOW
from metrale_jax.sampling.transforms import filter_bound

ROOT_SEED = 0


def draw(logits: Float[Array, "R V"], sampling: SamplingState, positions: Int[Array, " R"]) -> Int[Array, " R"]:
    """One token id a row; `positions` says where in its sequence the token will stand.

    `token = argmax(processed(logits) + gumbel(seed, position))`, without noise where the temperature means greedy
    (Gumbel 1954; Maddison et al. 2014). The same row gives the same token in any batch.
    """
    allowed = _without_early_stops(logits, sampling, positions)
    greedy = _likeliest(allowed)
    hot = sampling.temperature >= GREEDY_BELOW

    def sampled(_):
        scaled = allowed / jnp.where(hot, sampling.temperature, 1)[:, None]
        filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
        bound = jax.lax.cond(
            jnp.any(filtered & hot),
            lambda x: filter_bound(x, sampling.top_k, sampling.top_p, sampling.min_p),
            lambda x: jnp.full(x.shape[0], -jnp.inf),
            scaled,
        )
        noisy = jnp.where(
            scaled >= bound[:, None], scaled + gumbel(sampling.seed, positions, logits.shape[1]), -jnp.inf
        )
        return jnp.where(hot, _likeliest(noisy), greedy)

    return jax.lax.cond(jnp.any(hot), sampled, lambda _: greedy, None)


def _likeliest(scores: Float[Array, "R V"]) -> Int[Array, " R"]:
    # The first index of the greatest score. Two plain reductions run in vector lanes; XLA's argmax, a reduction over
    # pairs, takes the CPU twice as long. Rows with NaN, which the step reports, get the last id.
    vocab = scores.shape[1]
    top = jnp.max(scores, axis=-1, keepdims=True)
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.min(jnp.where(scores == top, ids, vocab - 1), axis=-1)


def gumbel(seeds: UInt[Array, " R"], positions: Int[Array, " R"], vocab: int) -> Float[Array, "R V"]:
    """Standard Gumbel noise, a row for each (seed, position)."""
    root = jax.random.key(ROOT_SEED)

    def row(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(root, seed), position), (vocab,), jnp.float32)

    return jax.vmap(row)(seeds, positions)


def _without_early_stops(logits, sampling, positions):
    early = positions < sampling.min_len

    def masked(x):
        rows = jnp.arange(x.shape[0])[:, None]
        ids = jnp.where(early[:, None], sampling.stop_ids, x.shape[1])
        return x.at[rows, ids].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(early), masked, lambda x: x, logits)


def chosen_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], num_top: int
) -> tuple[Float[Array, " R"], Int[Array, "R k"], Float[Array, "R k"]]:
    """Log-probabilities of the chosen tokens; ids and log-probabilities of the `num_top` likeliest; of raw logits."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - total
    top, ids = jax.lax.top_k(logits, num_top)
    return chosen, ids.astype(jnp.int32), top - total[:, None]
