# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model's own layers against whole runs in which the others do nothing, and answers they do not change."""

import jax
import jax.numpy as jnp
import pytest

from metrale_jax.core.config import AttentionConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.generate import first_state
from metrale_jax.models.decoder import forward_probed, head_logits
from metrale_jax.speculative.self_draft import SelfDraft, default_layers, self_draft
from metrale_jax.steps.batches import ragged_batch
from tests.sometimes import mostly_slow
from tests.speculative.drafting import GREEDY, LIMITS, STANDS, drafted_runs
from tests.speculative.solo_problems import assert_solo, prompts

DRAFTS = 3


def skipped_densely(model, kept, longest=48):
    """A function that gives what follows a text and some drafts by whole runs of the model, in which the layers that
    are not `kept` leave the rows of the drafts and of the token before them as they are."""
    layout, width = model.layout, longest // 8

    @jax.jit
    def last_logits(params, pool, state, tokens, lengths, start):
        before = []

        def edit(number, x, batch):
            if number and number - 1 not in kept:
                x = jnp.where((batch.positions >= start)[:, None], before[-1], x)
            before.append(x)
            return x

        batch = ragged_batch(state, tokens, lengths, layout.block_size)
        hidden, _, _ = forward_probed(model.steps.model, params, pool, batch, (), edit)
        return head_logits(model.steps.model, params, hidden, lengths - 1)[0]

    def drafts(text, count, fill):
        start, text = len(text) - 1, list(text)
        for _ in range(count):
            state = first_state(layout, len(text), width, GREEDY, 0, (), model.config.vocab_size)
            tokens = jnp.zeros(longest, jnp.int32).at[: len(text)].set(jnp.asarray(text, jnp.int32))
            pool = model.steps.make_pool((width + 1,) * len(layout.groups), fill)
            logits = last_logits(model.params, pool, state, tokens, jnp.asarray([len(text)], jnp.int32), start)
            text.append(int(jnp.argmax(logits)))
        return text[start + 1 :]

    return drafts


SETS = {"llama-default": (0, 2), "mistral-window": (0, 2), "gemma2": (1, 3)}


@pytest.mark.parametrize("name", mostly_slow(SETS, always=["mistral-window"]))
def test_drafts_are_the_models_own_with_layers_skipped(golden, nan_pool, name):
    model = golden(name, 8)
    steps, params = model.drafted_by(SelfDraft(SETS[name]), (), 8)
    oracle = skipped_densely(model, SETS[name])
    for texts, drafts in drafted_runs(steps, params, prompts(model), STANDS, LIMITS, DRAFTS, nan_pool):
        for text, made in zip(texts, drafts, strict=True):
            assert made == oracle(text, len(made), nan_pool)


@pytest.mark.parametrize(
    "name",
    mostly_slow(["llama-default", "gemma3", "falcon-h1", "qwen3-next-dense"], always=["llama-default", "falcon-h1"]),
)
def test_all_layers_draft_what_the_model_says(golden, nan_pool, name):
    model = golden(name, 8)
    steps, proposed, accepted = assert_solo(
        model,
        SelfDraft(tuple(range(len(model.config.layers)))),
        names=("greedy", "sampled", "min_tokens"),
        fill=nan_pool,
        stop_ids=(),
    )
    assert steps and proposed == accepted


@pytest.mark.parametrize("name", mostly_slow(["qwen3-next", "nemotron-h"], always=[]))
def test_a_hybrid_drafts_with_the_layers_that_keep_no_recurrent_state(golden, nan_pool, name):
    model = golden(name, 8)
    steps, proposed, accepted = assert_solo(
        model, self_draft(model.config, default_layers(model.config)), names=("greedy", "sampled"), fill=nan_pool
    )
    assert steps and proposed > accepted


def test_layers_that_the_model_lacks_are_refused(golden):
    dense = golden("llama-default", 8).config
    for layers in [(0, 99), (1, 0), (0, 0), (-1,)]:
        with pytest.raises(ConfigError, match="are not one or more of 0 to"):
            self_draft(dense, layers)


def test_the_first_and_last_layers_are_kept_where_nobody_says(golden):
    assert default_layers(golden("gemma2", 8).config) == (0, 2, 3)
    hybrid = golden("qwen3-next", 8).config
    kept = default_layers(hybrid)
    assert kept and all(isinstance(hybrid.layers[number].mixers[0], AttentionConfig) for number in kept)
    assert default_layers(golden("mamba2", 8).config) == (0, 2)
