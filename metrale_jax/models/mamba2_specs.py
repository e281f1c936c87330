# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of Mamba-2 layers under their Hugging Face names, what their configs share, and folded multipliers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.specs import ParamSpec, Source, stacked_rows
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mamba2 import Mamba2Config, Mamba2Params
from metrale_jax.models.decoder_specs import linear_specs
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.sharding import axes

# What a state space has no end of; a limit all the same, so that tables of blocks have a size.
ENDLESS = 1 << 20


def minus_exp(array: np.ndarray) -> np.ndarray:
    """The rate `-exp(A_log)`, float32."""
    return -np.exp(array.astype(np.float32))


def taps_first(array: np.ndarray) -> np.ndarray:
    """`[C, 1, W]`, as a depthwise convolution is stored, as `[W, C]`."""
    return np.ascontiguousarray(array[:, 0].T)


@dataclass(frozen=True)
class Scaled:
    """A transform: the sources' rows one under the other, each of `runs` (rows, factor) times its factor.

    Factors of a layer's inputs, outputs or projections that are known beforehand cost nothing in its weights.
    """

    runs: tuple[tuple[int, float], ...]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The scaled rows, float32."""
        rows = stacked_rows(*arrays)
        counts, factors = zip(*self.runs, strict=True)
        factor = np.repeat(np.asarray(factors, np.float32), counts)
        return rows.astype(np.float32) * factor.reshape(-1, *[1] * (rows.ndim - 1))


def scaled(linear: Linear, runs: tuple[tuple[int, float], ...], inputs: float = 1.0) -> Linear:
    """The specs of `linear` with rows times the factors of `runs`, and the weight's times that of its inputs."""
    by_input = tuple((rows, factor * inputs) for rows, factor in runs)
    bias = linear.bias if isinstance(linear.bias, tuple) else replace(linear.bias, transform=Scaled(runs))
    return Linear(replace(linear.weight, transform=Scaled(by_input)), bias)


@dataclass(frozen=True)
class Mamba2Names:
    """What a checkpoint calls a Mamba-2 layer, and which of its parts there are."""

    module: str = "mamba."
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    norm: bool = True


def mamba2_specs(width: int, layer: Mamba2Config, names: Mamba2Names, prefix: str) -> Mamba2Params:
    """Specs of a Mamba-2 layer's weights on inputs of `width`."""
    start = prefix + names.module
    rows = layer.inner_dim + layer.conv_dim + layer.num_heads
    taps = Source(f"{start}conv1d.weight", (layer.conv_dim, 1, layer.conv_width))

    def vector(name: str, size: int, **facts) -> ParamSpec:
        return ParamSpec((size,), (axes.STATE,), (Source(start + name, (size,)),), **facts)

    def of_heads(name: str, **facts) -> ParamSpec:
        return vector(name, layer.num_heads, keep_float32=True, **facts)

    return Mamba2Params(
        in_proj=linear_specs(start, "in_proj", rows, width, names.in_bias, (axes.STATE, axes.HIDDEN)),
        conv_weight=ParamSpec((layer.conv_width, layer.conv_dim), (axes.STATE, axes.STATE), (taps,), taps_first),
        conv_bias=vector("conv1d.bias", layer.conv_dim) if names.conv_bias else (),
        step_bias=of_heads("dt_bias"),
        a=of_heads("A_log", transform=minus_exp),
        d=of_heads("D"),
        norm=vector("norm.weight", layer.inner_dim, keep_float32=True) if names.norm else (),
        out_proj=linear_specs(start, "out_proj", width, layer.inner_dim, names.out_bias, (axes.HIDDEN, axes.STATE)),
    )


def mamba2_config(raw: RawConfig, keys: Mapping[str, str], inner_dim: int, **changes) -> Mamba2Config:
    """A layer's config from the fields that `keys` names; `changes` are what the family knows otherwise.

    Raises `ConfigError` where the heads do not make up `inner_dim`, or do not divide into groups.
    """
    facts = {name: raw.positive(key) for name, key in keys.items() if name not in changes} | changes
    config = Mamba2Config(**facts)
    if config.inner_dim != inner_dim:
        raise ConfigError(
            f"{config.num_heads} Mamba heads of {config.head_dim} in {raw.origin} do not make up the {inner_dim} "
            "channels of the layer; correct the config."
        )
    if config.num_heads % config.num_groups:
        raise ConfigError(
            f"{keys['num_groups']}={config.num_groups} in {raw.origin} does not divide the {config.num_heads} Mamba "
            "heads; correct the config."
        )
    return config


def step_limits(raw: RawConfig) -> dict[str, float]:
    """`time_step_limit` as `min_step` and `max_step`; infinity comes in several spellings."""
    listed = raw.get("time_step_limit", [0.0, float("inf")])
    numbers = [_number(value) for value in listed] if isinstance(listed, list | tuple) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"time_step_limit={listed!r} in {raw.origin} is not a lower and an upper bound from 0 on; correct the "
            "config."
        )
    return {"min_step": numbers[0], "max_step": numbers[1]}


def _number(value) -> float:
    value = value.get("__float__") if isinstance(value, Mapping) else value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return float("nan")
    try:
        return float(value)
    except ValueError:
        return float("nan")


def silu_only(raw: RawConfig, key: str) -> None:
    """Nothing; raises `ConfigError` where the convolution's activation is another."""
    raw.choice(key, ("silu", "swish"))
