# SPDX-License-Identifier: Apache-2.0
"""The tiny models with Mamba-2 layers that make_ssm_goldens.py builds, as data: see golden_cases.py."""

COMMON = {
    "vocab_size": 67,
    "hidden_size": 36,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTHS = [1, 2, 7, 63, 64, 65, 130, 300]


def case(name: str, family: str, config: dict, ablations: list[dict] = (), **options) -> dict:
    """One case; options: `post` (a rewrite of config.json, by name), `copy_of`."""
    return {
        "name": name,
        "family": family,
        "config": COMMON | config,
        "ablations": list(ablations),
        "lengths": LENGTHS,
        **options,
    }


MAMBA2 = {
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 12,
    "state_size": 10,
    "n_groups": 3,
    "conv_kernel": 4,
    "layer_norm_epsilon": 0.01,
    "chunk_size": 16,
}
MAMBA2_CASES = [
    case(
        "mamba2",
        "mamba2",
        MAMBA2 | {"use_bias": True, "time_step_limit": [0.3, 1.2]},
        [
            {"time_step_limit": [0.3, 9.0]},
            {"time_step_limit": [0.0, 1.2]},
            {"layer_norm_epsilon": 1e-6},
        ],
    ),
    case(
        "mamba2-tied",
        "mamba2",
        MAMBA2
        | {
            "tie_word_embeddings": True,
            "n_groups": 1,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "num_heads": 9,
            "head_dim": 8,
            "residual_in_fp32": False,
            "chunk_size": 256,
        },
        [{"layer_norm_epsilon": 1e-6}],
    ),
]

NEMOTRON_H = {
    "hybrid_override_pattern": "M-*M*-M",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "ssm_state_size": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 0.01,
    "time_step_min": 0.3,
}
NEMOTRON_H_CASES = [
    case(
        "nemotron-h",
        "nemotron_h",
        NEMOTRON_H | {"use_bias": True, "mlp_bias": True},
        [{"time_step_min": 0.001}, {"layer_norm_epsilon": 1e-6}],
    ),
    case(
        "nemotron-h-experts",
        "nemotron_h",
        NEMOTRON_H
        | {
            "hybrid_override_pattern": "ME*E-",
            "use_conv_bias": False,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 10,
            "moe_shared_expert_intermediate_size": 14,
            "routed_scaling_factor": 1.4,
            "time_step_min": 0.001,
        },
        [{"routed_scaling_factor": 1.0}, {"norm_topk_prob": False}, {"topk_group": 3}],
    ),
    case("nemotron-h-old-spelling", "nemotron_h", {}, copy_of="nemotron-h", post="old_pattern"),
]

# Of the bases of rotary frequencies some give ones that transformers rounds otherwise than in float64. That last bit
# turns a key 300 tokens back by 1e-5, which sharp attention shows; 1000 is not among them.
BAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 44,
    "mamba_n_heads": 6,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
BAMBA_CASES = [
    case(
        "bamba",
        "bamba",
        BAMBA | {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "time_step_limit": [0.3, 1.5]},
        [
            {"time_step_limit": [0.0, 9.0]},
            {"rms_norm_eps": 1e-6},
            {"attn_layer_indices": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
        ],
    ),
    case("bamba-old-spelling", "bamba", {}, copy_of="bamba", post="old_rope"),
]

FALCON_H1 = {
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 44,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "lm_head_multiplier": 0.8,
    "embedding_multiplier": 1.7,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 1.2,
    "attention_in_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.4, 0.8, 1.3, 0.6],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
FALCON_H1_ABLATIONS = [
    {"rms_norm_eps": 1e-6},
    *(
        {name: 1.0}
        for name in (
            "lm_head_multiplier",
            "embedding_multiplier",
            "key_multiplier",
            "attention_out_multiplier",
            "attention_in_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    ),
    {"mlp_multipliers": [1.0, 1.3]},
    {"mlp_multipliers": [0.8, 1.0]},
    *(
        {
            "ssm_multipliers": [
                1.0 if index == changed else value for index, value in enumerate([0.7, 1.4, 0.8, 1.3, 0.6])
            ]
        }
        for changed in range(5)
    ),
]
FALCON_H1_CASES = [
    case("falcon-h1", "falcon_h1", FALCON_H1 | {"tie_word_embeddings": True}, FALCON_H1_ABLATIONS),
    case(
        "falcon-h1-norm",
        "falcon_h1",
        FALCON_H1
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.3, 1.5],
        },
        [*FALCON_H1_ABLATIONS, {"mamba_norm_before_gate": True}, {"time_step_limit": [0.0, 9.0]}],
    ),
    case(
        "falcon-h1-norm-first",
        "falcon_h1",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_conv_bias": False},
        [{"mamba_norm_before_gate": False}],
    ),
]

SSM_CASES = MAMBA2_CASES + NEMOTRON_H_CASES + BAMBA_CASES + FALCON_H1_CASES
