# SPDX-License-Identifier: Apache-2.0
"""What a DFlash drafter is made of, and how its published directories say so: `config.json` with a `dflash_config`, and
tensors `fc`, `hidden_norm`, `layers.{}.*` as Qwen3 names them, `norm`. Embedding and head are the target's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flax import struct

from metrale_jax.core.config import AttentionConfig, MlpConfig, ModelConfig
from metrale_jax.core.errors import ConfigError, shown
from metrale_jax.core.specs import Part
from metrale_jax.models.decoder_specs import (
    DecoderNames,
    attention_specs,
    fused_specs,
    linear_specs,
    mlp_specs,
    norm_spec,
)
from metrale_jax.models.family import activation_of, either, layer_types
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.sharding import axes
from metrale_jax.speculative.drafter_config import (
    attention_of,
    described_as,
    number,
    number_above_0,
    number_from_0,
    read_values,
)
from pallas_kernels.paged_attention.op import MAX_TREE

CLASS = "DFlashDraftModel"
# Published drafters have five to eight.
MAX_LAYERS = 1024
IGNORED = (r"(model\.)?embed_tokens\.weight", r"lm_head\.weight", r".*rotary_emb\.inv_freq")
DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "block_size": 16,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}


@dataclass(frozen=True)
class DFlashConfig:
    """Static facts of a drafter. Its width is the target's, whose embedding and head serve it.

    `attentions` has one for each layer; those with a window see only what stands before them in the block, and so do
    all where the drafter is `causal`. `captures` are the places of the target's residual stream that features are
    joined of. A block has up to `block_len` tokens. The scales and the softcap are the drafter's own.
    """

    hidden_dim: int
    attentions: tuple[AttentionConfig, ...]
    mlp: MlpConfig
    norm_eps: float
    captures: tuple[int, ...]
    mask_token: int
    block_len: int
    causal: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


@struct.dataclass
class DFlashLayerParams:
    """One layer: `Linear`s `q [N H, D]`, `kv [2 K H, D]`, keys' rows first, and `out [D, N H]`; norms `q_norm [H]`,
    `k_norm [H]`, `mixer_norm [D]`, `mlp_norm [D]`; `mlp`."""

    q: Any
    kv: Any
    out: Any
    q_norm: Any
    k_norm: Any
    mlp: Any
    mixer_norm: Any
    mlp_norm: Any


@struct.dataclass
class DFlashParams:
    """`fc`, a `Linear [D, F D]` of `F` captured rows, `hidden_norm [D]`, `layers`, `final_norm [D]`."""

    fc: Any
    hidden_norm: Any
    layers: tuple
    final_norm: Any


def described(directory: Path, target: ModelConfig) -> tuple[DFlashConfig, DFlashParams]:
    """The config and the weights' specs of the drafter in a directory. Raises `ConfigError` for one of another model,
    or of a kind that does not draft here."""
    raw = _read_config(Path(directory) / "config.json")
    config = described_as("a DFlash drafter", raw, lambda: _config(raw, target))
    return config, dflash_specs(config, raw.flag("attention_bias"))


def dflash_specs(config: DFlashConfig, bias: bool = False) -> DFlashParams:
    """A tree of `ParamSpec`s under the published names; `bias` is that of the attention's projections."""
    names, width = DecoderNames(qk_norm="head", qkv_bias=bias, out_bias=bias), config.hidden_dim

    def layer(number: int, attention: AttentionConfig) -> DFlashLayerParams:
        prefix = f"layers.{number}."
        query, kv = Part(attention.num_heads, attention.head_dim), Part(attention.num_kv_heads, attention.head_dim)
        logical = (axes.QKV, axes.HIDDEN)
        whole = attention_specs(width, attention, names, prefix)
        return DFlashLayerParams(
            q=fused_specs(prefix, names.qkv[:1], (query,), width, bias, logical),
            kv=fused_specs(prefix, names.qkv[1:], (kv, kv), width, bias, logical),
            out=whole.out,
            q_norm=whole.q_norm,
            k_norm=whole.k_norm,
            mlp=mlp_specs(width, config.mlp.hidden_dim, names, prefix),
            mixer_norm=norm_spec(f"{prefix}{names.mixer_norm}.weight", width, names),
            mlp_norm=norm_spec(f"{prefix}{names.mlp_norm}.weight", width, names),
        )

    return DFlashParams(
        fc=linear_specs("", "fc", width, len(config.captures) * width, False, (axes.HIDDEN, axes.HIDDEN)),
        hidden_norm=norm_spec("hidden_norm.weight", width, names),
        layers=tuple(layer(number, attention) for number, attention in enumerate(config.attentions)),
        final_norm=norm_spec("norm.weight", width, names),
    )


