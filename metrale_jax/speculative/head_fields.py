# SPDX-License-Identifier: Apache-2.0
"""The fields of a draft head's `config.json`: a Llama's, as EAGLE-3 checkpoints have them, and our own beside them,
`drafter` (the kind), `rope`, the target's scales, and under `target` what the head was trained for."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from metrale_jax.core.config import LayerConfig, MlpConfig, ModelConfig
from metrale_jax.core.errors import ConfigError, shown
from metrale_jax.models.decoder_specs import DecoderNames
from metrale_jax.models.family import activation_of
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.registry import ARCHITECTURES
from metrale_jax.speculative.drafter_config import (
    attention_of,
    described_as,
    number,
    number_above_0,
    number_from_0,
    read_values,
    table,
)
from metrale_jax.speculative.heads import HEADS, KINDS, default_capture

PLACES = "eagle_aux_hidden_state_layer_ids"
SCALES = ("embed_scale", "residual_scale", "logit_scale")
# Fields of EAGLE-3 heads that compute otherwise where they are true.
OTHERWISE = ("norm_before_fc", "fc_norm", "norm_output")
WANTED = "a directory that metrale-jax train-drafter wrote, or a published EAGLE-3 head"
CLASSES = {"mtp": "MetraleMtpHead", "eagle3": "LlamaForCausalLMEagle3"}
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": "none",
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": 0.0,
    "norm_before_residual": False,
    **dict.fromkeys(OTHERWISE, False),
}


def target_facts(target: ModelConfig) -> dict[str, Any]:
    """What a head's target is told by."""
    return {
        "family": target.family,
        "num_layers": len(target.layers),
        "hidden_size": target.hidden_dim,
        "vocab_size": target.vocab_size,
    }


def read_head_config(path: Path) -> RawConfig:
    """The fields of a head's config.json, of which `drafter` says the kind. Raises `CheckpointError` for a file that is
    no JSON object, and `ConfigError` for one of something else than a head."""
    if path.parent.is_file():
        raise ConfigError(
            f"{path.parent} is a file, as whole models are in GGUF, and a draft head is a directory; choose "
            f"proposer='model', which takes whole models, or give {WANTED}."
        )
    values = read_values(path, WANTED)
    if values.get("drafter") is None:
        names = values.get("architectures")
        named = names if isinstance(names, list) else []
        if not any(isinstance(name, str) and "Eagle3" in name for name in named):
            raise ConfigError(_no_head(path, names, [name for name in named if name in tuple(ARCHITECTURES)]))
        if "transformer_layer_config" in values:
            raise ConfigError(
                f"{path} has the head's layer under transformer_layer_config, as speculators writes it, and heads are "
                f"read with their fields at the top and their tensors under midlayer; give {WANTED}."
            )
        values["drafter"] = "eagle3"
    return RawConfig(values, DEFAULTS, str(path))


def _no_head(path: Path, names: Any, whole: list[str]) -> str:
    if whole:
        return (
            f"{path} is of a whole model, {whole[0]}, and a draft head is wanted; choose proposer='model', which takes "
            f"whole models, or give {WANTED}."
        )
    return (
        f"architectures={shown(names)} in {path} names no draft head that is read, and no field drafter says that it "
        f"is one of {', '.join(KINDS)}; give {WANTED}."
    )


def described_head(raw: RawConfig, target: ModelConfig) -> tuple[Any, DecoderNames]:
    """A head's config, and which norms and biases its layer has. Raises `ConfigError` for fields that do not make a
    head of `target`."""
    return described_as("a draft head", raw, lambda: _described(raw, target))


