# SPDX-License-Identifier: Apache-2.0
"""Block drafts against the same drafter computed densely over whole texts, from a directory as they are published."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale_jax.checkpoint.place import load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.errors import ConfigError
from metrale_jax.generate import first_state
from metrale_jax.models.decoder import forward_probed
from metrale_jax.speculative.registry import Ask, open_proposer
from metrale_jax.steps.batches import ragged_batch
from tests.speculative.drafting import GREEDY, LIMITS, STANDS, drafted_runs
from tests.speculative.solo_problems import assert_solo, prompts

DRAFTS, HEADS, KV_HEADS, WIDTH, HIDDEN, WINDOW, MASK, THETA = 3, 4, 2, 16, 40, 9, 5, 5000.0
CAPTURED = [0, 1]
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "block_size": DRAFTS + 1,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": CAPTURED},
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "intermediate_size": HIDDEN,
    "rope_theta": THETA,
}


def tensors_for(width):
    rng = np.random.default_rng(3)
    shapes = {"fc.weight": (width, len(CAPTURED) * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for number in range(CONFIG["num_hidden_layers"]):
        shapes |= {
            f"layers.{number}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * WIDTH, width),
                "self_attn.k_proj": (KV_HEADS * WIDTH, width),
                "self_attn.v_proj": (KV_HEADS * WIDTH, width),
                "self_attn.o_proj": (width, HEADS * WIDTH),
                "self_attn.q_norm": (WIDTH,),
                "self_attn.k_norm": (WIDTH,),
                "mlp.gate_proj": (HIDDEN, width),
                "mlp.up_proj": (HIDDEN, width),
                "mlp.down_proj": (width, HIDDEN),
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
            }.items()
        }
    # Sharp attention, so that what is drafted tells of where it looked.
    drawn = {
        name: 2 * rng.normal(size=shape) / shape[-1] ** 0.5 if len(shape) > 1 else 1.5 + 0.5 * rng.normal(size=shape)
        for name, shape in shapes.items()
    }
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def published(directory, config, **changes):
    facts = {"hidden_size": config.hidden_dim, "vocab_size": config.vocab_size, "num_target_layers": len(config.layers)}
    (directory / "config.json").write_text(json.dumps({**CONFIG, **facts, **changes}))
    save_file(tensors_for(config.hidden_dim), directory / "model.safetensors")
    return Ask(config, {}, directory, None, lambda: ())


def opened(golden, name, directory):
    model = golden(name, 8)
    found = open_proposer("dflash", published(directory, model.config))
    load_plan(found.specs, found.source, found.ignored)
    weights = load_params(found.specs, found.source, np.dtype(np.float32), lambda array, spec: jnp.asarray(array))
    found.source.close()
    assert found.num_drafts == DRAFTS
    return model, found.proposer, weights


def features_of(model, longest=48):
    """A function that gives what the target has after each captured layer, for every token of a text, `[n, 2 D]`."""
    layout, places = model.layout, tuple(one + 1 for one in CAPTURED)

    @jax.jit
    def run(params, pool, state, tokens, lengths):
        batch = ragged_batch(state, tokens, lengths, layout.block_size)
        return forward_probed(model.steps.model, params, pool, batch, places)[2]

    def features(text):
        state = first_state(layout, len(text), longest // 8, GREEDY, 0, (), model.config.vocab_size)
        tokens = jnp.zeros(longest, jnp.int32).at[: len(text)].set(jnp.asarray(text, jnp.int32))
        pool = model.steps.make_pool((longest // 8 + 1,) * len(layout.groups))
        rows = run(model.params, pool, state, tokens, jnp.asarray([len(text)], jnp.int32))
        return np.concatenate([np.asarray(row, np.float64)[: len(text)] for row in rows], axis=1)

    return features


def normed(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight


def turned(x, positions):
    """Rotary embedding of `x [n, heads, width]`."""
    half = WIDTH // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def dense_drafts(model, features, tensors, text, count):
    """The likeliest tokens at the masks after a text: its last token begins the block."""
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in tensors.items()}
    past = len(text) - 1
    context = normed(features(text[:-1]) @ w["fc"].T, w["hidden_norm"])
    embed = np.asarray(model.params.embed, np.float64)
    x = embed[[text[-1], *[MASK] * count]]
    positions = np.arange(past + count + 1)
    for number, kind in enumerate(CONFIG["layer_types"]):
        own = {name.split(".", 2)[2]: array for name, array in w.items() if name.startswith(f"layers.{number}.")}
        hidden = normed(x, own["input_layernorm"])
        seen = np.concatenate([context, hidden])
        q = (hidden @ own["self_attn.q_proj"].T).reshape(-1, HEADS, WIDTH)
        k, v = ((seen @ own[f"self_attn.{one}_proj"].T).reshape(-1, KV_HEADS, WIDTH) for one in "kv")
        q = turned(normed(q, own["self_attn.q_norm"]), positions[past:])
        k = turned(normed(k, own["self_attn.k_norm"]), positions)
        k, v = (np.repeat(one, HEADS // KV_HEADS, axis=1) for one in (k, v))
        logits = np.einsum("qnh,knh->nqk", q, k) / np.sqrt(WIDTH)
        distance = positions[past:, None] - positions
        mask = np.ones_like(distance, bool) if kind == "full_attention" else (distance >= 0) & (distance < WINDOW)
        shares = np.exp(np.where(mask, logits, -np.inf) - logits.max(axis=-1, keepdims=True))
        mixed = np.einsum("nqk,knh->qnh", shares / shares.sum(axis=-1, keepdims=True), v)
        x = x + mixed.reshape(len(x), -1) @ own["self_attn.o_proj"].T
        hidden = normed(x, own["post_attention_layernorm"])
        gate, up = hidden @ own["mlp.gate_proj"].T, hidden @ own["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj"].T
    head = embed if isinstance(model.params.head, tuple) else np.asarray(model.params.head, np.float64)
    return np.argmax(normed(x[1:], w["norm"]) @ head.T, axis=-1).tolist()


def test_a_block_is_drafted_as_it_is_densely(golden, nan_pool, tmp_path):
    model, proposer, weights = opened(golden, "qwen3", tmp_path)
    steps, params = model.drafted_by(proposer, weights, 8)
    features, tensors, seen = features_of(model), tensors_for(model.config.hidden_dim), set()
    for texts, drafts in drafted_runs(steps, params, prompts(model), STANDS, LIMITS, DRAFTS, nan_pool):
        for text, made in zip(texts, drafts, strict=True):
            assert made == dense_drafts(model, features, tensors, text, len(made))
            seen |= set(made)
    assert len(seen) > 7


@pytest.mark.slow
def test_answers_are_those_without_drafts(golden, nan_pool, tmp_path):
    model, proposer, weights = opened(golden, "nemotron-h", tmp_path)
    steps, proposed, accepted = assert_solo(model, proposer, weights, names=("sampled",), fill=nan_pool)
    assert steps and proposed > accepted


@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_a_causal_drafter_is_told_by_either_name(golden, tmp_path, name):
    config = golden("qwen3", 8).config
    facts = {"dflash_config": {**CONFIG["dflash_config"], name: True}}
    found = open_proposer("dflash", published(tmp_path, config, **facts))
    found.source.close()
    assert found.proposer.config.causal


def test_what_does_not_fit_the_target_is_refused(golden, tmp_path):
    config = golden("qwen3", 8).config
    wrong = {
        "DFlash2DraftModel.* is no DFlashDraftModel": {"architectures": ["DFlash2DraftModel"]},
        "hidden_size=64 .* is not the target's 36": {"hidden_size": 64},
        "num_target_layers=9 .* is not the target's 3": {"num_target_layers": 9},
        "target_layer_ids=.1, 2. .* are not layers from 0 to 1": {"dflash_config": {"target_layer_ids": [1, 2]}},
        "mask_token_id=.. and block_size=4": {"dflash_config": {"target_layer_ids": [1]}},
        "only causal ones have windows here": {"is_causal": False},
        "is_causal=5": {"is_causal": 5},
        "two names of one field and differ": {"is_causal": True, "causal": False},
        "num_hidden_layers=1000000000 .* is above 1024": {"num_hidden_layers": 10**9},
        "head_dim=.3.": {"head_dim": [3]},
        "head_dim=1000000000 .* is not a width up to 16384": {"head_dim": 10**9},
        "(?s)does not describe a DFlash drafter.*correct the config": {"layer_types": [["full_attention"], {}]},
        "frequencies that are not finite": {"rope_theta": float("nan")},
        "rms_norm_eps=0.0 .* is not a number above 0": {"rms_norm_eps": 0},
        "input_embedding_scale=inf": {"input_embedding_scale": float("inf")},
        "output_multiplier=1e.39 .* float32": {"output_multiplier": 1e39},
        "final_logit_softcapping=-30.0 .* from 0 up": {"final_logit_softcapping": -30},
    }
    for message, changes in wrong.items():
        with pytest.raises(ConfigError, match=message):
            open_proposer("dflash", published(tmp_path, config, **changes))
