# SPDX-License-Identifier: Apache-2.0
"""Every family and rope type against what transformers computed: logits within 1e-4, the same greedy tokens."""

import json

import jax
import numpy as np
import pytest

from metrale_jax.core.errors import CheckpointError, ConfigError, Unsupported
from metrale_jax.evaluation import chunked_logits
from metrale_jax.generate import first_state
from metrale_jax.loading import open_checkpoint
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import make_pool
from tests.conftest import GOLDENS
from tests.sometimes import mostly_slow

CASES = json.loads((GOLDENS / "cases.json").read_text())
LENGTHS = {case["name"]: tuple(case.get("lengths", (1, 7, 33, 130))) for case in CASES}
TOLERANCE = 1e-4
STEPS_OF_GREEDY = 20
# Beside each of these stands another case that runs the same code: a field spelled otherwise, a number of a rope type,
# a family's second setting.
RARE = {
    *("llama-old-spelling", "llama-old-rope-type", "llama-yarn-mscale", "llama-yarn-attention-factor", "llama-linear"),
    *("mistral-nowindow", "qwen3-yarn", "gemma3-linear", "phi3-default", "granite-bias", "qwen3-moe-sparse-step"),
    *("mamba2-tied", "falcon-h1", "falcon-h1-norm-first", "qwen3-5-seeing", "olmo-hybrid-no-positions", "nemotron-h"),
}
MODELS = [case["name"] for case in CASES if "copy_of" not in case]


