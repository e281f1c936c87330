# SPDX-License-Identifier: Apache-2.0
"""The tiny models that make_goldens.py builds, as data.

A case gives its family, config overrides over `BASE`, and `ablations`: config changes that must move the logits, which
proves that the weights exercise the feature that the case is named after.
"""

BASE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.01,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_ROPE_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
YARN_32 = {"factor": 8.0, "original_max_position_embeddings": 32}
YARN_128 = {"factor": 8.0, "original_max_position_embeddings": 128}
SHORT_FACTOR = [1.0, 1.1, 1.25, 1.4, 1.7, 2.0, 2.6, 3.1]
LONG_FACTOR = [1.3, 1.9, 2.7, 3.6, 5.0, 7.5, 11.0, 16.0]
GEMMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 11, "sliding_window": 20}
GEMMA3 = GEMMA | {"num_key_value_heads": 1, "num_hidden_layers": 5, "intermediate_size": 46}
GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
GRANITE = {
    "head_dim": None,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.6,
    "logits_scaling": 0.7,
}
GRANITE_ABLATIONS = [
    {"embedding_multiplier": 1.0},
    {"residual_multiplier": 1.0},
    {"attention_multiplier": 6**-0.5},
    {"logits_scaling": 1.0},
]
PHI3_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.6],
    "long_factor": [1.5, 3.0, 8.0],
    "partial_rotary_factor": 0.75,
}
PHI3 = {"head_dim": None, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}


