# SPDX-License-Identifier: Apache-2.0
"""Draft heads against a plain computation of each entry, and their directories."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.checkpoint.place import load_params
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.layers.placement import Placement
from metrale_jax.speculative.drafter_files import open_drafter, write_drafter
from metrale_jax.speculative.heads import default_capture, draft_logits, run_head, target_features, target_ids
from tests.speculative.plain_head import (
    HEADS,
    KINDS,
    KV,
    LAYER,
    ROPE,
    TARGET,
    VD,
    D,
    H,
    PlainHead,
    V,
    config_of,
    params_of,
    random_rows,
)

T = 5


def dense(x, weights, attention):
    """Attention over all rows before, in the plainest arrays."""
    q, k, v = jnp.split(x @ weights.qkv.weight.T, [HEADS * H, (HEADS + KV) * H], axis=-1)
    angles = jnp.arange(T)[:, None].astype(jnp.float32) * jnp.asarray(ROPE.inv_freq)

    def turn(y, count):
        first, second = jnp.split(y.reshape(T, count, H), 2, axis=-1)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    k, v = (jnp.repeat(y, HEADS // KV, axis=1) for y in (turn(k, KV), v.reshape(T, KV, H)))
    scores = jnp.einsum("tnh,snh->nts", turn(q, HEADS), k) * attention.scale
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v).reshape(T, -1)
    return mixed @ weights.out.weight.T, ()


@pytest.mark.parametrize("kind, normed", [("mtp", False), ("eagle3", False), ("eagle3", True)])
def test_a_head_is_its_entries_one_after_the_other(kind, normed):
    config = config_of(kind)
    if normed:
        config = replace(config, norm_before_residual=True)
    params = params_of(config)
    features, embeds = random_rows(1, T, D), random_rows(2, T, D)
    features[0] = 0
    got, _ = run_head(config, params, jnp.asarray(features), jnp.asarray(embeds), dense, Placement(0, 1e-5, "cpu"))
    one = PlainHead(kind, params, normed)
    feedback, output = map(np.asarray, zip(*map(one.step, features, embeds), strict=True))
    np.testing.assert_allclose(got.feedback, feedback, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(got.output, output, rtol=2e-4, atol=2e-5)
    scores = draft_logits(config, params, got.output, jnp.zeros((V, D)))
    np.testing.assert_allclose(scores, output @ np.asarray(params.head, np.float64).T, rtol=2e-4, atol=2e-4)


def test_features_are_the_final_rows_or_the_three_captured_ones_joined():
    hidden, captured = (
        jnp.asarray(random_rows(1, T, D)),
        tuple(jnp.asarray(random_rows(seed, T, D)) for seed in (2, 3, 4)),
    )
    mtp, eagle = config_of("mtp"), config_of("eagle3")
    assert target_features(mtp, params_of(mtp), hidden, ()) is hidden
    params = params_of(eagle)
    joined = np.concatenate([np.asarray(part) for part in captured], axis=1) @ np.asarray(params.fc.weight).T
    np.testing.assert_allclose(target_features(eagle, params, hidden, captured), joined, rtol=1e-4, atol=1e-5)


def test_a_head_without_rows_of_its_own_scores_by_the_targets():
    config = config_of("mtp", 0)
    params = params_of(config)
    assert params.head == () and params.token_ids == ()
    head, output = random_rows(3, V, D), random_rows(4, T, D)
    np.testing.assert_allclose(
        draft_logits(config, params, jnp.asarray(output), jnp.asarray(head)), output @ head.T, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(target_ids(params, jnp.arange(3)), [0, 1, 2])


def test_places_of_capture_are_in_order_even_in_a_model_of_two_layers():
    assert default_capture(30) == (2, 15, 27)
    assert default_capture(2) == (0, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [VD, V, 0], ids=["few", "all", "shared"])
def test_what_is_written_is_read_back_bit_by_bit(kind, size, tmp_path):
    config = config_of(kind, size)
    if kind == "eagle3" and size:
        config = replace(config, capture=(0, 2, 6), norm_before_residual=True)
    params = params_of(config)
    write_drafter(tmp_path, config, params, TARGET)
    drafter = open_drafter(tmp_path, TARGET)
    assert drafter.config == config
    loaded = load_params(drafter.specs, drafter.source, np.dtype(np.float32), lambda array, spec: array)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for array, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_an_eagle_head_from_elsewhere_opens_by_its_published_fields(tmp_path):
    config = config_of("eagle3")
    write_drafter(tmp_path, config, params_of(config), TARGET)
    values = json.loads((tmp_path / "config.json").read_text())
    ours = ("drafter", "rope", "target", "attention_scale", "qk_norm", "eagle_config", "norm_before_residual")
    published = {name: value for name, value in values.items() if name not in ours and not name.endswith("_scale")}
    (tmp_path / "config.json").write_text(json.dumps(published | {"rope_theta": 100.0}))
    found = open_drafter(tmp_path, TARGET).config
    (attention,) = found.layer.mixers
    assert found.capture == (2, 3, 3) and found.draft_vocab_size == VD and not found.norm_before_residual
    np.testing.assert_allclose(attention.rope.inv_freq, ROPE.inv_freq, rtol=1e-6)


def test_a_drafter_of_another_model_is_refused(tmp_path):
    config = config_of("mtp")
    write_drafter(tmp_path, config, params_of(config), TARGET)
    other = ModelConfig("llama", V, D, (LAYER,) * 7, 64, 1e-5, True)
    with pytest.raises(ConfigError, match="num_layers=6, the target has .*num_layers=7"):
        open_drafter(tmp_path, other)


def test_faults_of_a_directory_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_drafter(tmp_path, TARGET)
    config = config_of("eagle3")
    write_drafter(tmp_path, config, params_of(config), TARGET)
    path = tmp_path / "config.json"
    good = path.read_text()
    path.write_text(good.replace(f'"draft_vocab_size": {VD}', '"draft_vocab_size": 11'))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[12, 16\], expected \[11, 16\]"):
        open_drafter(tmp_path, TARGET)
    path.write_text(good.replace('"eagle3"', '"medusa"'))
    with pytest.raises(ConfigError, match="drafter='medusa'"):
        open_drafter(tmp_path, TARGET)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_drafter(tmp_path, TARGET)
