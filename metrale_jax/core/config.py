# SPDX-License-Identifier: Apache-2.0
"""A model's description: frozen, hashable, and owned by us, whatever spelling the checkpoint used.

Everything here is static under `jit`. A family file builds a `ModelConfig` from a checkpoint's config and nothing is
written back into it later.
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer: inverse frequencies for the first `2 * len(inv_freq)` widths of a head.

    `attention_factor` multiplies cos and sin. If `switch_len` is positive, a sequence whose length is above it uses
    `long_inv_freq` for all its tokens (LongRoPE). If `ntk_max_len` is positive the frequencies follow the length
    instead (dynamic NTK: base `ntk_theta`, factor `ntk_factor`).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    long_inv_freq: tuple[float, ...] = ()
    switch_len: int = 0
    ntk_max_len: int = 0
    ntk_theta: float = 0.0
    ntk_factor: float = 1.0


@dataclass(frozen=True)
class AttentionConfig:
    """Static facts of one attention layer. `window` 0 means all of the past; `softcap` 0 means none.

    `rope` is None where queries and keys carry no position. A `gated` layer multiplies each head's output by the
    sigmoid of a projection of its input, in the rows of `qkv` after the values'.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    window: int = 0
    softcap: float = 0.0
    gated: bool = False


@dataclass(frozen=True)
class MlpConfig:
    """Static facts of one feed-forward layer; `activation` is in `pallas_kernels.activations`. One that is not `gated`
    has no gate: the activation is that of the up projection."""

    hidden_dim: int
    activation: str
    gated: bool = True


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer: `mixers` that read the sequence's past, side by side on the same input, their outputs summed,
    and a feed-forward layer.

    Each is the frozen config of a kind in `layers.registry`, which finds the kind by the config's type. Either may be
    missing: `()` and None.
    """

    mixers: tuple[Hashable, ...]
    mlp: Hashable | None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: what the shared forward needs to know beyond its weights.

    `embed_scale`, `residual_scale` multiply the embeddings and each block's output, `logit_scale` the logits before
    `logit_softcap` (0 is none). `max_context_tokens` bounds prompt plus answer. `eos_token_ids` end an answer. A
    sequence that grows past `recompute_len` (0 is never) has its whole past recomputed, under the rotary frequencies
    of its new length.
    """

    family: str
    vocab_size: int
    hidden_dim: int
    layers: tuple[LayerConfig, ...]
    max_context_tokens: int
    norm_eps: float
    tie_embeddings: bool
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int = -1
    dtype: str = "float32"
    recompute_len: int = 0

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of the layers."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        found = dict.fromkeys(getattr(mixer, "rope", None) for mixer in mixers)
        return tuple(rope for rope in found if rope is not None)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The distinct attention layers, in order of first appearance."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, AttentionConfig)))


def rope_regime(config: ModelConfig, length: int) -> tuple[int, ...]:
    """What a prompt of `length` tokens makes of its rotary frequencies: equal tokens have equal keys only under one.

    Empty where no layer looks at the length; dynamic NTK has a regime for each length above its limit.
    """
    regime = []
    for rope in config.ropes:
        if rope.ntk_max_len:
            regime.append(length if length > rope.ntk_max_len else 0)
        elif rope.switch_len:
            regime.append(int(length > rope.switch_len))
    return tuple(regime)
