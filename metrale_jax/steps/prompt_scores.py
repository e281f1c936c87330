# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds each token of a prompt, a few rows at a time: logits of all of them never exist at once."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.models.decoder import DecoderParams, Model, head_logits
from metrale_jax.sampling.sample import score_rows
from pallas_kernels.shapes import ceil_div

PIECE_ROWS = 64


@struct.dataclass
class PromptScores:
    """For each of `T` tokens: float32 `logprobs [T]`, int32 `ranks [T]` from 1, and int32 `top_ids [T, k]` with their
    float32 `top_logprobs`."""

    logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any


def prompt_logprobs(
    model: Model, params: DecoderParams, hidden: Float[Array, "T D"], targets: Int[Array, " T"], num_top: int
) -> PromptScores:
    """Scores of `targets`, the token after each of the final rows `hidden`, by the raw logits as `logprobs` has them.

    A target outside the vocabulary, as for the prompt's last token, is scored as the nearest token inside it and means
    nothing.
    """
    num_tokens = targets.shape[0]
    piece = min(PIECE_ROWS, num_tokens)
    num_pieces = ceil_div(num_tokens, piece)
    # A row past the end is the last one again, and is cut off below.
    rows = jnp.minimum(jnp.arange(num_pieces * piece, dtype=jnp.int32), num_tokens - 1).reshape(num_pieces, piece)
    known = jnp.clip(targets, 0, model.config.vocab_size - 1)

    def score(picked):
        return score_rows(head_logits(model, params, hidden, picked), known[picked], num_top)

    scores = jax.lax.map(score, rows)
    return PromptScores(*(leaf.reshape(rows.size, *leaf.shape[2:])[:num_tokens] for leaf in scores))
