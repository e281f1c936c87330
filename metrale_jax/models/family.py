# SPDX-License-Identifier: Apache-2.0
"""What a family file hands over: a description of one model, made from its raw config."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, RopeConfig
from metrale_jax.core.errors import ConfigError, MetraleError
from metrale_jax.models.config_fields import dtype_of, refuse_what_is_not_honoured
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.next_layer import NextLayer
from metrale_jax.models.rope_config import parse_rope, rope_params
from pallas_kernels.activations import ACTIVATIONS


@dataclass(frozen=True)
class Description:
    """A model's config and the tree of its weights' specs. `ignored` are patterns of tensors that this model does
    without, beside the family's."""

    config: ModelConfig
    specs: DecoderParams
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class GgufRules:
    """How a family's GGUF differs: `config` spells its header as a raw config, `undo` maps the suffix of a weight's
    Hugging Face name to the function that takes llama.cpp's change of that weight back."""

    config: Callable[[str, Mapping[str, Any], Mapping[str, np.ndarray]], dict[str, Any]]
    undo: Callable[[ModelConfig], Mapping[str, Callable[[np.ndarray], np.ndarray]]]


@dataclass(frozen=True)
class Family:
    """A plug-in: `defaults` are the config class's own for fields a file may leave out; `gguf` is None where no GGUF is
    read, `quantised` lists the `quant_method`s whose files are, and `text_config` is the field under which files of a
    model that also sees or hears keep the text's fields. `only` has the values of fields at which a model is what
    `describe` says, whether that reads them or not. `next_layer(config, raw)` describes the layer that drafts tokens,
    None where a checkpoint has none; the family has it None where none of its checkpoints do."""

    name: str
    describe: Callable[[RawConfig], Description]
    defaults: Mapping[str, Any]
    gguf: GgufRules | None = None
    quantised: tuple[str, ...] = ()
    ignored: tuple[str, ...] = field(default=(r".*rotary_emb\.inv_freq",))
    text_config: str = ""
    only: Mapping[str, tuple] = field(default_factory=dict)
    next_layer: Callable[[ModelConfig, RawConfig], NextLayer | None] | None = None


def described(family: Family, raw: RawConfig) -> Description:
    """The family's description of a raw config. Raises `ConfigError`, also where a field is of a type that no family
    expects there, or says what the family does not do."""
    from metrale_jax.models.registry import ARCHITECTURES

    try:
        description = family.describe(raw)
        refuse_what_is_not_honoured(raw, family.only, family.name, set(ARCHITECTURES.values()))
        return description
    except MetraleError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{raw.origin} does not describe a {family.name} model: a field is of another type or length than it must "
            f"be ({error}); correct the config."
        ) from None


def head_dim_of(raw: RawConfig) -> int:
    """`head_dim`, or the model width shared out among the heads."""
    if raw.get("head_dim") is not None:
        return raw.positive("head_dim")
    width, heads = raw.positive("hidden_size"), raw.positive("num_attention_heads")
    if width % heads:
        raise ConfigError(
            f"hidden_size={width} in {raw.origin} is not a multiple of num_attention_heads={heads} and there is no "
            "head_dim; add head_dim."
        )
    return width // heads


def attention_config(raw: RawConfig, rope: RopeConfig | None, **changes) -> AttentionConfig:
    """The attention of one layer from the common fields; `changes` replace window, softcap or scale."""
    heads, width = raw.positive("num_attention_heads"), head_dim_of(raw)
    as_many = raw.given_as_null("num_key_value_heads") or raw.get("num_key_value_heads") is None
    kv_heads = heads if as_many else raw.positive("num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads={heads} in {raw.origin} is not a multiple of num_key_value_heads={kv_heads}; correct "
            "the config."
        )
    facts = {"scale": width**-0.5, **changes}
    return AttentionConfig(heads, kv_heads, width, rope=rope, **facts)


def flat_rope(raw: RawConfig, default_theta: float = 10_000.0, partial: bool = False) -> RopeConfig:
    """The one rope of a family whose layers share it; `partial` if it may turn a part of each head."""
    return parse_rope(raw, rope_params(raw), head_dim_of(raw), default_theta, partial)


def either(raw: RawConfig, *keys: str) -> str:
    """The first of `keys` that the config has, else the first that is null, else the last. Raises `ConfigError` if
    it has several that differ."""
    given = [key for key in keys if key in raw.given]
    if len({str(raw.given[key]) for key in given}) > 1:
        told = ", ".join(f"{key}={raw.given[key]!r}" for key in given)
        raise ConfigError(f"{told} in {raw.origin} are two names of one field and differ; correct either.")
    for key in keys:
        raw.read.add(key)
    null = () if given else [key for key in keys if key in raw.null]
    return next(iter(null), None) or next((key for key in keys if raw.get(key) is not None), keys[-1])


def window_of(raw: RawConfig, key: str = "sliding_window") -> int:
    """The sliding window in tokens; 0 where the file says null, or where it and the family's defaults say nothing."""
    return 0 if raw.get(key) is None or key in raw.null else raw.positive(key)


def layer_types(raw: RawConfig, otherwise: list[str]) -> list[str]:
    """Each layer's "full_attention" or "sliding_attention", from the file or as the family lays them out."""
    found = raw.get("layer_types") or otherwise
    allowed = {"full_attention", "sliding_attention"}
    if len(found) != raw.positive("num_hidden_layers") or not set(found) <= allowed:
        raise ConfigError(
            f"layer_types={found!r} in {raw.origin} must name one of {sorted(allowed)} for each of the "
            f"{raw.positive('num_hidden_layers')} layers; correct the config."
        )
    return list(found)


def model_config(raw: RawConfig, family: str, attentions: list[AttentionConfig], activation_key: str, **changes):
    """The `ModelConfig` of a dense decoder from the common fields; `changes` are a family's scales and caps."""
    feed_forward = MlpConfig(raw.positive("intermediate_size"), activation_of(raw, activation_key))
    return layered_config(raw, family, [LayerConfig((one,), feed_forward) for one in attentions], **changes)


def activation_of(raw: RawConfig, key: str = "hidden_act") -> str:
    """The name among `ACTIVATIONS` of the activation; configs may call silu swish."""
    found = raw.choice(key, (*ACTIVATIONS, "swish"))
    return "silu" if found == "swish" else found


def layered_config(raw: RawConfig, family: str, layers: Sequence[LayerConfig], **changes) -> ModelConfig:
    """The `ModelConfig` of these layers, the rest from the common fields or from `changes`."""
    eos = raw.token_ids("eos_token_id", raw.positive("vocab_size"))
    bos = raw.token_ids("bos_token_id")
    facts = {
        "max_context_tokens": lambda: raw.positive("max_position_embeddings"),
        "norm_eps": lambda: raw.number("rms_norm_eps"),
        "tie_embeddings": lambda: raw.flag("tie_word_embeddings"),
    }
    return ModelConfig(
        family=family,
        vocab_size=raw.positive("vocab_size"),
        hidden_dim=raw.positive("hidden_size"),
        layers=tuple(layers),
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else -1,
        dtype=dtype_of(raw),
        **{name: read() for name, read in facts.items() if name not in changes},
        **changes,
    )
