# SPDX-License-Identifier: Apache-2.0
"""GGUF headers spelled as raw configs, and what llama.cpp changes in weights when it writes them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError, Unsupported


def header_config(architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The common fields of a raw config. `tensors` holds the small tensors that carry rope factors."""

    def own(key, default=None):
        return fields.get(f"{architecture}.{key}", default)

    heads = own("attention.head_count")
    return {
        "vocab_size": own("vocab_size") or len(fields.get("tokenizer.ggml.tokens", ())) or None,
        "hidden_size": own("embedding_length"),
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": own("attention.key_length"),
        "max_position_embeddings": own("context_length"),
        "rms_norm_eps": _short(own("attention.layer_norm_rms_epsilon")),
        "sliding_window": own("attention.sliding_window"),
        "rope_dimension_count": own("rope.dimension_count") or None,
        "rope_parameters": _rope(architecture, own, tensors),
        "eos_token_id": _end_ids(fields),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "tie_word_embeddings": True,
    }


def _short(value: float | None) -> float | None:
    # Headers hold float32; 1e-5 comes back as 9.999999747378752e-06.
    return None if value is None else float(f"{value:.7g}")


def _end_ids(fields: Mapping[str, Any]) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({fields[key] for key in keys if fields.get(key) is not None})


def _rope(architecture: str, own: Callable, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if own("rope.freq_base") is not None:
        rope["rope_theta"] = own("rope.freq_base")
    if "rope_freqs.weight" in tensors:
        return {**rope, "rope_type": "frequency_factors", "factors": tensors["rope_freqs.weight"].tolist()}
    if "rope_factors_long.weight" in tensors:
        return {
            **rope,
            "rope_type": "longrope",
            "long_factor": tensors["rope_factors_long.weight"].tolist(),
            "short_factor": tensors["rope_factors_short.weight"].tolist(),
            "original_max_position_embeddings": own("rope.scaling.original_context_length"),
            "attention_factor": own("rope.scaling.attn_factor"),
        }
    kind = own("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise Unsupported(
            f"rope scaling {kind!r} of the {architecture} GGUF is not supported; supported are linear, yarn."
        )
    rope |= {"rope_type": kind, "factor": own("rope.scaling.factor")}
    original = own("rope.scaling.original_context_length")
    return rope | ({"original_max_position_embeddings": original} if original else {})


def unpermuted_heads(num_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Undoes llama.cpp's interleaving of the two halves of each head's rows."""

    def undo(array: np.ndarray) -> np.ndarray:
        if array.shape[0] % (2 * num_heads):
            raise ConfigError(
                f"{array.shape[0]} rows are not pairs of {num_heads} heads; the GGUF's head count is wrong."
            )
        half = array.shape[0] // num_heads // 2
        return array.reshape(num_heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return undo


def unpermuted_qk(config: ModelConfig) -> Mapping[str, Callable[[np.ndarray], np.ndarray]]:
    """For families whose q and k rows llama.cpp permutes."""
    attention = config.attentions[0]
    query, key = unpermuted_heads(attention.num_heads), unpermuted_heads(attention.num_kv_heads)
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.q_proj.bias": query,
        "self_attn.k_proj.weight": key,
        "self_attn.k_proj.bias": key,
    }


def unchanged(config: ModelConfig) -> Mapping[str, Callable[[np.ndarray], np.ndarray]]:
    """For families whose weights are stored as they are."""
    del config
    return {}


def minus_one(array: np.ndarray) -> np.ndarray:
    """Undoes the one that llama.cpp adds to Gemma's norm weights."""
    return array - np.float32(1)
