# SPDX-License-Identifier: Apache-2.0
"""Rows laid out by shard: each run is a projection of its own."""

import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.specs import ParamSpec, Part, Source, stacked_rows
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.registry import family_for
from metrale_jax.models.tensor_parallel import fitting_size, shared_layer
from metrale_jax.sharding.fused import by_shard


def fused(parts, columns=3):
    sources = tuple(Source(f"p{i}", (part.units * part.width, columns)) for i, part in enumerate(parts))
    rows = sum(source.shape[0] for source in sources)
    return ParamSpec((rows, columns), ("qkv", "hidden"), sources, stacked_rows, parts=parts)


def arrays_of(spec):
    """Arrays whose rows tell where they came from: source, row."""
    return [
        np.stack([np.full(source.shape[0], i), np.arange(source.shape[0]), np.zeros(source.shape[0])], axis=1)
        for i, source in enumerate(spec.sources)
    ]


def test_each_run_holds_its_own_part_of_every_projection():
    spec = fused((Part(4, 2), Part(2, 2), Part(2, 2)))
    laid = by_shard(spec, 2)
    assert laid.shape == spec.shape
    first, second = np.split(laid.transform(*arrays_of(spec)), 2)
    assert first[:, :2].astype(int).tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert second[:, :2].astype(int).tolist() == [[0, 4], [0, 5], [0, 6], [0, 7], [1, 2], [1, 3], [2, 2], [2, 3]]


def test_key_heads_that_are_fewer_than_the_shards_are_held_beside_the_queries_that_read_them():
    spec = fused((Part(8, 1), Part(2, 1), Part(2, 1)))
    laid = by_shard(spec, 4)
    assert laid.shape == (8 + 4 + 4, 3)
    runs = np.split(laid.transform(*arrays_of(spec)), 4)
    for shard, run in enumerate(runs):
        # Query head n reads key head n // 4.
        assert run[:, :2].astype(int).tolist() == [[0, 2 * shard], [0, 2 * shard + 1], [1, shard // 2], [2, shard // 2]]


def test_a_vector_is_laid_out_like_the_rows_it_belongs_to():
    parts = (Part(4, 1), Part(4, 1))
    bias = ParamSpec((8,), ("gate_up",), (Source("gate", (4,)), Source("up", (4,))), stacked_rows, parts=parts)
    laid = by_shard(bias, 2).transform(np.arange(4), np.arange(10, 14))
    assert laid.tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_one_shard_and_rows_without_parts_stay_as_they_are():
    spec = fused((Part(2, 1), Part(2, 1)))
    plain = ParamSpec((4, 3), ("vocab", "hidden"), (Source("w", (4, 3)),))
    assert by_shard(spec, 1) is spec and by_shard(plain, 4) is plain


def description(**changes):
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **changes,
    }
    family = family_for("LlamaForCausalLM")
    return family.describe(RawConfig(values, family.defaults, "test"))


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 8, "12 query heads cannot be shared out among 8 devices; use 1, 2, 4 or 12"),
        ({}, 6, "4 key and value heads can neither be shared out among 6 devices nor be held by as many devices each"),
        ({"intermediate_size": 46}, 4, "46 feed-forward channels cannot be shared out among 4 devices; use 1 or 2"),
    ],
)
def test_a_model_that_cannot_be_shared_out_says_among_how_many_it_can(changes, size, words):
    with pytest.raises(ConfigError, match=words):
        shared_layer(description(**changes).config.layers[0], size)


def test_the_most_devices_that_can_share_a_model_are_found():
    assert fitting_size(description(), 8) == 4
    assert fitting_size(description(intermediate_size=46), 8) == 2
    assert fitting_size(description(num_attention_heads=8), 8) == 8
