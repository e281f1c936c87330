# SPDX-License-Identifier: Apache-2.0
"""`ParamSpec`s of layers of the gated delta rule under the names that Hugging Face checkpoints use."""

from dataclasses import dataclass, replace

import numpy as np

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.specs import ParamSpec, Source, Transform, identity, stacked_rows
from metrale_jax.layers.delta_rule import DeltaHeads
from metrale_jax.layers.gated_delta import GatedDeltaConfig, GatedDeltaParams
from metrale_jax.layers.linear import Linear
from metrale_jax.models.decoder_specs import linear_specs
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.sharding import axes

# The convolution before the rule has no other activation; transformers gives it the feed-forward layers'.
ONLY = {"hidden_act": ("silu", "swish"), "sliding_window": (), "use_sliding_window": (False,)}
KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class ByKeyHead:
    """A transform: rows that the file packs by key head, in projections of one width a head, as whole projections.

    `packs` says of each source which of the `widths`, rows a key head, it holds, in the file's order; the result has
    them in the order of `widths`.
    """

    key_heads: int
    packs: tuple[tuple[tuple[int, int], ...], ...]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        """The projections one under the other."""
        found = {}
        for array, pack in zip(arrays, self.packs, strict=True):
            ends = np.cumsum([rows for _, rows in pack])[:-1]
            parts = np.split(array.reshape(self.key_heads, -1, array.shape[1]), ends, axis=1)
            found |= {place: part.reshape(-1, array.shape[1]) for (place, _), part in zip(pack, parts, strict=True)}
        return np.concatenate([found[place] for place in sorted(found)])


@dataclass(frozen=True)
class DeltaNames:
    """What a checkpoint calls the parts of a Gated DeltaNet layer, under the prefix of a layer.

    `inputs` are the projections of the layer's input with their rows, which `order` puts in the order of
    `GatedDeltaParams.inputs`; `taps` the convolution's tensors.
    """

    inputs: tuple[tuple[str, int], ...]
    order: Transform = stacked_rows
    taps: tuple[str, ...] = ("linear_attn.conv1d",)
    module: str = "linear_attn"
    norm: str = "norm"
    out: str = "out_proj"


def gated_delta_specs(width: int, layer: GatedDeltaConfig, names: DeltaNames, prefix: str) -> GatedDeltaParams:
    """Specs of a Gated DeltaNet layer's weights on inputs of `width`."""
    heads, module = layer.heads, f"{prefix}{names.module}."
    columns = heads.heads * heads.value_dim
    rows = sum(count for _, count in names.inputs)
    assert rows == heads.channels + columns + 2 * heads.heads, f"{names.inputs} have {rows} rows in all"
    return GatedDeltaParams(
        inputs=Linear(rows_spec(prefix, names.inputs, width, names.order)),
        taps=taps_spec(prefix, names.taps, heads),
        rate=numbers_spec(f"{module}A_log", (heads.heads,)),
        rate_bias=numbers_spec(f"{module}dt_bias", (heads.heads,)),
        norm=numbers_spec(f"{module}{names.norm}.weight", (heads.value_dim,)),
        out=linear_specs(module, names.out, width, columns, False, (axes.HIDDEN, axes.STATE)),
    )


def rows_spec(prefix: str, modules: tuple[tuple[str, int], ...], width: int, order: Transform) -> ParamSpec:
    """One weight of the rows of several projections of `width` inputs."""
    sources = tuple(Source(f"{prefix}{module}.weight", (rows, width)) for module, rows in modules)
    return ParamSpec((sum(rows for _, rows in modules), width), (axes.STATE, axes.HIDDEN), sources, order)


def numbers_spec(name: str, shape: tuple[int, ...], transform: Transform = identity) -> ParamSpec:
    """A few float32 numbers `[n]`, of whatever shape in the file."""
    return ParamSpec((int(np.prod(shape)),), (axes.STATE,), (Source(name, shape),), transform, keep_float32=True)


def flattened(array: np.ndarray) -> np.ndarray:
    """The numbers without their axes."""
    return array.reshape(-1)


def taps_spec(prefix: str, modules: tuple[str, ...], heads: DeltaHeads) -> ParamSpec:
    """Taps `[W, C]` of one depthwise convolution, or of one each for queries, keys and values."""
    keys = heads.key_heads * heads.key_dim
    counts = (heads.channels,) if len(modules) == 1 else (keys, keys, heads.heads * heads.value_dim)
    sources = tuple(
        Source(f"{prefix}{module}.weight", (count, 1, heads.conv_width))
        for module, count in zip(modules, counts, strict=True)
    )
    return ParamSpec((heads.conv_width, heads.channels), (axes.STATE, axes.STATE), sources, taps_first)


def taps_first(*arrays: np.ndarray) -> np.ndarray:
    """Channels `[C, 1, W]` one after the other, as `[W, C]`."""
    return np.ascontiguousarray(stacked_rows(*arrays)[:, 0].T)


def delta_heads(raw: RawConfig) -> DeltaHeads:
    """The heads of a config that spells them as qwen3_next does."""
    heads = DeltaHeads(
        key_heads=raw.positive("linear_num_key_heads"),
        heads=raw.positive("linear_num_value_heads"),
        key_dim=raw.positive("linear_key_head_dim"),
        value_dim=raw.positive("linear_value_head_dim"),
        conv_width=raw.positive("linear_conv_kernel_dim"),
    )
    if heads.heads % heads.key_heads:
        raise ConfigError(
            f"linear_num_value_heads={heads.heads} in {raw.origin} is not a multiple of linear_num_key_heads="
            f"{heads.key_heads}; correct the config."
        )
    return heads


def kinds(raw: RawConfig, otherwise: list[str]) -> list[str]:
    """Each layer's "linear_attention" or "full_attention", from the file or as the family lays them out."""
    found = raw.get("layer_types") or otherwise
    if len(found) != raw.positive("num_hidden_layers") or not set(found) <= set(KINDS):
        raise ConfigError(
            f"layer_types={found!r} in {raw.origin} must name one of {KINDS} for each of the "
            f"{raw.positive('num_hidden_layers')} layers; correct the config."
        )
    return list(found)


def every_nth(raw: RawConfig, interval: int) -> list[str]:
    """A full attention in every `interval`th layer."""
    return [KINDS[(index + 1) % interval == 0] for index in range(raw.positive("num_hidden_layers"))]


def gated_queries(spec: ParamSpec, num_heads: int, head_dim: int) -> ParamSpec:
    """The spec of `qkv` whose first source has for each head the query's rows, then its gate's. The gates go last."""
    first, *others = spec.sources
    doubled = Source(first.name, (2 * first.shape[0], *first.shape[1:]))
    rows = num_heads * head_dim
    parts = (*spec.parts, spec.parts[0])
    shape = (spec.shape[0] + rows, *spec.shape[1:])
    order = GatesLast(num_heads, head_dim)
    return replace(spec, shape=shape, sources=(doubled, *others), transform=order, parts=parts)


@dataclass(frozen=True)
class GatesLast:
    """A transform: queries and gates, which the file has head by head in one array, around keys and values."""

    num_heads: int
    head_dim: int

    def __call__(self, queries: np.ndarray, *others: np.ndarray) -> np.ndarray:
        """Rows of queries, of `others` and of gates."""
        both = queries.reshape(self.num_heads, 2, self.head_dim, *queries.shape[1:])
        split = (both[:, which].reshape(-1, *queries.shape[1:]) for which in (0, 1))
        query, gate = split
        return stacked_rows(query, *others, gate)
