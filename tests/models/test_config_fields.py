# SPDX-License-Identifier: Apache-2.0
"""Fields that change what a model computes are honoured or refused, never passed over. Configs alone: no weights."""

import json

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.models.config_fields import NEUTRAL
from metrale_jax.models.family import described
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.registry import family_for
from tests.conftest import GOLDENS


def config_of(name: str, **fields):
    """The config of a golden checkpoint with some fields changed."""
    values = {**json.loads((GOLDENS / name / "config.json").read_text()), **fields}
    family = family_for(values["architectures"][0])
    values |= values.get(family.text_config) or {}
    return described(family, RawConfig(values | fields, family.defaults, name)).config


def linear(**fields):
    """Of Kimi Linear, which has its layers in a table of their own."""
    return {"linear_attn_config": {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, **fields}}


YARN_OF_ONE = {"rope_type": "yarn", "rope_theta": 1.0, "factor": 8.0}


# What used to pass and change nothing, or to fail later and elsewhere.
REFUSED = [
    ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func='softmax' .* of minimax_m2 models 'sigmoid' is"),
    ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm=False"),
    ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias=False"),
    ("minimax-m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64"),
    ("minimax-m2", {"num_experts": 3}, "num_experts=3, num_local_experts=.* are two names of one field and differ"),
    ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
    ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope=False"),
    ("kimi-linear", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("kimi-linear", {"num_key_value_heads": 1}, "num_key_value_heads=1 .* is not num_attention_heads"),
    ("kimi-linear", {"first_k_dense_replace": 99}, "first_k_dense_replace=99"),
    ("kimi-linear", {"first_k_dense_replace": True}, "first_k_dense_replace=True"),
    ("kimi-linear", linear(full_attn_layers=[1], kda_layers=[1, 2]), r"full_attn_layers=\[1\] and kda_layers=\[1, 2\]"),
    ("kimi-linear", linear(full_attn_layers=[1]), "kda_layers=None"),
    ("kimi-linear", linear(full_attn_layers=3, kda_layers=[1]), "full_attn_layers=3"),
    ("nemotron-h", {"attention_bias": "no"}, "attention_bias='no'"),
    ("nemotron-h", {"attention_bias": True}, "attention_bias=True"),
    ("nemotron-h", {"sliding_window": 16}, "sliding_window=16"),
    ("nemotron-h", {"moe_latent_size": 8}, "moe_latent_size=8"),
    ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ("bamba", {"num_experts": 4}, "num_experts=4"),
    ("falcon-h1", {"mamba_use_mlp": False}, "mamba_use_mlp=False"),
    ("mamba2", {"num_local_experts": 8}, "num_local_experts=8"),
    ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3-5", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3-5", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("olmo-hybrid", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("glm4-moe", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("glm4-moe", {"first_k_dense_replace": 99}, "first_k_dense_replace=99"),
    ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("qwen3-5-moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("mixtral", {"attention_bias": True}, "attention_bias=True"),
    ("kimi-linear", {"moe_renormalize": None}, "moe_renormalize=None .* is not true or false"),
    ("bamba", {"mamba_conv_bias": None}, "mamba_conv_bias=None .* is not true or false"),
    ("llama-yarn", {"rope_parameters": YARN_OF_ONE}, "does not describe a llama model"),
    ("llama-default", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen3-moe", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("llama-default", {"num_experts": 8}, "num_experts=8"),
    ("llama-default", {"dtype": "float7"}, "dtype='float7'"),
    ("llama-default", {"dtype": None, "torch_dtype": 3}, "torch_dtype=3"),
    ("llama-default", {"model_type": "qwen3"}, "model_type='qwen3' .* contradicts architectures=.*'LlamaForCausalLM'"),
    ("qwen3-5", {"model_type": "qwen3_next"}, "model_type='qwen3_next'"),
]


@pytest.mark.parametrize("name, fields, words", REFUSED, ids=[f"{case[0]}-{','.join(case[1])}" for case in REFUSED])
def test_a_field_that_would_be_passed_over_is_refused_by_name(name, fields, words):
    with pytest.raises(ConfigError, match=words):
        config_of(name, **fields)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("minimax-m2", {"scoring_func": "sigmoid", "use_qk_norm": True, "model_type": "minimax"}),
        ("kimi-linear", {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}),
        ("qwen3-5", {"model_type": "qwen3_5_text", "attn_output_gate": True, "hidden_act": "swish"}),
        ("qwen3-5-moe", {"norm_topk_prob": True}),
        ("glm4-moe", {"hidden_act": "swish"}),
        ("llama-default", {"num_experts": 0, "clip_qkv": None, "dtype": "torch.bfloat16", "an_unknown_field": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_one_value_of_a_field_is_accepted(name, fields):
    assert config_of(name, **fields).layers == config_of(name).layers


GOLDEN_NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_field_that_changes_a_model_is_read_or_refused(name):
    """Each neutral field, at a value that nobody has by default, changes the config or is an error."""
    before = config_of(name)
    for key in NEUTRAL:
        values = json.loads((GOLDENS / name / "config.json").read_text())
        family = family_for(values["architectures"][0])
        values |= values.get(family.text_config) or {}
        if key in values or key in family.defaults:
            continue
        raw = RawConfig({**values, key: 7}, family.defaults, name)
        try:
            after = described(family, raw).config
        except ConfigError:
            continue
        assert key in raw.read, f"{key}=7 is neither read nor refused"
        assert after.family == before.family


@pytest.mark.parametrize("name", ["mistral-window", "mistral-nowindow"])
def test_a_window_that_is_null_is_none_and_not_the_default(name):
    config = config_of(name, sliding_window=None)
    assert {layer.mixers[0].window for layer in config.layers} == {0}


@pytest.mark.parametrize("name", ["mistral-window", "qwen3", "mixtral", "gpt-oss", "bamba", "nemotron-h", "falcon-h1"])
def test_key_heads_that_are_null_are_as_many_as_heads(name):
    config = config_of(name, num_key_value_heads=None)
    attention = [mixer for layer in config.layers for mixer in layer.mixers if hasattr(mixer, "num_kv_heads")]
    assert attention and all(mixer.num_kv_heads == mixer.num_heads for mixer in attention)


def test_a_falcon_is_as_wide_as_transformers_takes_it_for():
    values = json.loads((GOLDENS / "falcon-h1" / "config.json").read_text())
    family = family_for(values["architectures"][0])
    wide = {**values, "mamba_d_head": "auto", "mamba_n_heads": 8, "mamba_expand": 2}
    for said, width in (({}, 1024), ({"mamba_d_ssm": None}, 2 * values["hidden_size"])):
        without = {key: value for key, value in wide.items() if key != "mamba_d_ssm"}
        config = described(family, RawConfig(without | said, family.defaults, "falcon")).config
        [mamba] = {mixer for layer in config.layers for mixer in layer.mixers if hasattr(mixer, "state_dim")}
        assert mamba.num_heads * mamba.head_dim == width
