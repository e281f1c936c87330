# SPDX-License-Identifier: Apache-2.0
"""Drafts of a model's own layers against a model that has no others, and answers that they do not change."""

from dataclasses import replace

import pytest

from metrale_jax.core.config import AttentionConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.speculative.self_draft import SelfDraft, default_layers, self_draft
from tests.sometimes import mostly_slow
from tests.speculative.drafting import LIMITS, SAMPLED, STANDS, Alone, drafted_runs
from tests.speculative.solo_problems import assert_solo, prompts

DRAFTS = 3


@pytest.mark.parametrize("name", mostly_slow(["llama-default", "mistral-window", "gemma2"], always=["mistral-window"]))
def test_drafts_of_the_first_layers_are_those_of_a_model_that_ends_there(golden, nan_pool, name):
    model = golden(name, 8)
    steps, params = model.drafted_by(SelfDraft((0,)), (), 8)
    shallow = replace(model.config, layers=model.config.layers[:1])
    alone = Alone(shallow, model.params.replace(layers=model.params.layers[:1]))
    for texts, drafts in drafted_runs(steps, params, prompts(model), STANDS, LIMITS, DRAFTS, nan_pool, SAMPLED):
        for text, made in zip(texts, drafts, strict=True):
            assert made == alone.continuation(text, len(made), SAMPLED, nan_pool)


@pytest.mark.parametrize("name", mostly_slow(["llama-default", "gemma3"], always=["llama-default"]))
def test_all_layers_draft_what_the_model_says(golden, nan_pool, name):
    model = golden(name, 8)
    steps, proposed, accepted = assert_solo(
        model,
        SelfDraft(tuple(range(len(model.config.layers)))),
        names=("greedy", "sampled", "min_tokens"),
        fill=nan_pool,
    )
    assert steps and proposed == accepted


@pytest.mark.parametrize("name", mostly_slow(["qwen3-next", "nemotron-h"], always=["nemotron-h"]))
def test_a_hybrid_drafts_with_the_layers_that_keep_no_recurrent_state(golden, nan_pool, name):
    model = golden(name, 8)
    steps, proposed, accepted = assert_solo(
        model, self_draft(model.config, default_layers(model.config)), names=("greedy", "sampled"), fill=nan_pool
    )
    assert steps and proposed > accepted


def test_layers_that_cannot_draft_are_refused(golden):
    hybrid, dense = golden("qwen3-next", 8).config, golden("llama-default", 8).config
    with pytest.raises(ConfigError, match=r"layer 0 of gated DeltaNet.* keep none but \("):
        self_draft(hybrid, (0,))
    with pytest.raises(ConfigError, match="of the . layers each keeps some .* choose proposer='ngram'"):
        self_draft(golden("falcon-h1", 8).config, default_layers(golden("falcon-h1", 8).config))
    for layers in [(0, 99), (1, 0), (0, 0), (-1,)]:
        with pytest.raises(ConfigError, match="are not one or more of 0 to"):
            self_draft(dense, layers)


def test_the_first_and_last_layers_are_kept_where_nobody_says(golden):
    assert default_layers(golden("gemma2", 8).config) == (0, 2, 3)
    hybrid = golden("qwen3-next", 8).config
    kept = default_layers(hybrid)
    assert kept and all(isinstance(hybrid.layers[number].mixers[0], AttentionConfig) for number in kept)
