# SPDX-License-Identifier: Apache-2.0
"""Accepting drafts: the rules by which a target lets the tokens that a drafter guessed stand, chosen by name.

Every rule has one signature. `drafts` were proposed, the first `draft_lens` of each row; `drawn` is what the target
itself draws at each of the `J1 = J + 1` positions, `ruled` its logits there (`ruled_logits`). `draft_scores` are the
logits that the drafter gave to `draw` for each draft, minus infinity where it cannot draft, or `()` for a proposer
that guesses without chance. Out come `tokens`, of which the first `accepted + 1` stand, and `accepted`: the accepted
drafts, then one token of the target's. Sequences do not touch each other: a caller may judge a few at a time. Greedy
rows are exact under every rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from metrale_jax.core.errors import ConfigError, shown
from metrale_jax.core.sequence import SamplingState
from metrale_jax.sampling.rules import repeated
from metrale_jax.sampling.sample import filtered_logits, is_hot, likeliest, noise_key

# Thresholds of typical acceptance as published with Medusa (Cai et al. 2024): a probability, and its share of exp(-H).
EPSILON = 0.09
DELTA = 0.3
# Streams of noise beside a token's own Gumbel noise. Folding in a number hashes it as drawing hashes the index of a
# token; these are above any of those.
COIN_STREAM = 0xFFFFFFFF
RESIDUAL_STREAM = 0xFFFFFFFE

Judged = tuple[Int[Array, "S J1"], Int[Array, " S"]]
Scores = Float[Array, "S J V"] | tuple[()]


@dataclass(frozen=True)
class AcceptanceRule:
    """A way to accept drafts.

    `needs_scores`: a drafter that draws its guesses must pass `draft_scores`; those of others are `()`. `needs_ruled`:
    the rule reads `ruled`, which may be `()` otherwise. `warning` is what to tell, once, whoever chooses the rule, or
    empty.
    """

    name: str
    accept: Callable
    needs_scores: bool
    needs_ruled: bool
    warning: str


def acceptance_rule(name: str) -> AcceptanceRule:
    """The rule called `name`. Raises `ConfigError` with the list for one unknown."""
    if not isinstance(name, str) or name not in ACCEPTANCE_RULES:
        raise ConfigError(f"acceptance={shown(name)} is not one of {', '.join(ACCEPTANCE_RULES)}; choose one.")
    return ACCEPTANCE_RULES[name]


def accepted_lengths(
    drafts: Int[Array, "S J"], draft_lens: Int[Array, " S"], targets: Int[Array, "S J1"]
) -> Int[Array, " S"]:
    """How many leading drafts of each row equal the targets; `J1` is `J + 1`, its last column the bonus token."""
    return _leading(drafts == targets[:, :-1], draft_lens)


def exact(
    drafts: Int[Array, "S J"],
    draft_lens: Int[Array, " S"],
    drawn: Int[Array, "S J1"],
    ruled: Float[Array, "R V"] | tuple[()],
    draft_scores: Scores,
    sampling: SamplingState,
    positions: Int[Array, "S J1"],
) -> Judged:
    """A draft stands where it equals the token that the target itself draws: the stream is the plain one.

    Drafts drawn with the same noise agree most. For one position that is with probability
    `sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`, at least half as often as the best that any rule can do
    (Daliri et al. 2025, drafter-invariant speculative decoding).
    """
    return drawn, accepted_lengths(drafts, draft_lens, drawn)


def rejection(
    drafts: Int[Array, "S J"],
    draft_lens: Int[Array, " S"],
    drawn: Int[Array, "S J1"],
    ruled: Float[Array, "R V"],
    draft_scores: Scores,
    sampling: SamplingState,
    positions: Int[Array, "S J1"],
) -> Judged:
    """A draft stands with probability `min(1, p / q)`; the first that does not is drawn anew from `max(0, p - q)`.

    Leviathan et al. 2023, Chen et al. 2023. `p` is the target's distribution after temperature and filters and `q` the
    drafter's after the same ones, which is to say that `draw` made the drafts from `draft_scores` with the rows of
    `sampling`. A draft that `q` gives nothing, and any where `draft_scores` is `()`, counts as certain: `q` is 1 there.
    Certain drafts stand with probability `p`, no more often than under `exact`.

    Tokens have the target's distribution as long as neither the drafts nor their number know the noise used here, a
    coin and a residual draw from two streams of their own for each (seed, position), and a draft is not left out for
    what it is: `draft_lens` may depend on scores and on the drafts before, not on the draft left out.
    """
    if not drafts.shape[1]:
        return drawn, jnp.zeros_like(draft_lens)
    hot = is_hot(sampling)
    same = drafts == drawn[:, :-1]

    def judged(_):
        p = _log_shares(ruled.reshape(*drawn.shape, -1)[:, :-1], sampling)
        q = _proposal(draft_scores, drafts, p.shape[-1], sampling)
        lucky = jnp.log(_coins(sampling.seed, positions[:, :-1])) < _at(p, drafts) - _at(q, drafts)
        accepted = _leading(jnp.where(hot[:, None], lucky, same), draft_lens)
        end = jnp.minimum(accepted, drafts.shape[1] - 1)
        own = _at(drawn, accepted)
        anew = _residual_draw(_row(p, end), _row(q, end), own, sampling.seed, _at(positions, end))
        return _followed(drafts, accepted, drawn, jnp.where(hot & (accepted < draft_lens), anew, own))

    return jax.lax.cond(jnp.any(hot), judged, lambda _: (drawn, _leading(same, draft_lens)), None)


def typical(
    drafts: Int[Array, "S J"],
    draft_lens: Int[Array, " S"],
    drawn: Int[Array, "S J1"],
    ruled: Float[Array, "R V"],
    draft_scores: Scores,
    sampling: SamplingState,
    positions: Int[Array, "S J1"],
) -> Judged:
    """A draft stands where `p > min(EPSILON, DELTA exp(-H(p)))`; after the last comes the target's own draw.

    Cai et al. 2024 (Medusa), with `p` after temperature and filters. A draft that the target itself draws stands as
    well, which is the token that would come in its place: so no fewer stand than under `exact`. The more certain the
    target is, the likelier a draft must be; rare tokens are replaced by likely ones.
    """
    if not drafts.shape[1]:
        return drawn, jnp.zeros_like(draft_lens)
    same = drafts == drawn[:, :-1]

    def judged(_):
        p = _log_shares(ruled.reshape(*drawn.shape, -1)[:, :-1], sampling)
        share = jnp.exp(p)
        entropy = -jnp.sum(jnp.where(share > 0, share * p, 0), axis=-1)
        likely = jnp.exp(_at(p, drafts)) > jnp.minimum(EPSILON, DELTA * jnp.exp(-entropy))
        accepted = _leading(same | (likely & is_hot(sampling)[:, None]), draft_lens)
        return _followed(drafts, accepted, drawn, _at(drawn, accepted))

    return jax.lax.cond(jnp.any(is_hot(sampling)), judged, lambda _: (drawn, _leading(same, draft_lens)), None)


ACCEPTANCE_RULES: Mapping[str, AcceptanceRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            AcceptanceRule("exact", exact, needs_scores=False, needs_ruled=False, warning=""),
            AcceptanceRule(
                "rejection",
                rejection,
                needs_scores=True,
                needs_ruled=True,
                warning="acceptance='rejection' keeps the distribution of answers, but which answer a seed gives "
                "depends on the drafts",
            ),
            AcceptanceRule(
                "typical",
                typical,
                needs_scores=False,
                needs_ruled=True,
                warning="acceptance='typical' changes the distribution of answers",
            ),
        )
    }
)


def _leading(stands: Bool[Array, "S J"], draft_lens: Int[Array, " S"]) -> Int[Array, " S"]:
    within = jnp.arange(stands.shape[1], dtype=jnp.int32) < draft_lens[:, None]
    return jnp.sum(jnp.cumprod((stands & within).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(leaf: Shaped[Array, "*n A"], index: Int[Array, "*n"]) -> Shaped[Array, "*n"]:
    return jnp.take_along_axis(leaf, index[..., None], axis=-1)[..., 0]


def _row(leaf: Float[Array, "S J V"], index: Int[Array, " S"]) -> Float[Array, "S V"]:
    return jnp.take_along_axis(leaf, index[:, None, None], axis=1)[:, 0]


def _followed(drafts, accepted, drawn, last) -> Judged:
    """The accepted drafts, then `last`; what is past that does not stand."""
    place = jnp.arange(drawn.shape[1], dtype=jnp.int32)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(place < accepted[:, None], padded, drawn)
    return jnp.where(place == accepted[:, None], last[:, None], tokens), accepted


def _log_shares(ruled: Float[Array, "S J V"], sampling: SamplingState) -> Float[Array, "S J V"]:
    """Log-probabilities after temperature and filters; minus infinity throughout where nothing can be drawn."""
    each = jax.tree.map(lambda leaf: repeated(leaf, ruled.shape[1]), sampling.replace(extras=()))
    kept = filtered_logits(ruled.reshape(-1, ruled.shape[2]), each)
    total = jax.nn.logsumexp(kept, axis=-1, keepdims=True)
    return jnp.where(kept == -jnp.inf, -jnp.inf, kept - total).reshape(ruled.shape)


def _proposal(draft_scores, drafts, vocab, sampling) -> Float[Array, "S J V"]:
    """Log-probabilities that the drafts were drawn with."""
    certain = jnp.where(jnp.arange(vocab, dtype=jnp.int32) == drafts[..., None], 0.0, -jnp.inf)
    if isinstance(draft_scores, tuple):
        return certain
    q = _log_shares(draft_scores, sampling)
    return jnp.where(_at(q, drafts)[..., None] == -jnp.inf, certain, q)


def _coins(seeds: UInt[Array, " S"], positions: Int[Array, "S J"]) -> Float[Array, "S J"]:
    """A uniform number from [0, 1) for each (seed, position)."""

    def toss(seed, position):
        return jax.random.uniform(jax.random.fold_in(noise_key(seed, position), COIN_STREAM), (), jnp.float32)

    return jax.vmap(jax.vmap(toss, (None, 0)))(seeds, positions)


def _residual_draw(
    p: Float[Array, "S V"],
    q: Float[Array, "S V"],
    otherwise: Int[Array, " S"],
    seeds: UInt[Array, " S"],
    positions: Int[Array, " S"],
) -> Int[Array, " S"]:
    """Tokens from `max(0, p - q)`, or `otherwise` where rounding, or a row of nothing, leaves no mass."""

    def noise(seed, position):
        key = jax.random.fold_in(noise_key(seed, position), RESIDUAL_STREAM)
        return jax.random.gumbel(key, (p.shape[1],), jnp.float32)

    left = jnp.log(jnp.maximum(jnp.exp(p) - jnp.exp(q), 0))
    token = likeliest(left + jax.vmap(noise)(seeds, positions))
    return jnp.where(jnp.max(left, axis=-1) > -jnp.inf, token, otherwise)
