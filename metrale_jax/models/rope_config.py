# SPDX-License-Identifier: Apache-2.0
"""From a config's rope fields, in either spelling, to a `RopeConfig`. One function a rope type.

Formulas: linear (kaiokendev 2023), dynamic NTK (bloc97, emozilla 2023), YaRN (Peng et al. 2023, eq. 17 to 25), LongRoPE
(Ding et al. 2024), Llama 3.1's wavelength bands (Meta 2024).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from metrale_jax.core.config import RopeConfig
from metrale_jax.core.errors import ConfigError, Unsupported
from metrale_jax.models.hf_config import RawConfig


@dataclass(frozen=True)
class RopeFields:
    """One layer type's rope fields: `params` holds the type's own, the rest what they are relative to."""

    params: Mapping[str, Any]
    theta: float
    width: int
    max_len: int
    origin: str
    top_level: Mapping[str, Any]

    def number(self, key: str) -> float:
        """A number that the rope type cannot do without."""
        value = self.params.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"rope field {key!r} is {value!r} in {self.origin}; rope type "
                f"{rope_type(self.params)!r} needs a number: "
                "add it to rope_parameters (rope_scaling in older files)."
            )
        return float(value)

    def factors(self, key: str) -> np.ndarray:
        """A list of one factor for each frequency."""
        value = self.params.get(key)
        listed = value if isinstance(value, list | tuple) else []
        numbers = [x for x in listed if isinstance(x, int | float) and not isinstance(x, bool)]
        if len(numbers) != len(listed) or len(listed) != self.width // 2:
            raise ConfigError(
                f"rope field {key!r} holds {len(listed)} numbers in {self.origin}, expected {self.width // 2}, one for "
                "each frequency; correct the list."
            )
        return np.asarray(numbers, np.float32)

    def original_max_len(self) -> int:
        """The length before scaling: the top-level field wins, then rope's own, then the context itself."""
        top = self.top_level.get("original_max_position_embeddings")
        return int(top or self.params.get("original_max_position_embeddings") or self.max_len)

    def inv_freq(self) -> np.ndarray:
        """Unscaled inverse frequencies `[width / 2]`, float32."""
        exponents = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        return (1.0 / np.float64(self.theta) ** exponents.astype(np.float64)).astype(np.float32)


def rope_type(params: Mapping[str, Any]) -> str:
    """The type under its new or its old key; absent means default."""
    return params.get("rope_type") or params.get("type") or "default"


def _floats(array: np.ndarray) -> tuple[float, ...]:
    return tuple(float(x) for x in array.astype(np.float32))


def _default(fields: RopeFields) -> RopeConfig:
    return RopeConfig(_floats(fields.inv_freq()))


def _linear(fields: RopeFields) -> RopeConfig:
    return RopeConfig(_floats(fields.inv_freq() / np.float32(fields.number("factor"))))


def _dynamic(fields: RopeFields) -> RopeConfig:
    factor = fields.number("factor")
    return RopeConfig(_floats(fields.inv_freq()), ntk_max_len=fields.max_len, ntk_theta=fields.theta, ntk_factor=factor)


def _yarn(fields: RopeFields) -> RopeConfig:
    original = fields.original_max_len()
    has_factor = fields.params.get("factor") is not None
    factor = fields.number("factor") if has_factor else fields.max_len / original
    attention_factor = fields.params.get("attention_factor")
    if attention_factor is None:
        m, m_all = fields.params.get("mscale"), fields.params.get("mscale_all_dim")
        pair = m and m_all
        attention_factor = _mscale(factor, m) / _mscale(factor, m_all) if pair else _mscale(factor, 1.0)
    low = _yarn_dim(fields, fields.params.get("beta_fast") or 32, original)
    high = _yarn_dim(fields, fields.params.get("beta_slow") or 1, original)
    if fields.params.get("truncate", fields.top_level.get("rope_parameters", {}).get("truncate", True)):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, fields.width - 1)
    ramp = (np.arange(fields.width // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    interpolated = np.clip(ramp, 0, 1).astype(np.float32)
    plain = fields.inv_freq()
    return RopeConfig(_floats(plain / factor * interpolated + plain * (1 - interpolated)), float(attention_factor))


def _mscale(scale: float, m: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0


def _yarn_dim(fields: RopeFields, rotations: float, original: int) -> float:
    return fields.width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(fields.theta))


def _longrope(fields: RopeFields) -> RopeConfig:
    original = fields.original_max_len()
    factor = fields.params.get("factor") or fields.max_len / original
    attention_factor = fields.params.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    plain = fields.inv_freq()
    return RopeConfig(
        _floats(plain / fields.factors("short_factor")),
        float(attention_factor),
        long_inv_freq=_floats(plain / fields.factors("long_factor")),
        switch_len=original,
    )


def _llama3(fields: RopeFields) -> RopeConfig:
    factor, original = fields.number("factor"), fields.original_max_len()
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    plain = fields.inv_freq()
    wavelength = 2 * math.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return RopeConfig(_floats((1 - smooth) * plain / factor + smooth * plain))


def _factors(fields: RopeFields) -> RopeConfig:
    # GGUF stores llama3 scaling as one divisor for each frequency.
    return RopeConfig(_floats(fields.inv_freq() / fields.factors("factors")))


ROPE_TYPES: Mapping[str, Callable[[RopeFields], RopeConfig]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "yarn": _yarn,
        "longrope": _longrope,
        "llama3": _llama3,
        "frequency_factors": _factors,
    }
)


def parse_rope(
    raw: RawConfig, params: Mapping[str, Any], head_dim: int, default_theta: float, partial: bool = False
) -> RopeConfig:
    """The rope of one layer type, from its own `params`; theta and partial rotary fall back to the config's top level.

    Unless `partial`, the family turns whole heads, as its transformers model does whatever `partial_rotary_factor` says
    (only a GGUF's `rope_dimension_count` counts). Raises `Unsupported` for an unknown type and `ConfigError` for a
    missing or odd field.
    """
    kind = rope_type(params)
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope type {kind!r} in {raw.origin} is not supported; supported are {sorted(ROPE_TYPES)}.")
    theta = params.get("rope_theta", raw.get("rope_theta", default_theta))
    factor = params.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if factor != 1 and not partial:
        raise ConfigError(
            f"partial_rotary_factor={factor!r} in {raw.origin} is not supported: models of this family turn whole "
            "heads; 1 is."
        )
    counted = raw.get("rope_dimension_count") is not None
    width = raw.positive("rope_dimension_count") if counted else int(head_dim * factor)
    if not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError(f"rope_theta={theta!r} in {raw.origin} is not a number above 0; correct the config.")
    if width <= 0 or width % 2 or width > head_dim:
        raise ConfigError(
            f"rotary width {width} (head_dim={head_dim} x partial_rotary_factor={factor}) in {raw.origin} is not an "
            f"even number up to {head_dim}; correct partial_rotary_factor."
        )
    fields = RopeFields(params, float(theta), width, raw.positive("max_position_embeddings"), raw.origin, raw.values)
    return ROPE_TYPES[kind](fields)


def rope_params(raw: RawConfig) -> Mapping[str, Any]:
    """The flat rope fields under their old (`rope_scaling`) or new (`rope_parameters`) name; the old one wins."""
    return raw.table("rope_scaling") or raw.table("rope_parameters")
