# SPDX-License-Identifier: Apache-2.0
"""`StepOutput`: the few small arrays that a step sends to the host, in one transfer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.models.proposer import Drafts
from metrale_jax.sampling.accept import acceptance_rule
from metrale_jax.sampling.history import remember, remember_chunks
from metrale_jax.sampling.rules import repeated, ruled_logits
from metrale_jax.sampling.sample import chosen_logprobs, draw, drawable
from pallas_kernels.shapes import ceil_div

# Up to so many rows are drawn all at once; more than that, in pieces of so many.
WHOLE_ROWS = 64
PIECE_ROWS = 32


@struct.dataclass
class StepOutput:
    """What a step drew.

    int32 `tokens [S, Q]`, of which the first `num_tokens [S]` stand; bool `finite [S]`, false where a logit that one of
    them was drawn from was not a finite number; bool `drawable [S, Q]`, false where the rules left nothing to draw and
    the token is 0. float32 `logprobs [S, Q]` and `top_logprobs [S, Q, k]` with int32 `top_ids`, or `()` where the step
    was built without them. `num_drafts [S]` were verified, or `()`.
    """

    tokens: Any
    num_tokens: Any
    finite: Any
    drawable: Any
    logprobs: Any = ()
    top_ids: Any = ()
    top_logprobs: Any = ()
    num_drafts: Any = ()


def standing(out: StepOutput, num_tokens: Int[Array, " S"], num_drafts: Any = ()) -> StepOutput:
    """The output of `sample_rows` of which the first `num_tokens` of each row stand; whether the others were drawn from
    finite logits is no matter. `num_drafts` of the row were drafts."""
    later = jnp.arange(out.tokens.shape[1], dtype=jnp.int32) >= num_tokens[:, None]
    return out.replace(num_tokens=num_tokens, finite=jnp.all(out.finite | later, axis=1), num_drafts=num_drafts)


def sample_rows(
    logits: Float[Array, "R V"],
    sampling: SamplingState,
    positions: Int[Array, "S Q"],
    num_logprobs: int,
    drafts: Drafts | None = None,
    acceptance: str = "exact",
) -> StepOutput:
    """Tokens for `Q` consecutive positions of each sequence, `R = S Q` rows, with `finite [S, Q]` of each: see
    `standing` for what of them stands. Of `drafts` before each row's last position those stand that the rule called
    `acceptance` accepts, and a token more: `num_tokens`.

    Many rows are drawn a piece at a time, which changes no token: rules and filters make several arrays of the logits'
    size, and hundreds of rows of a large vocabulary would take gigabytes.
    """
    num_sequences, width = positions.shape
    if num_sequences * width <= WHOLE_ROWS:
        return _drawn(logits, sampling, positions, drafts, num_logprobs, acceptance)
    piece = max(1, PIECE_ROWS // width)
    num_pieces = ceil_div(num_sequences, piece)

    def draw_piece(start):
        def cut(leaf, unit=1):
            return jax.lax.dynamic_slice_in_dim(leaf, start * unit, piece * unit)

        rows = jax.tree.map(cut, (sampling, positions, drafts))
        return _drawn(cut(logits, width), *rows, num_logprobs, acceptance)

    # The last piece ends where the rows do, and repeats some of the piece before it.
    starts = jnp.minimum(jnp.arange(num_pieces, dtype=jnp.int32) * piece, num_sequences - piece)
    repeats = num_pieces * piece - num_sequences

    def joined(leaf):
        return jnp.concatenate([leaf[:-1].reshape(-1, *leaf.shape[2:]), leaf[-1, repeats:]])

    return jax.tree.map(joined, jax.lax.map(draw_piece, starts))


def _drawn(logits, sampling, positions, drafts, num_logprobs, acceptance):
    num_sequences, width = positions.shape
    ruled = ruled_logits(logits, sampling, positions)
    plain = sampling.replace(extras=())
    each = jax.tree.map(lambda leaf: repeated(leaf, width), plain)
    tokens = draw(ruled, each, positions.reshape(-1)).reshape(num_sequences, width)
    accepted = jnp.full(num_sequences, width - 1, jnp.int32)
    if drafts is not None:
        accept = acceptance_rule(acceptance).accept
        tokens, accepted = accept(drafts.tokens, drafts.lens, tokens, ruled, drafts.scores, plain, positions)
    out = StepOutput(
        tokens=tokens,
        num_tokens=accepted + 1,
        finite=jnp.all(jnp.isfinite(logits), axis=-1).reshape(num_sequences, width),
        drawable=drawable(ruled).reshape(num_sequences, width),
    )
    if not num_logprobs:
        return out
    chosen, ids, top = chosen_logprobs(logits, tokens.reshape(-1), num_logprobs)
    return out.replace(
        logprobs=chosen.reshape(num_sequences, width),
        top_ids=ids.reshape(num_sequences, width, -1),
        top_logprobs=top.reshape(num_sequences, width, -1),
    )


def remembering(
    state: SequenceState, positions: Int[Array, "S Q"], tokens: Int[Array, "S Q"], where: Bool[Array, " S"]
) -> SequenceState:
    """The state whose history, if it has one, holds `tokens` at `positions` of the sequences picked by `where`."""
    places = jnp.where(where[:, None], positions, -1)
    extras = remember(state.sampling.extras, places, tokens)
    return state.replace(sampling=state.sampling.replace(extras=extras))


def remembering_chunks(state: SequenceState, tokens: Int[Array, " T"], lengths: Int[Array, " S"]) -> SequenceState:
    """The state whose history, if it has one, holds the next `lengths[s]` tokens of each sequence, laid end to end."""
    extras = remember_chunks(state.sampling.extras, state.seq_len, tokens, lengths)
    return state.replace(sampling=state.sampling.replace(extras=extras))
