# SPDX-License-Identifier: Apache-2.0
"""A drafter's `config.json`, read with the checks that all kinds of drafters share.

Such files come from anywhere and are often edited by hand: each fault is told as a field, its limit and the way out,
before anything is made in the size that a field asks for.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metrale_jax.core.config import AttentionConfig, ModelConfig, RopeConfig
from metrale_jax.core.errors import CheckpointError, ConfigError, MetraleError, shown
from metrale_jax.models.family import attention_config, flat_rope, head_dim_of
from metrale_jax.models.hf_config import RawConfig

# Above every published head's width by far; one frequency for each two is made before a tensor's shape is compared.
MAX_HEAD_DIM = 1 << 14
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_LIST, _LENGTH, _NUMBER = "a list of finite numbers", "a number of tokens from 0 up", "a finite number"
_ROPE_FIELDS = {
    "inv_freq": _LIST,
    "attention_factor": _NUMBER,
    "long_inv_freq": _LIST,
    "switch_len": _LENGTH,
    "ntk_max_len": _LENGTH,
    "ntk_theta": _NUMBER,
    "ntk_factor": _NUMBER,
}


def read_values(path: Path, wanted: str) -> dict[str, Any]:
    """The JSON object in a file; `wanted` is what to give instead of a directory that lacks it. Raises
    `CheckpointError`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give {wanted}.") from None
    except (ValueError, RecursionError) as error:
        # A number of too many digits is a plain ValueError.
        raise CheckpointError(f"{path} is not JSON ({error}); give {wanted}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a JSON object; give {wanted}.")
    return values


def described_as(what: str, raw: RawConfig, describe: Callable[[], Any]) -> Any:
    """What `describe()` makes of the config. Raises `ConfigError` also where a field is of a type that nobody expects
    there."""
    try:
        return describe()
    except MetraleError:
        raise
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{raw.origin} does not describe {what}: a field is of another type or length than it must be ({error}); "
            "correct the config."
        ) from None


def number(raw: RawConfig, key: str) -> float:
    """A field that float32 holds."""
    value = raw.number(key)
    if abs(value) > MOST:
        raise _wrong(raw, key, value, "a number that float32 holds")
    return value


def number_from_0(raw: RawConfig, key: str) -> float:
    """A field that float32 holds, not below 0."""
    value = number(raw, key)
    if value < 0:
        raise _wrong(raw, key, value, "a number from 0 up")
    return value


def number_above_0(raw: RawConfig, key: str) -> float:
    """A field that is above 0 in float32 too."""
    value = number(raw, key)
    if value < LEAST:
        raise _wrong(raw, key, value, "a number above 0 that float32 holds")
    return value


def table(raw: RawConfig, key: str) -> Mapping[str, Any]:
    """A JSON object; empty where the field is absent or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(raw, key, value, "an object")
    return value or {}


def attention_of(raw: RawConfig, target: ModelConfig, **changes) -> AttentionConfig:
    """A drafter's attention: `rope` as we write it, or from the published fields; `changes` as of
    `attention_config`."""
    head_dim = head_dim_of(raw)
    if head_dim > MAX_HEAD_DIM:
        raise _wrong(raw, "head_dim", head_dim, f"a width up to {MAX_HEAD_DIM}")
    if raw.get("rope") is None:
        with np.errstate(all="ignore"):
            rope = flat_rope(raw)
        frequencies = (*rope.inv_freq, *rope.long_inv_freq, rope.attention_factor)
        if not np.isfinite(np.asarray(frequencies, np.float64)).all():
            raise ConfigError(
                f"the rope fields in {raw.origin} make frequencies that are not finite; correct rope_theta, "
                "rope_scaling or rope_parameters."
            )
    else:
        rope = _written_rope(raw)
        _check_lengths(rope, head_dim, raw, target)
    return attention_config(raw, rope, **changes)


def _written_rope(raw: RawConfig) -> RopeConfig:
    fields = table(raw, "rope")
    if "inv_freq" not in fields or not set(fields) <= set(_ROPE_FIELDS):
        raise ConfigError(
            f"rope in {raw.origin} has {', '.join(sorted(fields)) or 'no fields'}, expected inv_freq and otherwise "
            f"some of {', '.join(_ROPE_FIELDS)}; correct the config, or train the drafter again."
        )
    return RopeConfig(**{name: _rope_field(raw, name, value) for name, value in fields.items()})


def _rope_field(raw: RawConfig, name: str, value: Any) -> Any:
    expected = _ROPE_FIELDS[name]
    if expected == _LIST and isinstance(value, list) and all(map(_is_finite, value)):
        return tuple(map(float, value))
    if expected == _LENGTH and type(value) is int and 0 <= value < 1 << 31:
        return value
    if expected == _NUMBER and _is_finite(value):
        return float(value)
    raise _wrong(raw, f"rope.{name}", value, expected)


def _check_lengths(rope: RopeConfig, head_dim: int, raw: RawConfig, target: ModelConfig) -> None:
    # A head's rope is its target's, which may turn a part of each head, or turns the whole.
    mixers = [mixer for layer in target.layers for mixer in layer.mixers if isinstance(mixer, AttentionConfig)]
    alike = [mixer.rope for mixer in mixers if mixer.rope is not None and mixer.head_dim == head_dim]
    fitting = sorted({head_dim // 2, *(len(one.inv_freq) for one in alike)})
    count, long = len(rope.inv_freq), len(rope.long_inv_freq)
    if count not in fitting:
        raise ConfigError(
            f"rope.inv_freq of {count} numbers in {raw.origin} is not of {' or '.join(map(str, fitting))}, which "
            f"head_dim={head_dim} takes; correct the config, or train the drafter again."
        )
    if long not in (0, count) or (rope.switch_len and not long):
        raise ConfigError(
            f"rope.long_inv_freq of {long} numbers with switch_len={rope.switch_len} in {raw.origin} is not of "
            f"{count}, as inv_freq is; correct the config, or train the drafter again."
        )
    if rope.ntk_max_len and (rope.ntk_theta <= 0 or rope.ntk_factor <= 0 or count < 2):
        raise ConfigError(
            f"rope.ntk_theta={rope.ntk_theta} and ntk_factor={rope.ntk_factor} in {raw.origin} are not above 0 for 2 "
            "frequencies or more, as ntk_max_len needs them; correct the config, or train the drafter again."
        )


def _is_finite(value: Any) -> bool:
    # Comparing works for whole numbers that are too large to become floats, and is false for NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _wrong(raw: RawConfig, key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key}={shown(value)} in {raw.origin} is not {expected}; correct the config.")
