# SPDX-License-Identifier: Apache-2.0
"""Which file describes which architecture: literal tables of lazy imports, one line a family."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from metrale_jax.core.errors import Unsupported
from metrale_jax.models.family import Family

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Gemma2ForCausalLM": "gemma2",
        "Gemma3ForCausalLM": "gemma3",
        "Phi3ForCausalLM": "phi3",
        "Olmo2ForCausalLM": "olmo2",
        "GraniteForCausalLM": "granite",
        "Mamba2ForCausalLM": "mamba2",
        "NemotronHForCausalLM": "nemotron_h",
        "BambaForCausalLM": "bamba",
        "FalconH1ForCausalLM": "falcon_h1",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "MixtralForCausalLM": "mixtral",
        "GptOssForCausalLM": "gpt_oss",
        "Glm4MoeForCausalLM": "glm4_moe",
        "MiniMaxM2ForCausalLM": "minimax_m2",
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_5",
        "Qwen3_5ForConditionalGeneration": "qwen3_5",
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
        "OlmoHybridForCausalLM": "olmo_hybrid",
        "KimiLinearForCausalLM": "kimi_linear",
    }
)

GGUF_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma2": "gemma2",
        "gemma3": "gemma3",
        "phi3": "phi3",
        "olmo2": "olmo2",
        "granite": "granite",
    }
)


def family_for(architecture: str, table: Mapping[str, str] = ARCHITECTURES) -> Family:
    """The family of an architecture's name. Raises `Unsupported` with the list if it is unknown."""
    if architecture not in table:
        raise Unsupported(f"architecture {architecture!r} is not supported; supported are {sorted(table)}.")
    return importlib.import_module(f"metrale_jax.models.{table[architecture]}").FAMILY


def class_of(module: str) -> str:
    """What transformers calls the model class of a family's module."""
    return next(name for name, family in ARCHITECTURES.items() if family == module)
