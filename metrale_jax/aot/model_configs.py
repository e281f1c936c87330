# SPDX-License-Identifier: Apache-2.0
"""Configs of models that are compiled with no device, as their checkpoints spell them."""

from types import MappingProxyType

# SmolLM2-135M's odd widths and tied embedding; few layers and a small vocabulary, which add compile time and no shape.
SMALL = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
)
# What the published checkpoints say of their shapes; Gemma's is the text part.
LLAMA_8B = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
)

QWEN3_8B = MappingProxyType(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
)
QWEN3_32B = MappingProxyType(
    {
        **QWEN3_8B,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    }
)
GEMMA3_27B = MappingProxyType(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "vocab_size": 262208,
    }
)
# Of Mamba-2, attention and dense layers that stand alone, in this order.
NEMOTRON_H_8B = MappingProxyType(
    {
        "architectures": ["NemotronHForCausalLM"],
        "attention_head_dim": 128,
        "conv_kernel": 4,
        "head_dim": 128,
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "intermediate_size": 21504,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 8192,
        "mlp_hidden_act": "relu2",
        "n_groups": 8,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 131072,
    }
)
# Three layers of the gated delta rule to one of attention.
OLMO_HYBRID_7B = MappingProxyType(
    {
        "architectures": ["OlmoHybridForCausalLM"],
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
        "num_attention_heads": 30,
        "num_hidden_layers": 32,
        "num_key_value_heads": 30,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 100352,
    }
)