def scored(model, fill, tokens):
    """Pool, state and logits after all of `tokens`, in one executable for every length."""
    block_size = model.layout.block_size
    blocks = -(-(max(LENGTHS[model.name]) + STEPS_OF_GREEDY) // block_size)
    pool = make_pool(model.layout, (blocks + 1,) * len(model.layout.groups), fill)
    padded = np.zeros(blocks * block_size, np.int32)
    padded[: len(tokens)] = tokens
    sampling, vocab = SamplingParams(temperature=0), model.config.vocab_size
    state = first_state(model.layout, len(tokens), blocks, sampling, 0, (), vocab)
    return model.steps.run("score", model.params, pool, state, padded, np.asarray([len(tokens)], np.int32))


@pytest.mark.parametrize("name", mostly_slow(MODELS, set(MODELS) - RARE))
def test_logits_and_greedy_tokens_are_those_of_transformers(name, golden, nan_pool):
    model = golden(name)
    for length in LENGTHS[name]:
        pool, state, logits = scored(model, nan_pool, model.prompt[:length])
        # Where one length's logits are stored for all, a prompt's are the first rows of a longer one's.
        stored = f"logits_{length}" if f"logits_{length}" in model.data else f"logits_{max(LENGTHS[name])}"
        expected = model.data[stored][:length]
        np.testing.assert_allclose(np.asarray(logits)[:length], expected, rtol=0, atol=TOLERANCE)
        if model.config.recompute_len and length <= model.config.recompute_len < length + STEPS_OF_GREEDY:
            continue  # the switch of frequencies is the engine's and generate's work, tested with them
        tokens = [int(np.argmax(np.asarray(logits)[length - 1]))]
        while len(tokens) < STEPS_OF_GREEDY:
            state = state.replace(last_token=np.asarray([tokens[-1]], np.int32))
            pool, state, out = model.steps.run("decode", model.params, pool, state)
            tokens.append(int(out.tokens[0, 0]))
        assert tokens == model.data[f"greedy_{length}"].tolist()


def test_the_two_spellings_of_a_config_are_one_model(golden):
    copies = [case for case in CASES if "copy_of" in case]
    assert len(copies) >= 3
    for case in copies:
        one, other = golden(case["name"]), golden(case["copy_of"])
        assert one.config == other.config
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_chunked_evaluation_equals_one_pass(golden):
    model = golden("mistral-window")
    tokens = np.concatenate([model.prompt, model.prompt[:20]])
    chunks = list(chunked_logits(model.steps, model.params, tokens))
    assert [len(chunk) for chunk in chunks] == [128, 22]
    whole = np.concatenate(chunks)[:130]
    np.testing.assert_allclose(whole, model.data["logits_130"], rtol=0, atol=TOLERANCE)


def rewritten(tmp_path, name, change):
    """A copy of a golden checkpoint with its config.json changed; weights are linked."""
    values = json.loads((GOLDENS / name / "config.json").read_text())
    change(values)
    for file in (GOLDENS / name).glob("*.safetensors*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def removing(key):
    return lambda values: values.pop(key)


def setting(**fields):
    return lambda values: values.update(fields)


def roping(**fields):
    return lambda values: values.update(rope_parameters={"rope_theta": 10000.0, **fields})


FAULTS = [
    ("llama-default", removing("hidden_size"), ConfigError, "no field 'hidden_size'"),
    ("llama-default", removing("architectures"), ConfigError, "architectures=\\[\\]"),
    ("llama-default", setting(architectures=["FooForCausalLM"]), Unsupported, "FooForCausalLM"),
    ("llama-default", setting(num_hidden_layers="3"), ConfigError, "num_hidden_layers='3'"),
    ("llama-default", setting(num_attention_heads=0), ConfigError, "num_attention_heads=0"),
    ("llama-default", setting(num_key_value_heads=2), ConfigError, "num_key_value_heads=2"),
    ("llama-default", setting(hidden_act="swish9"), ConfigError, "hidden_act='swish9'"),
    ("llama-default", setting(rms_norm_eps=float("nan")), ConfigError, "rms_norm_eps"),
    ("llama-default", setting(tie_word_embeddings="yes"), ConfigError, "tie_word_embeddings='yes'"),
    ("llama-default", roping(rope_type="mystery"), Unsupported, "rope type 'mystery'"),
    ("llama-default", roping(rope_type="linear"), ConfigError, "'factor'"),
    ("llama-default", roping(rope_type="llama3", factor=8.0), ConfigError, "'low_freq_factor'"),
    ("llama-default", roping(rope_type="longrope", short_factor=[1.0], long_factor=[1.0]), ConfigError, "short_factor"),
    ("llama-default", roping(rope_theta=-1), ConfigError, "rope_theta=-1"),
    ("phi3-default", setting(rope_parameters={"partial_rotary_factor": 0.01}), ConfigError, "rotary width"),
    ("gemma2", setting(layer_types=["full_attention"]), ConfigError, "layer_types"),
    ("gemma3", setting(layer_types=None, sliding_window_pattern=0), ConfigError, "sliding_window_pattern=0"),
    ("qwen2", setting(eos_token_id="two"), ConfigError, "'two'"),
    ("llama-default", setting(hidden_act=[]), ConfigError, "no field 'hidden_act'|hidden_act="),
    ("llama-default", setting(hidden_act={"a": 1}), ConfigError, "hidden_act={'a': 1}"),
    (
        "qwen3-next-dense",
        setting(layer_types=[[], {}, None, "full_attention"]),
        ConfigError,
        "type or length|layer_types",
    ),
    (
        "qwen3-next-dense",
        roping(partial_rotary_factor="a"),
        ConfigError,
        "type or length|rotary",
    ),
    ("nemotron-h", setting(layers_block_type=1.5), ConfigError, "another type or length|layers_block_type"),
    (
        "nemotron-h",
        setting(hybrid_override_pattern=5, layers_block_type=None),
        ConfigError,
        "type or length|pattern",
    ),
    ("kimi-linear", setting(mlp_layer_types=-1), ConfigError, "another type or length|mlp_layer_types"),
    ("qwen3-moe", setting(num_experts_per_tok=8), ConfigError, "8 experts cannot be chosen of 7"),
    ("qwen3-moe", setting(mlp_only_layers=[3]), ConfigError, r"mlp_only_layers=\[3\].*from 0 to 2"),
    ("qwen3-moe", setting(decoder_sparse_step=0), ConfigError, "decoder_sparse_step=0"),
    ("qwen3-moe", setting(norm_topk_prob="yes"), ConfigError, "norm_topk_prob='yes'"),
    ("mixtral", setting(num_local_experts=0), ConfigError, "num_local_experts=0"),
    ("glm4-moe", setting(n_group=5), ConfigError, "12 experts are not 5 groups"),
    ("glm4-moe", setting(topk_group=5), ConfigError, "5 groups cannot be chosen of 4"),
    ("glm4-moe", setting(topk_group=0), ConfigError, "topk_group=0"),
    ("glm4-moe", setting(first_k_dense_replace=-1), ConfigError, "first_k_dense_replace=-1"),
    ("glm4-moe", setting(routed_scaling_factor=None, n_group="1"), ConfigError, "n_group='1'"),
    ("minimax-m2", setting(rotary_dim=0, rope_parameters={}), ConfigError, "rotary_dim=0"),
    ("gpt-oss", setting(swiglu_limit="7"), ConfigError, "swiglu_limit='7'"),
]


@pytest.mark.parametrize("name, change, error, words", FAULTS, ids=[f"{case[0]}-{case[3]}" for case in FAULTS])
def test_a_faulty_config_is_named(name, change, error, words, tmp_path):
    with pytest.raises(error, match=words):
        open_checkpoint(rewritten(tmp_path, name, change))


def test_layers_that_draft_tokens_are_left_alone(tmp_path):
    from safetensors.numpy import load_file, save_file

    from metrale_jax.checkpoint.plan import load_plan

    path = rewritten(tmp_path, "glm4-moe", lambda values: None)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    extra = {f"model.layers.{index}.eh_proj.weight": np.zeros((2, 2), np.float32) for index in (3, 4)}
    save_file(tensors | extra, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    # The config speaks of one such layer: one more is a fault.
    with pytest.raises(CheckpointError, match=r"1 tensor is unexpected: .*layers\.4\.eh_proj"):
        load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)


def test_a_head_that_is_neither_there_nor_tied_is_missing(tmp_path):
    from metrale_jax.checkpoint.plan import load_plan

    path = rewritten(tmp_path, "llama-default", setting(tie_word_embeddings=False))
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)


def test_a_head_in_the_file_wins_over_a_config_that_claims_a_tied_one(tmp_path):
    path = rewritten(tmp_path, "llama-untied-bias", setting(tie_word_embeddings=True))
    assert not open_checkpoint(path).config.tie_embeddings


def test_stop_ids_of_both_config_files_count(tmp_path):
    path = rewritten(tmp_path, "llama-default", setting(eos_token_id=[5, 6]))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 9]}))
    assert open_checkpoint(path).config.eos_token_ids == (5, 6, 9)
