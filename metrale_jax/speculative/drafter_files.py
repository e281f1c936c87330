# SPDX-License-Identifier: Apache-2.0
"""A draft head as a directory: `config.json` and `model.safetensors`, the tensors under their published names.

The config's fields are those of a Llama's, as EAGLE-3 checkpoints have them, so that such a directory from elsewhere
opens too; ours add `drafter` (the kind), `rope`, the target's scales, and under `target` what it was trained for.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.core.config import LayerConfig, MlpConfig, ModelConfig, RopeConfig
from metrale_jax.core.errors import CheckpointError, ConfigError
from metrale_jax.core.specs import ParamSpec, stacked_rows
from metrale_jax.models.decoder_specs import DecoderNames
from metrale_jax.models.family import activation_of, attention_config, flat_rope
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.speculative.head_specs import IDS, distances_of_ids, head_specs, ids_of_distances
from metrale_jax.speculative.heads import HEADS, KINDS, HeadParams, default_capture

CONFIG, WEIGHTS = "config.json", "model.safetensors"
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
}
# Tensors that published heads have beside those that are read: a mask that `d2t` says too, and the target's embeddings.
IGNORED = (r"t2d", r"(model\.)?embed_tokens\.weight", r".*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Drafter:
    """A draft head's directory, its weights not yet read. `target` says which model it is for; empty if it does not."""

    config: Any
    specs: HeadParams
    source: SafetensorsSource
    target: Mapping[str, Any]


def target_facts(target: ModelConfig) -> dict[str, Any]:
    """What a head's target is told by."""
    return {
        "family": target.family,
        "num_layers": len(target.layers),
        "hidden_size": target.hidden_dim,
        "vocab_size": target.vocab_size,
    }


def open_drafter(directory: Path, target: ModelConfig) -> Drafter:
    """The head that `directory` holds, for `target`. Raises `ConfigError` for one that is for another model, and
    `CheckpointError` for tensors that are missing, unexpected or of the wrong shape."""
    directory = Path(directory)
    raw = _read_config(directory / CONFIG)
    facts = raw.table("target")
    expected = target_facts(target) if facts else {"hidden_size": target.hidden_dim, "vocab_size": target.vocab_size}
    found = facts or raw.values
    wrong = [f"{name}={found.get(name)!r}" for name, value in expected.items() if found.get(name) != value]
    if wrong:
        ours = ", ".join(f"{name}={value!r}" for name, value in expected.items())
        raise ConfigError(
            f"the drafter in {directory} was trained for a model of {', '.join(wrong)}, the target has {ours}; "
            "use the drafter of this model, or train one with metrale-jax train-drafter."
        )
    config, names = _described(raw, target)
    source = SafetensorsSource(directory)
    specs = head_specs(config, names)
    load_plan(specs, source, IGNORED)
    return Drafter(config, specs, source, facts)


def write_drafter(directory: Path, config, params: HeadParams, target: ModelConfig, qk_norm: str = "none") -> None:
    """Nothing; `directory` holds the head for `target`, its weights in the dtype of the params. What it held before is
    replaced file by file, the weights first."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    specs = head_specs(config, DecoderNames(qk_norm=qk_norm))
    tensors = dict(_tensors(specs, params))
    if IDS in tensors:
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), np.asarray(params.token_ids))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / f"{WEIGHTS}.writing", metadata={"format": "pt"})
        os.replace(directory / f"{WEIGHTS}.writing", directory / WEIGHTS)
        text = json.dumps(_config_values(config, target, qk_norm), indent=2) + "\n"
        (directory / f"{CONFIG}.writing").write_text(text, encoding="utf-8")
        os.replace(directory / f"{CONFIG}.writing", directory / CONFIG)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be written: {error}. Free space or give another directory."
        ) from None


def _tensors(specs: HeadParams, params: HeadParams) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint, which the specs' transforms would make the params of again."""
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        array = np.asarray(array)
        if spec.transform is ids_of_distances:
            array = distances_of_ids(array)
        yield from _unstacked(spec, array)


def _unstacked(spec: ParamSpec, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    assert len(spec.sources) == 1 or spec.transform is stacked_rows, f"{spec.sources} cannot be told apart again"
    start = 0
    for item in spec.sources:
        rows = item.shape[0]
        yield item.name, np.ascontiguousarray(array[start : start + rows])
        start += rows


def _config_values(config, target: ModelConfig, qk_norm: str) -> dict[str, Any]:
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
    for name in ("embed_scale", "residual_scale", "logit_scale", "logit_softcap"):
        values[name] = getattr(config, name)
    if config.capture:
        values["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.capture),
        }
    return values


def _described(raw: RawConfig, target: ModelConfig):
    kind = raw.choice("drafter", KINDS)
    rope = raw.table("rope")
    attention = attention_config(raw, _rope(rope, raw) if rope else flat_rope(raw))
    attention = replace(
        attention, scale=raw.number("attention_scale") if raw.get("attention_scale") else attention.scale
    )
    size = raw.get("draft_vocab_size")
    places = raw.table("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    capture = places or (default_capture(len(target.layers)) if HEADS[KINDS[kind]].fc_factor == 3 else ())
    scales = {name: raw.number(name) for name in ("embed_scale", "residual_scale", "logit_scale", "logit_softcap")}
    config = KINDS[kind](
        hidden_dim=raw.positive("hidden_size"),
        layer=LayerConfig((attention,), MlpConfig(raw.positive("intermediate_size"), activation_of(raw))),
        norm_eps=raw.number("rms_norm_eps"),
        vocab_size=raw.positive("vocab_size"),
        draft_vocab_size=raw.positive("vocab_size") if size is None else size and raw.positive("draft_vocab_size"),
        capture=tuple(capture),
        **scales,
    )
    bias = raw.flag("attention_bias")
    norm = raw.choice("qk_norm", ("none", "head", "full"))
    return config, DecoderNames(qk_norm=norm, qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias"))


def _rope(fields: Mapping[str, Any], raw: RawConfig) -> RopeConfig:
    try:
        return RopeConfig(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        )
    except TypeError as error:
        raise ConfigError(f"rope in {raw.origin} is not what it was written as ({error}); write it again.") from None


def _read_config(path: Path) -> RawConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); give a directory that metrale-jax train-drafter wrote."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); write it again.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object; write it again.")
    if "drafter" not in values:
        named = [str(name) for name in values.get("architectures") or []]
        if any("Eagle3" in name for name in named):
            values["drafter"] = "eagle3"
    return RawConfig(values, DEFAULTS, str(path))