def _described(raw: RawConfig, target: ModelConfig):
    kind = raw.choice("drafter", KINDS)
    attention = attention_of(raw, target)
    if raw.get("attention_scale") is not None:
        attention = replace(attention, scale=number_above_0(raw, "attention_scale"))
    vocab_size = raw.positive("vocab_size")
    config = KINDS[kind](
        hidden_dim=raw.positive("hidden_size"),
        layer=LayerConfig((attention,), MlpConfig(raw.positive("intermediate_size"), activation_of(raw))),
        norm_eps=number_above_0(raw, "rms_norm_eps"),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(raw, vocab_size),
        logit_softcap=number_from_0(raw, "logit_softcap"),
        **{name: number(raw, name) for name in SCALES},
        **(_stream_facts(raw, len(target.layers)) if HEADS[KINDS[kind]].fc_factor == 3 else {}),
    )
    bias = raw.flag("attention_bias")
    norm = raw.choice("qk_norm", ("none", "head", "full"))
    return config, DecoderNames(qk_norm=norm, qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias"))


def _draft_vocab_size(raw: RawConfig, vocab_size: int) -> int:
    size = raw.get("draft_vocab_size", vocab_size)
    if type(size) is not int or not 0 <= size <= vocab_size:
        raise ConfigError(
            f"draft_vocab_size={shown(size)} in {raw.origin} is not a whole number from 0 to vocab_size={vocab_size}; "
            "correct the config."
        )
    return size


def _stream_facts(raw: RawConfig, num_layers: int) -> dict[str, Any]:
    """What only heads that read the residual stream are told by."""
    eagle = table(raw, "eagle_config")
    for name in OTHERWISE:
        if raw.flag(name):
            raise ConfigError(f"{name}=True in {raw.origin} asks for norms that are not run here; use a head without.")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise ConfigError(
            f"use_aux_hidden_state={shown(eagle['use_aux_hidden_state'])} in {raw.origin} is of a head that reads one "
            "row of the target, where three are; use one that reads three."
        )
    # SafeAILab's, SpecForge's and SGLang's heads number the layer whose output is read, from 0; at the top level, as
    # vLLM has it, the number is that of the layers before.
    nested = _places(f"eagle_config.{PLACES}", eagle.get(PLACES), 1, num_layers, raw)
    flat = _places(PLACES, raw.get(PLACES), 0, num_layers, raw)
    if nested and flat and nested != flat:
        raise ConfigError(
            f"{PLACES}={list(flat)} in {raw.origin}, which counts the layers before, and {list(eagle[PLACES])} in its "
            "eagle_config, which names the layer that ends there, are not one less each; correct either."
        )
    capture = nested or flat or default_capture(num_layers)
    return {"capture": capture, "norm_before_residual": raw.flag("norm_before_residual")}


def _places(name: str, numbers: Any, shift: int, num_layers: int, raw: RawConfig) -> tuple[int, ...]:
    """Places of the residual stream; none where the field is absent or empty."""
    if numbers is None or numbers == []:
        return ()
    whole = isinstance(numbers, list) and len(numbers) == 3 and all(type(one) is int for one in numbers)
    if not whole or not all(0 <= one + shift <= num_layers for one in numbers):
        raise ConfigError(
            f"{name}={shown(numbers)} in {raw.origin} are not three whole numbers from {-shift} to "
            f"{num_layers - shift}, which say where in the target's {num_layers} layers the head reads; correct the "
            "config, or use the drafter of this model."
        )
    return tuple(one + shift for one in numbers)


def head_fields(config, target: ModelConfig, qk_norm: str) -> dict[str, Any]:
    """The fields by which `described_head` makes the config again."""
    (attention,), mlp = config.layer.mixers, config.layer.mlp
    kind = HEADS[type(config)].name
    values = {
        "architectures": [CLASSES[kind]],
        "model_type": "llama",
        "drafter": kind,
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_dim,
        "intermediate_size": mlp.hidden_dim,
        "hidden_act": mlp.activation,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_scale": attention.scale,
        "qk_norm": qk_norm,
        "rope": asdict(attention.rope),
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": target.max_context_tokens,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "target": target_facts(target),
    }
    for name in (*SCALES, "logit_softcap"):
        values[name] = getattr(config, name)
    if config.capture:
        values["eagle_config"] = {"use_aux_hidden_state": True, PLACES: [place - 1 for place in config.capture]}
        values["norm_before_residual"] = config.norm_before_residual
    return values
