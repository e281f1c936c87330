# SPDX-License-Identifier: Apache-2.0
"""Fields of configs that change what a model computes: each is honoured by its family, or has the one value at which it
changes nothing."""

from collections.abc import Mapping
from types import MappingProxyType

from metrale_jax.core.errors import ConfigError
from metrale_jax.models.hf_config import RawConfig

# The values at which a field changes nothing, for families that do not know it. Null is always one of them.
NEUTRAL: Mapping[str, tuple] = MappingProxyType(
    {
        **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "use_bias", "use_qkv_bias"), (False,)),
        **dict.fromkeys(("use_qk_norm", "qk_layernorm", "use_qk_layernorm"), (False,)),
        **dict.fromkeys(
            ("use_sliding_window", "use_bidirectional_attention", "alibi", "add_cross_attention"), (False,)
        ),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
        **dict.fromkeys(("partial_rotary_factor", "routed_scaling_factor", "moe_layer_freq"), (1,)),
        **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "clip_qkv", "q_lora_rank"), ()),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "moe_latent_size"), ()),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 1)),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_intermediate_size"), (0,)),
        **dict.fromkeys(("scoring_func", "moe_router_activation_func"), ("softmax",)),
    }
)
# What a checkpoint is loaded in, as configs spell it.
DTYPES = ("float32", "bfloat16", "float16", "float64")


def refuse_what_is_not_honoured(raw: RawConfig, only: Mapping[str, tuple], family: str, families: set[str]) -> None:
    """Nothing; raises `ConfigError` for a field that says something else than the model that its family has read.

    `only` has the values of fields at which the family is what it reads, whether it reads them or not; fields that it
    has neither read nor a default for must be `NEUTRAL`. `families` are the names of all, none of which but its own may
    be the `model_type`.
    """
    for key, allowed in {**NEUTRAL, **only}.items():
        if key in only or key not in raw.read | raw.defaults.keys():
            _check(raw, key, allowed, family)
    named = raw.get("model_type")
    if isinstance(named, str) and named.removesuffix("_text") in families - {family}:
        raise ConfigError(
            f"model_type={named!r} in {raw.origin} contradicts architectures={raw.get('architectures')!r}, which is "
            f"a {family} model; correct either."
        )


def dtype_of(raw: RawConfig) -> str:
    """The dtype of a checkpoint's weights under its new or its old name."""
    key = "dtype" if raw.get("dtype") is not None else "torch_dtype"
    value = raw.get(key, "float32")
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise ConfigError(f"{key}={value!r} in {raw.origin} is not one of {DTYPES}; correct the config.")
    return name


def _check(raw: RawConfig, key: str, allowed: tuple, family: str) -> None:
    value = raw.get(key)
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        return
    way_out = f"; of {family} models {' or '.join(map(repr, allowed)) or 'null'} is"
    raise ConfigError(f"{key}={value!r} in {raw.origin} is not supported{way_out}.")
