# SPDX-License-Identifier: Apache-2.0
"""Scores of a prompt's tokens, against logits of transformers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.models.decoder import head_logits
from metrale_jax.steps.prompt_scores import PIECE_ROWS, prompt_logprobs


def test_pieces_of_rows_score_as_all_rows_at_once(golden):
    model = golden("llama-default", 8)
    static, params, vocab = model.steps.model, model.params, model.config.vocab_size
    rng = np.random.default_rng(0)
    score = jax.jit(partial(prompt_logprobs, static, num_top=3))
    for num_tokens in (1, PIECE_ROWS, PIECE_ROWS + 37):
        hidden = jnp.asarray(rng.normal(size=(num_tokens, model.config.hidden_dim)), jnp.float32)
        targets = rng.integers(0, vocab, num_tokens).astype(np.int32)
        logits = head_logits(static, params, hidden, jnp.arange(num_tokens, dtype=jnp.int32))
        wide = np.asarray(logits, np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
        got = score(params, hidden, jnp.asarray(targets))
        own = logprobs[np.arange(num_tokens), targets]
        np.testing.assert_allclose(got.logprobs, own, atol=1e-5)
        np.testing.assert_array_equal(got.ranks, 1 + (logprobs > own[:, None]).sum(axis=1))
        order = np.argsort(-wide, axis=1)[:, :3]
        np.testing.assert_array_equal(got.top_ids, order)
        np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(logprobs, order, axis=1), atol=1e-5)


def test_a_target_outside_the_vocabulary_harms_nobody(golden):
    model = golden("llama-default", 8)
    hidden = jnp.ones((4, model.config.hidden_dim), jnp.float32)
    score = partial(prompt_logprobs, model.steps.model, model.params, hidden, num_top=0)
    plain, odd = score(jnp.asarray([1, 2, 3, 4])), score(jnp.asarray([1, -1, 10**6, 4]))
    assert np.isfinite(odd.logprobs).all() and odd.top_ids.shape == (4, 0)
    np.testing.assert_array_equal(np.asarray(plain.logprobs)[[0, 3]], np.asarray(odd.logprobs)[[0, 3]])


def test_logits_of_all_tokens_exist_at_no_time(golden):
    model = golden("llama-default", 8)
    num_tokens, vocab = 16 * PIECE_ROWS, model.config.vocab_size
    hidden = jax.ShapeDtypeStruct((num_tokens, model.config.hidden_dim), jnp.float32)
    targets = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    score = jax.jit(partial(prompt_logprobs, model.steps.model, num_top=0))
    compiled = score.lower(model.params, hidden, targets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < num_tokens * vocab * 4
