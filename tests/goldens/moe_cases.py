# SPDX-License-Identifier: Apache-2.0
"""The tiny mixtures of experts, as data: see golden_cases.py."""

from golden_cases import NO_ROPE_SCALING, case, rope

LENGTHS = (1, 2, 7, 63, 64, 65, 130, 300)
# Over `BASE`: what every tiny mixture shares. Odd counts of experts and odd widths; all is small, for there are many.
SMALL = {
    "vocab_size": 67,
    "hidden_size": 28,
    "intermediate_size": 22,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
}
QWEN = SMALL | {"num_experts": 7, "moe_intermediate_size": 18}
LOCAL = SMALL | {"num_local_experts": 7, "intermediate_size": 18}
GLM = SMALL | {
    "n_routed_experts": 12,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "attention_bias": True,
    "use_qk_norm": True,
}
OSS = LOCAL | {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "swiglu_limit": 1.1,
    **rope("yarn", 300.0, factor=8.0, original_max_position_embeddings=64, truncate=False),
}
OSS_ABLATIONS = [
    {"swiglu_limit": 7.0},
    {"swiglu_alpha": 1.0},
    {"sliding_window": 200},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"num_experts_per_tok": 3},
    rope("yarn", 300.0, factor=8.0, original_max_position_embeddings=64),
]


def mixture(name: str, family: str, config: dict, ablations: list[dict] = (), **options) -> dict:
    """One case at the lengths that tell chunks and tiles apart."""
    return case(name, family, config, ablations, lengths=LENGTHS, **options)


MOE_CASES = [
    mixture(
        "qwen3-moe",
        "qwen3_moe",
        QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1]},
        [{"norm_topk_prob": False}, {"num_experts_per_tok": 2}],
    ),
    mixture(
        "qwen3-moe-sparse-step",
        "qwen3_moe",
        QWEN | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 20},
        [{"norm_topk_prob": True}, {"sliding_window": 200}],
    ),
    mixture("qwen3-moe-old", "qwen3_moe", {}, copy_of="qwen3-moe", post="old"),
    mixture(
        "mixtral",
        "mixtral",
        LOCAL | {"num_experts_per_tok": 2, "sliding_window": None, **rope("default", 9000.0)},
        [{"num_experts_per_tok": 3}],
    ),
    mixture(
        "mixtral-window-old",
        "mixtral",
        LOCAL
        | {"num_experts_per_tok": 2, "num_local_experts": 5, "sliding_window": 20}
        | {"head_dim": None, "hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1}
        | rope("default", 9000.0),
        [{"sliding_window": 200}],
        post="old",
    ),
    mixture(
        "glm4-moe",
        "glm4_moe",
        GLM,
        [
            {"routed_scaling_factor": 1.0},
            {"norm_topk_prob": False},
            {"n_group": 1, "topk_group": 1},
            {"topk_group": 3},
            rope("default", partial_rotary_factor=1.0),
        ],
    ),
    mixture("glm4-moe-old", "glm4_moe", {}, copy_of="glm4-moe", post="old"),
    mixture(
        "minimax-m2",
        "minimax_m2",
        LOCAL | rope("default", 9000.0, partial_rotary_factor=0.5),
        [{"num_experts_per_tok": 2}, rope("default", 9000.0, partial_rotary_factor=1.0)],
    ),
    mixture("minimax-m2-old", "minimax_m2", {}, copy_of="minimax-m2", post="old_rotary_dim"),
    mixture("gpt-oss", "gpt_oss", OSS, [*OSS_ABLATIONS, NO_ROPE_SCALING]),
    mixture("gpt-oss-old", "gpt_oss", {}, copy_of="gpt-oss", post="old"),
    # Its blocks and scales are random and mean what transformers makes of them.
    mixture("gpt-oss-mxfp4", "gpt_oss", OSS | {"hidden_size": 64, "intermediate_size": 32}, OSS_ABLATIONS, mxfp4=True),
]