def _config(raw: RawConfig, target: ModelConfig) -> DFlashConfig:
    _check_target(raw, target)
    captured = raw.get("target_layer_ids")
    # What leaves the last layer is normed before others see it, so that no drafter is trained on it as it is here.
    if not isinstance(captured, list) or not captured or any(not _is_place(one, target) for one in captured):
        raise ConfigError(
            f"target_layer_ids={shown(captured)} in {raw.origin} are not layers from 0 to {len(target.layers) - 2} of "
            "the target; use the drafter of this model."
        )
    masks = raw.token_ids("mask_token_id", target.vocab_size)
    block_len, causal = raw.positive("block_size"), _causal(raw)
    if len(masks) != 1 or not 1 < block_len <= MAX_TREE:
        raise ConfigError(
            f"mask_token_id={masks} and block_size={block_len} in {raw.origin} are not one token and a size from 2 to "
            f"{MAX_TREE}; correct the config."
        )
    num_layers = raw.positive("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers={shown(num_layers)} in {raw.origin} is above {MAX_LAYERS}, which no drafter comes "
            "near; correct the config."
        )
    kinds = layer_types(raw, ["full_attention"] * num_layers)
    window = raw.positive("sliding_window") if raw.flag("use_sliding_window") else 0
    sliding = "sliding_attention" in kinds
    if sliding and (not window or causal is False):
        raise ConfigError(
            f"layer_types with sliding_attention, use_sliding_window={bool(window)} and is_causal={causal!r} in "
            f"{raw.origin} make layers that no published drafter of this class has; only causal ones have windows here."
        )
    full = attention_of(raw, target)
    return DFlashConfig(
        hidden_dim=raw.positive("hidden_size"),
        attentions=tuple(replace(full, window=window if kind == "sliding_attention" else 0) for kind in kinds),
        mlp=MlpConfig(raw.positive("intermediate_size"), activation_of(raw)),
        norm_eps=number_above_0(raw, "rms_norm_eps"),
        captures=tuple(one + 1 for one in captured),
        mask_token=masks[0],
        block_len=block_len,
        causal=bool(causal),
        embed_scale=number(raw, "input_embedding_scale"),
        logit_scale=number(raw, "output_multiplier"),
        logit_softcap=number_from_0(raw, "final_logit_softcapping"),
    )


def _causal(raw: RawConfig) -> bool | None:
    # vLLM reads `causal` of dflash_config, published drafters also say `is_causal`; without either it is as layers are.
    key = either(raw, "is_causal", "causal")
    return None if raw.get(key) is None else raw.flag(key)


def _is_place(number: Any, target: ModelConfig) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(target.layers) - 1


def _check_target(raw: RawConfig, target: ModelConfig) -> None:
    if raw.get("architectures") != [CLASS]:
        raise ConfigError(
            f"architectures={shown(raw.get('architectures'))} in {raw.origin} is no {CLASS}, the one class of DFlash "
            "drafters that is read; choose a drafter of that class."
        )
    expected = {"hidden_size": target.hidden_dim, "vocab_size": target.vocab_size}
    if raw.get("num_target_layers") is not None:
        expected["num_target_layers"] = len(target.layers)
    for name, value in expected.items():
        if raw.get(name) != value:
            raise ConfigError(
                f"{name}={raw.get(name)!r} in {raw.origin} is not the target's {value}; use the drafter of this model."
            )


def _read_config(path: Path) -> RawConfig:
    values = read_values(path, "a directory of a DFlash drafter")
    own = values.get("dflash_config")
    return RawConfig(values | (own if isinstance(own, dict) else {}), DEFAULTS, str(path))
