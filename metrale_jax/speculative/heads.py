# SPDX-License-Identifier: Apache-2.0
"""Draft heads: one decoder layer that guesses the tokens after the next from what the target has computed.

Two kinds. `MtpConfig` is the multi-token predictor of DeepSeek-V3 (2024) and Qwen3-Next: it reads the target's final
hidden rows. `EagleConfig` is EAGLE-3 (Li et al. 2025): it reads three rows of the target's residual stream.

Both work on *entries*. The entry at position p is made of the feature of position p - 1 (zeros where p is 0) and the
embedding of token p; it has rotary position p, attends to the entries from 0 to p and guesses token p + 1. Features
are what the target computed (`target_features`), or for tokens that are guesses themselves the head's own `feedback`.

Only attention differs between a server, whose past is paged, and training, which has whole sequences: `entries` comes
before it, `finished` after it, and `run_head` is the three together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.config import AttentionConfig, LayerConfig, ModelConfig
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.linear import linear
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.registry import FEED_FORWARDS


@struct.dataclass
class HeadParams:
    """Weights of a head of either kind.

    `embed_norm [D]`, `hidden_norm [D]`; `fc` is a `Linear`, `[D, 2D]` of an MTP head and `[D, 3D]` of an EAGLE-3 head;
    `layer` is a `LayerParams` of one attention, whose `mixer_norm` is `()` and whose `qkv` is `2D` wide in an EAGLE-3
    head; `final_norm [D]`. `head [Vd, D]` is `()` where the target's serves; `token_ids` int32 `[Vd]` are the target's
    ids of the draft vocabulary, in rising order, or `()` where it is the target's.
    """

    embed_norm: Any
    hidden_norm: Any
    fc: Any
    layer: Any
    final_norm: Any
    head: Any = ()
    token_ids: Any = ()


@dataclass(frozen=True)
class MtpConfig:
    """Static facts of a multi-token predictor. `layer` has one attention and any feed-forward layer.

    `vocab_size` is the target's; `draft_vocab_size` 0 stands for no vocabulary and no head of its own. The scales and
    the softcap are the target's, as in `ModelConfig`.
    """

    hidden_dim: int
    layer: LayerConfig
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int = 0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    capture: tuple[int, ...] = ()


@dataclass(frozen=True)
class EagleConfig:
    """Static facts of an EAGLE-3 head: as `MtpConfig`, and `capture`, the three places of the target's residual stream
    that it reads. Place n is what leaves the first n layers; 0 is the embeddings. `norm_before_residual` says that
    attention's output is added to the feature after its norm, not before it."""

    hidden_dim: int
    layer: LayerConfig
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int = 0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    capture: tuple[int, ...] = ()
    norm_before_residual: bool = False


@struct.dataclass
class HeadRows:
    """What a head makes of its entries: `feedback [T, D]` stands in for the target's features when it drafts on,
    `output [T, D]` is what the vocabulary is scored by."""

    feedback: Any
    output: Any


def target_features(config, params: HeadParams, hidden: Float[Array, "T D"], captured: tuple) -> Float[Array, "T D"]:
    """Features of the target's rows: of `hidden`, its rows after the final norm, or of `captured`, the rows at
    `config.capture`, each `[T, D]`."""
    return HEADS[type(config)].features(params, hidden, captured)


def entries(
    config, params: HeadParams, features: Float[Array, "T D"], embeds: Float[Array, "T D"]
) -> tuple[Float[Array, "T A"], Float[Array, "T D"]]:
    """What attention reads of each entry, `A` wide (`attention_width`), and the residual that its output is added to.

    Row i has the embedding of its own token and the feature of the position before.
    """
    with jax.named_scope("entries"):
        return HEADS[type(config)].entries(config, params, features, embeds)


def finished(
    config, params: HeadParams, residual: Float[Array, "T D"], mixed: Float[Array, "T D"], place: Placement
) -> HeadRows:
    """The head's rows, from the residual and attention's output."""
    eps, layer = config.norm_eps, params.layer
    x = residual + _scaled(rms_norm(mixed, layer.mixer_post_norm, eps), config.residual_scale)
    if config.layer.mlp is not None:
        with jax.named_scope("mlp"):
            run = FEED_FORWARDS[type(config.layer.mlp)].run
            hidden = run(rms_norm(x, layer.mlp_norm, eps), layer.mlp, config.layer.mlp, place)
            x = x + _scaled(rms_norm(hidden, layer.mlp_post_norm, eps), config.residual_scale)
    with jax.named_scope("final_norm"):
        output = rms_norm(x, params.final_norm, eps)
    return HeadRows(HEADS[type(config)].feedback(x, output), output)


