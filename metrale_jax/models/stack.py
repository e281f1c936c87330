# SPDX-License-Identifier: Apache-2.0
"""Blocks of a decoder, one layer each, and stacks of them over the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.parallel import AXIS
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.registry import FEED_FORWARDS, MIXERS
from metrale_jax.layers.rope import rope_tables
from metrale_jax.models.outline import first_index, outlined
from metrale_jax.state.pool import Pool

if TYPE_CHECKING:
    from metrale_jax.models.decoder import Model, Sharing


@struct.dataclass
class LayerParams:
    """One block: params of each of its `mixers`, of its `mlp` (`()` for none), and up to four norm weights `[D]`."""

    mixers: tuple
    mlp: Any = ()
    mixer_norm: Any = ()
    mixer_post_norm: Any = ()
    mlp_norm: Any = ()
    mlp_post_norm: Any = ()


@dataclass(frozen=True)
class Stack:
    """Layers to be run one after the other: their configs, their numbers in the pool's layout, and what scales them."""

    layers: tuple[LayerConfig, ...]
    numbers: tuple[int, ...]
    norm_eps: float
    residual_scale: float = 1.0


def run_stack(
    model: "Model",
    stack: Stack,
    weights: Sequence[LayerParams],
    x: Float[Array, "T D"],
    pool: Pool,
    batch: TokenBatch,
    between: Callable = lambda number, x: x,
) -> tuple[Float[Array, "T D"], list]:
    """Rows after the layers of `stack`, and the pool's groups with their states brought up to date.

    `between(number, x)` gives the rows to go on with after so many layers. Where layers keep states in slots, the batch
    has to be located.
    """
    ropes = dict.fromkeys(getattr(mixer, "rope", None) for layer in stack.layers for mixer in layer.mixers)
    tables = {rope: rope_tables(rope, batch.positions, batch.rope_lens) for rope in ropes if rope is not None}
    groups = [*pool.groups, *pool.slot_groups]
    first = first_index(model.platform, batch.positions)
    x = between(0, x)
    each = zip(stack.layers, stack.numbers, weights, strict=True)
    for done, (layer, number, params) in enumerate(each, start=1):
        placed = model.layout.placement[number]
        shared = _axes(model.sharing, number)
        places = tuple(
            Placement(group, stack.norm_eps, model.platform, model.attention, *shared)
            for group in [group for group, _ in placed] or [0]
        )
        block = Block(layer, places, stack.residual_scale)
        turned = tuple(tables.get(getattr(mixer, "rope", None), ()) for mixer in layer.mixers)
        storages = tuple((groups[group], first + index) for group, index in placed)
        x, storages = outlined(block, model.platform)(x, params, turned, batch, storages)
        for (group, _), storage in zip(placed, storages, strict=True):
            groups[group] = storage
        x = between(done, x)
    return x, groups


def _axes(sharing: "Sharing | None", layer: int) -> tuple[str, str]:
    """The axis that shares a layer's heads, and the same if one norm is over all of them."""
    if sharing is None:
        return "", ""
    (weights,) = sharing.params.layers[layer].mixers
    return AXIS, AXIS if weights.q_norm == PartitionSpec(AXIS) else ""


@dataclass(frozen=True)
class Block:
    """One decoder layer as a function of its static facts; equal blocks are one function."""

    layer: LayerConfig
    places: tuple[Placement, ...]
    residual: float

    def __call__(self, x, weights: LayerParams, ropes: tuple, batch: TokenBatch, storages: tuple):
        """The layer's output rows `[T, D]`, and its groups' storages, brought up to date.

        `storages` has for each mixer its group's storage and the layer's index there. `ropes` are each mixer's rotary
        tables.
        """
        eps, layer = self.places[0].norm_eps, self.layer
        after = []
        if layer.mixers:
            with jax.named_scope("mixer"):
                hidden = rms_norm(x, weights.mixer_norm, eps)
                outputs = []
                each = zip(layer.mixers, weights.mixers, ropes, storages, self.places, strict=True)
                for config, params, tables, (storage, index), place in each:
                    run = MIXERS[type(config)].run
                    out, storage = run(hidden, params, config, tables, batch, storage, index, place)
                    outputs.append(out)
                    after.append(storage)
                x = x + _scaled(rms_norm(sum(outputs[1:], outputs[0]), weights.mixer_post_norm, eps), self.residual)
        if layer.mlp is not None:
            with jax.named_scope("mlp"):
                run = FEED_FORWARDS[type(layer.mlp)].run
                hidden = run(rms_norm(x, weights.mlp_norm, eps), weights.mlp, layer.mlp, self.places[0])
                x = x + _scaled(rms_norm(hidden, weights.mlp_post_norm, eps), self.residual)
        return x, tuple(after)


def _scaled(x, scale: float):
    return x if scale == 1.0 else x * scale
