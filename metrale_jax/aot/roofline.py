# SPDX-License-Identifier: Apache-2.0
"""The least time that a step can take on a chip, by what it has to compute, read and send (Williams et al. 2009).

Counted are the matrix products, the weights and the keys and values that a step reads, and the sums over devices.
Activations, which are small beside them, and the latency of launches and links are not: a real step takes longer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from metrale_jax.aot.budget import device_bytes
from metrale_jax.aot.chips import Chip
from metrale_jax.layers.registry import FEED_FORWARDS
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.sharding.rules import tensor_size
from metrale_jax.state.registry import BY_BLOCK, BY_SLOT


@dataclass(frozen=True)
class Work:
    """What one device does in a step of `num_tokens` tokens."""

    num_tokens: int
    flops: float
    weight_bytes: float
    kv_bytes: float
    link_bytes: float

    def seconds_by(self, chip: Chip) -> Mapping[str, float]:
        """Seconds that each limit alone would ask for."""
        return {
            "weights bandwidth": self.weight_bytes / chip.bandwidth,
            "KV bandwidth": self.kv_bytes / chip.bandwidth,
            "compute": self.flops / chip.flops,
            "interconnect": self.link_bytes / chip.link_bandwidth if self.link_bytes else 0.0,
        }

    def seconds(self, chip: Chip) -> float:
        """The least time: computing goes on beside reading, sending follows both."""
        by = self.seconds_by(chip)
        return max(by["compute"], by["weights bandwidth"] + by["KV bandwidth"]) + by["interconnect"]

    def limit(self, chip: Chip) -> str:
        """The limit that asks for most."""
        by = self.seconds_by(chip)
        return max(by, key=lambda name: by[name])


def decode_work(model: Model, params: DecoderParams, num_sequences: int, context: int) -> Work:
    """A token more for each of so many sequences of `context` tokens."""
    return _work(model, params, num_sequences, num_sequences, [context] * num_sequences, num_sequences)


def prefill_work(model: Model, params: DecoderParams, num_tokens: int, past: int) -> Work:
    """So many prompt tokens of one sequence after `past` others, and a token drawn."""
    seen = [past + index + 1 for index in range(num_tokens)]
    return _work(model, params, num_tokens, 1, seen, 1)


def _work(model: Model, params: DecoderParams, tokens: int, rows: int, seen: list[int], sequences: int) -> Work:
    """`seen[i]` positions are looked at by token i, and `rows` tokens want logits."""
    size, config, layout = tensor_size(model.mesh), model.config, model.layout
    tied = isinstance(params.head, tuple)
    head = params.embed if tied else params.head
    width = jnp.dtype(params.embed.dtype).itemsize
    used, weights = _weights_used(model, params, tokens)
    products = 2 * tokens * used + 2 * rows * _elements([head])
    attended, read = 0, 0
    longest = max(seen) if sequences == 1 else None
    for layer, places in zip(config.layers, layout.placement, strict=True):
        for mixer, (group, _) in zip(layer.mixers, places, strict=True):
            if group >= len(layout.groups):
                spec = layout.slot_groups[group - len(layout.groups)]
                # Read once and written once for each sequence.
                read += 2 * sequences * BY_SLOT[type(spec)].bytes_per_slot(spec, 1) / size
                continue
            spec = layout.groups[group]
            looked = [min(count, mixer.window) if mixer.window else count for count in seen]
            attended += 4 * mixer.num_heads * mixer.head_dim * sum(looked) // size
            # A chunk reads its past once, and what a window hides from all of it not at all.
            span = sum(looked) if longest is None else min(longest, (mixer.window or longest) + tokens - 1)
            block = BY_BLOCK[type(spec)].bytes_per_block(spec, 1, layout.block_size, layout.platform, size)
            read += span * block / layout.block_size / size
    sums = 2 * len(config.layers) + (_elements([params.embed]) < prod(params.embed.shape))
    ring = (size - 1) / size
    link = ring * (2 * sums * tokens * config.hidden_dim * width + rows * config.vocab_size * 4)
    weights += device_bytes(head)
    return Work(
        num_tokens=tokens,
        flops=products + attended,
        weight_bytes=weights + (0 if tied else tokens * config.hidden_dim * width),
        kv_bytes=read,
        link_bytes=link,
    )


def _weights_used(model: Model, params: DecoderParams, tokens: int) -> tuple[float, float]:
    """The elements of matrices that each token is multiplied with, and the bytes of weights that so many tokens read.

    Of weights that tokens choose shares of, a step reads as many shares as its tokens can choose at most.
    """
    used, read = 0.0, 0.0
    for layer, weights in zip(model.config.layers, params.layers, strict=True):
        leaves = jax.tree.leaves(weights)
        used += _elements([leaf for leaf in leaves if len(leaf.shape) == 2])
        read += sum(map(device_bytes, leaves))
        kind = FEED_FORWARDS.get(type(layer.mlp))
        if kind is not None and kind.chosen is not None:
            linears, share = kind.chosen(weights.mlp, layer.mlp)
            biases = jax.tree.leaves([linear.bias for linear in linears])
            matrices = [linear.weight for linear in linears]
            used += share * _elements(matrices) - _elements(biases)
            read -= max(0.0, 1 - tokens * share) * sum(map(device_bytes, [*matrices, *biases]))
    return used, read


def _elements(leaves) -> int:
    """Elements that one device holds."""
    return sum(device_bytes(leaf) // jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