def run_head(config, params: HeadParams, features, embeds, attend: Callable, place: Placement) -> tuple[HeadRows, Any]:
    """The head's rows, and whatever else `attend(x [T, A], params of the attention, its config)` returns beside its
    output `[T, D]`."""
    x, residual = entries(config, params, features, embeds)
    (weights,), (attention,) = params.layer.mixers, config.layer.mixers
    with jax.named_scope("mixer"):
        mixed, rest = attend(x, weights, attention)
    return finished(config, params, residual, mixed, place), rest


def draft_logits(
    config, params: HeadParams, output: Float[Array, "T D"], target_head: Float[Array, "V D"]
) -> Float[Array, "T Vd"]:
    """Float32 logits over the draft vocabulary; `target_head` serves where the head has no rows of its own."""
    head = target_head if isinstance(params.head, tuple) else params.head
    with jax.named_scope("head"):
        return embedding.logits(output, head, config.logit_scale, config.logit_softcap)


def target_ids(params: HeadParams, ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The target's token ids of ids of the draft vocabulary."""
    return ids if isinstance(params.token_ids, tuple) else params.token_ids.at[ids].get(mode="clip")


def attention_width(config) -> int:
    """How wide the rows are that the head's attention reads: `A`."""
    return HEADS[type(config)].width_factor * config.hidden_dim


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """Where EAGLE-3 reads a target of so many layers: near its start, in its middle and near its end."""
    low, middle, high = (min(max(place, 0), num_layers) for place in (2, num_layers // 2, num_layers - 3))
    return tuple(sorted((low, middle, high)))


@dataclass(frozen=True)
class HeadKind:
    """A row of `HEADS`; `name` is what users write, the functions are what differs between kinds."""

    name: str
    features: Callable
    entries: Callable
    feedback: Callable
    width_factor: int
    fc_factor: int


def _mtp_features(params, hidden, captured):
    return hidden


def _mtp_entries(config, params, features, embeds):
    eps = config.norm_eps
    pair = [rms_norm(embeds, params.embed_norm, eps), rms_norm(features, params.hidden_norm, eps)]
    residual = linear(jnp.concatenate(pair, axis=-1), params.fc)
    return rms_norm(residual, params.layer.mixer_norm, eps), residual


def _eagle_features(params, hidden, captured):
    return linear(jnp.concatenate(captured, axis=-1), params.fc)


def _eagle_entries(config, params, features, embeds):
    eps = config.norm_eps
    normed = rms_norm(features, params.hidden_norm, eps)
    x = jnp.concatenate([rms_norm(embeds, params.embed_norm, eps), normed], axis=-1)
    return x, normed if config.norm_before_residual else features


def _scaled(x, scale: float):
    return x if scale == 1.0 else x * scale


HEADS: Mapping[type, HeadKind] = MappingProxyType(
    {
        MtpConfig: HeadKind("mtp", _mtp_features, _mtp_entries, lambda x, output: output, 1, 2),
        EagleConfig: HeadKind("eagle3", _eagle_features, _eagle_entries, lambda x, output: x, 2, 3),
    }
)
KINDS: Mapping[str, type] = MappingProxyType({kind.name: config for config, kind in HEADS.items()})


def head_config(kind: str, target: ModelConfig, layer: LayerConfig, draft_vocab_size: int, capture=()):
    """The config of a head called `kind` for a target; `layer` has one `AttentionConfig`."""
    assert len(layer.mixers) == 1 and isinstance(layer.mixers[0], AttentionConfig), f"{layer} is not one attention"
    return KINDS[kind](
        hidden_dim=target.hidden_dim,
        layer=layer,
        norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        embed_scale=target.embed_scale,
        residual_scale=1.0,
        logit_scale=target.logit_scale,
        logit_softcap=target.logit_softcap,
        capture=tuple(capture),
    )
