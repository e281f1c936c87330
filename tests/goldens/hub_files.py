# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the Hub has them, made of those of transformers, which undoes in part what it does on loading."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SMALL_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 28}


def as_on_the_hub(family: str, folder: Path) -> None:
    """Nothing; the folder's tensors, and its config where that differs too, get the names that the Hub has."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors, config = FAMILIES[family](tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _seeing(tensors: dict, config: dict) -> tuple[dict, dict]:
    """The text as a part of a model that sees, with a drafter beside it."""
    kind = config["model_type"].removesuffix("_text")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    named |= {"model.visual.pos_embed.weight": torch.ones(4, 8), "mtp.norm.weight": torch.ones(28)}
    whole = {
        "architectures": [config.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")],
        "dtype": config.pop("dtype"),
        "model_type": kind,
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "vision_config": {"model_type": f"{kind}_vision", **SMALL_VISION},
    }
    return named, whole


def _olmo_hybrid(tensors: dict, config: dict) -> tuple[dict, dict]:
    """Norms of attention layers under their own names, convolutions cut where queries, keys and values end."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        if kind == "full_attention":
            tensors[f"{prefix}post_attention_layernorm.weight"] = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            continue
        names = [f"{prefix}linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors |= dict(zip(names, whole.split([keys, keys, values]), strict=True))
    return tensors, config


def _kimi_linear(tensors: dict, config: dict) -> tuple[dict, dict]:
    """Feed-forward layers that are no mixture under their own name, and the Hub's spelling of the config."""
    named = {
        re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name): tensor for name, tensor in tensors.items()
    }
    types = config.pop("layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [index + 1 for index, kind in enumerate(types) if kind == "full_attention"],
        "kda_layers": [index + 1 for index, kind in enumerate(types) if kind == "linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    return named, config


FAMILIES = {"qwen3_5": _seeing, "qwen3_5_moe": _seeing, "olmo_hybrid": _olmo_hybrid, "kimi_linear": _kimi_linear}