def rope(rope_type: str, rope_theta: float = 10000.0, **rest) -> dict:
    """A `rope_parameters` override."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": rope_theta, **rest}}


def gemma3_rope(**full) -> dict:
    """`rope_parameters` nested by layer type: two bases, the given scaling on the global layers."""
    full = {"rope_type": "default", "rope_theta": 70000.0, **full}
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}}
    }


def case(name: str, family: str, config: dict, ablations: list[dict] = (), **options) -> dict:
    """One case; options: `post` (a rewrite of config.json), `shard`, `crossings` (more greedy lengths), `stateful`,
    `lengths` (others than the usual ones; of their logits, which have to agree, the longest are kept)."""
    return {"name": name, "family": family, "config": config, "ablations": list(ablations), **options}


LLAMA3_ROPE = rope(
    "llama3", 5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

LLAMA_CASES = [
    case("llama-default", "llama", {"tie_word_embeddings": True}, [rope("default", 500.0)]),
    case("llama-untied-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    case(
        "llama-llama3rope",
        "llama",
        LLAMA3_ROPE,
        [rope("default", 5000.0)],
    ),
    case("llama-linear", "llama", rope("linear", factor=3.0), [NO_ROPE_SCALING]),
    case(
        "llama-dynamic",
        "llama",
        {"max_position_embeddings": 64, **rope("dynamic", factor=2.5)},
        [NO_ROPE_SCALING],
        stateful=True,
        crossings=[60],
    ),
    case(
        "llama-yarn",
        "llama",
        rope("yarn", **YARN_32),
        [NO_ROPE_SCALING, rope("yarn", **YARN_32, attention_factor=1.0)],
    ),
    case(
        "llama-yarn-mscale",
        "llama",
        rope("yarn", **YARN_32, truncate=False, mscale=1.4, mscale_all_dim=0.5),
        [
            NO_ROPE_SCALING,
            rope("yarn", **YARN_32, mscale=1.4, mscale_all_dim=0.5),
            rope("yarn", **YARN_32, truncate=False),
        ],
    ),
    case(
        "llama-yarn-attention-factor",
        "llama",
        rope("yarn", 500.0, **YARN_128, attention_factor=0.8, beta_fast=12, beta_slow=2),
        [
            rope("default", 500.0),
            rope("yarn", 500.0, **YARN_128, beta_fast=12, beta_slow=2),
            rope("yarn", 500.0, **YARN_128, attention_factor=0.8),
        ],
    ),
    case(
        "llama-longrope",
        "llama",
        rope(
            "longrope",
            factor=8.0,
            original_max_position_embeddings=32,
            short_factor=SHORT_FACTOR,
            long_factor=LONG_FACTOR,
        ),
        [NO_ROPE_SCALING],
        stateful=True,
        crossings=[20],
    ),
    case(
        "llama-old-spelling", "llama", rope("linear", 20000.0, factor=3.0), [rope("default", 20000.0)], post="old_type"
    ),
    case(
        "llama-old-rope-type",
        "llama",
        LLAMA3_ROPE,
        [rope("default", 5000.0)],
        post="old",
    ),
    case("llama-sharded", "llama", {}, shard="70KB"),
    case("llama-rope-absent", "llama", {}, [rope("default", 500000.0)], post="no_rope"),
    case("mistral-window", "mistral", {"sliding_window": 20, **rope("default", 8000.0)}, [{"sliding_window": None}]),
    case(
        "mistral-nowindow",
        "mistral",
        {"sliding_window": None, "head_dim": 12, "num_attention_heads": 6, "num_key_value_heads": 2},
        post="old",
    ),
]

QWEN_CASES = [
    case("qwen2", "qwen2", {"head_dim": None, "hidden_size": 54, "intermediate_size": 44, **rope("default", 9000.0)}),
    case(
        "qwen2-window",
        "qwen2",
        {
            "head_dim": None,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
        [{"sliding_window": 200}, {"layer_types": ["sliding_attention"] * 4}],
    ),
    case("qwen2-window-old", "qwen2", {}, copy_of="qwen2-window", post="old"),
    case("qwen3", "qwen3", {"tie_word_embeddings": True}),
    case(
        "qwen3-yarn",
        "qwen3",
        rope("yarn", 20000.0, factor=4.0, original_max_position_embeddings=64),
        [rope("default", 20000.0)],
        post="old",
    ),
]

GEMMA_CASES = [
    case(
        "gemma2",
        "gemma2",
        GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 3.0},
        [
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"sliding_window": 200},
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            {"query_pre_attn_scalar": 16},
        ],
    ),
    case(
        "gemma3",
        "gemma3",
        GEMMA3 | {"layer_types": GEMMA3_LAYERS, **gemma3_rope()},
        [{"sliding_window": 200}, {"query_pre_attn_scalar": 16}, {"rope_parameters": None}],
    ),
    case(
        "gemma3-linear",
        "gemma3",
        GEMMA3 | {"layer_types": GEMMA3_LAYERS, **gemma3_rope(rope_type="linear", factor=8.0)},
        [{"sliding_window": 200}, gemma3_rope()],
    ),
    case("gemma3-old-spelling", "gemma3", {}, copy_of="gemma3-linear", post="old"),
]

OTHER_CASES = [
    case("phi3-default", "phi3", PHI3 | rope("default", 6000.0, partial_rotary_factor=0.5), [rope("default", 6000.0)]),
    case(
        "phi3-longrope",
        "phi3",
        PHI3 | {"original_max_position_embeddings": 32, "rope_parameters": PHI3_LONGROPE},
        [
            rope("default", partial_rotary_factor=0.75),
            {"rope_parameters": PHI3_LONGROPE | {"attention_factor": 1.0}},
            {"rope_parameters": PHI3_LONGROPE | {"long_factor": [1.0, 1.2, 1.6]}},
        ],
        stateful=True,
        crossings=[20],
    ),
    case("phi3-longrope-old", "phi3", {}, copy_of="phi3-longrope", post="old_type", stateful=True, crossings=[20]),
    case("phi3-window", "phi3", PHI3 | {"sliding_window": 20}, [{"sliding_window": None}]),
    case("olmo2", "olmo2", {"head_dim": None, "hidden_size": 54, "intermediate_size": 44}),
    case("granite", "granite", GRANITE | {"tie_word_embeddings": True}, GRANITE_ABLATIONS),
    case("granite-bias", "granite", GRANITE | {"attention_bias": True, "mlp_bias": True}, GRANITE_ABLATIONS),
]

DENSE_CASES = LLAMA_CASES + QWEN_CASES + GEMMA_CASES + OTHER_CASES
