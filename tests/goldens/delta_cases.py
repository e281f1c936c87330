# SPDX-License-Identifier: Apache-2.0
"""The tiny hybrids of the gated delta rule and attention, as data: see golden_cases.py."""

from golden_cases import case, rope
from moe_cases import LENGTHS

# Over `BASE`: odd widths, two value heads for each key head, keys and values of different widths.
DELTA = {
    "vocab_size": 67,
    "hidden_size": 28,
    "intermediate_size": 22,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Where a query finds next to nothing, the norm of an output makes much of its rounding: not all of it, with this.
    "rms_norm_eps": 0.05,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 12,
}
HALF_ROTARY = rope("default", 9000.0, partial_rotary_factor=0.5)
# The norm of an output has an epsilon of its own here: a query that finds nothing is made rarer by narrow keys.
OLMO = DELTA | {
    "head_dim": None,
    "hidden_size": 36,
    "linear_key_head_dim": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
KIMI = DELTA | {
    "num_key_value_heads": 6,
    "linear_head_dim": 6,
    "linear_num_heads": 3,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}


def hybrid(name: str, family: str, config: dict, ablations: list[dict] = (), **options) -> dict:
    """One case at the lengths that tell chunks apart."""
    return case(name, family, config, ablations, lengths=LENGTHS, **options)


DELTA_CASES = [
    hybrid(
        "qwen3-next-dense",
        "qwen3_next",
        DELTA | MIXTURE | HALF_ROTARY | {"mlp_only_layers": [0, 1, 2, 3]},
        [rope("default", 9000.0, partial_rotary_factor=1.0)],
    ),
    hybrid(
        "qwen3-next",
        "qwen3_next",
        DELTA | MIXTURE | {"mlp_only_layers": [2], "norm_topk_prob": False},
        [{"norm_topk_prob": True}, {"num_experts_per_tok": 3}],
    ),
    hybrid("qwen3-5", "qwen3_5", DELTA | {"tie_word_embeddings": True}),
    hybrid("qwen3-5-seeing", "qwen3_5", DELTA | HALF_ROTARY, hub=True),
    hybrid("qwen3-5-moe", "qwen3_5_moe", DELTA | MIXTURE, hub=True),
    hybrid(
        "olmo-hybrid", "olmo_hybrid", OLMO | rope("default", 7000.0), [{"linear_allow_neg_eigval": False}], hub=True
    ),
    hybrid(
        "olmo-hybrid-no-positions",
        "olmo_hybrid",
        OLMO | {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        hub=True,
    ),
    hybrid("kimi-linear", "kimi_linear", KIMI, [{"routed_scaling_factor": 1.0}, {"moe_renormalize": False}], hub=True),
]
