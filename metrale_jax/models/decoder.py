# SPDX-License-Identifier: Apache-2.0
"""The decoder that families share: parameters, state specs and one forward pass.

A block is `x + r * post(mixers(pre(x)))`, then the same with the feed-forward layer; either may be missing. A family
chooses which of the four norms exist by giving them weights; an absent one is `()`. Layers are unrolled.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import LayerConfig, ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.parallel import AXIS, WHOLE, gathered, over_devices
from metrale_jax.layers.registry import MIXERS
from metrale_jax.models.edit import AbstractEdit
from metrale_jax.models.proposer import AbstractProposer
from metrale_jax.models.stack import Stack, run_stack
from metrale_jax.sharding.rules import tensor_size
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import Pool, PoolLayout, make_layout, pool_specs
from metrale_jax.state.positions import advanced, located, misplaced

Edit = Callable[[int, Any, TokenBatch], Any]


def unchanged(number: int, x: Float[Array, "T D"], batch: TokenBatch) -> Float[Array, "T D"]:
    """`x`: the edit that makes none."""
    return x


@struct.dataclass
class DecoderParams:
    """`embed [V, D]`, `layers`, `final_norm [D]` and `head [V, D]`, which is `()` where the embedding serves.

    `drafter` are the weights of the model's proposer, `edits` the arrays of its edit, `()` where it has none.
    """

    embed: Any
    layers: tuple
    final_norm: Any
    head: Any = ()
    drafter: Any = ()
    edits: Any = ()


@dataclass(frozen=True)
class Sharing:
    """How several devices share a model: their mesh, and the `PartitionSpec` of each of its `params`."""

    mesh: Mesh
    params: DecoderParams


@dataclass(frozen=True)
class Model:
    """The static half of a model: config, pool layout, the platform that its steps are lowered for, which
    implementation of paged attention they take there, how devices share it (None for one device: see
    `models.tensor_parallel`), and what drafts tokens for it, at most `num_drafts` at a time, if anything does;
    `acceptance` is the rule by which drafts stand (see `sampling.accept`). `edit` is what it does to its rows between
    layers, None for nothing."""

    config: ModelConfig
    layout: PoolLayout
    platform: str
    attention: str = "auto"
    sharing: Sharing | None = None
    proposer: AbstractProposer | None = None
    num_drafts: int = 0
    acceptance: str = "exact"
    edit: AbstractEdit | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share the model, None for one alone."""
        return None if self.sharing is None else self.sharing.mesh


def layer_states(config: ModelConfig, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
    """The states that each layer keeps, one for each of its mixers."""
    return tuple(tuple(MIXERS[type(m)].state(m, formats) for m in layer.mixers) for layer in config.layers)


def make_model(
    config: ModelConfig,
    platform: str,
    block_size: int,
    formats: StateFormats,
    attention: str = "auto",
    sharing: Sharing | None = None,
    proposer: AbstractProposer | None = None,
    num_drafts: int = 0,
) -> Model:
    """The model's static half for one platform and block size. What layers of the `proposer` keep of a sequence lies in
    the model's pool, after its own layers; it drafts at most `num_drafts` tokens at a time."""
    num_shards = 1 if sharing is None else tensor_size(sharing.mesh)
    specs, carried = layer_states(config, formats), ()
    if proposer is not None:
        specs = *specs, *proposer.layer_states(formats)
        carried = proposer.carried(config, num_drafts)
    layout = make_layout(specs, block_size, platform, num_shards, carried)
    return Model(config, layout, platform, attention, sharing, proposer, num_drafts)


def forward(model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch) -> tuple[Float[Array, "T D"], Pool]:
    """Final hidden rows of every token of `batch`, and the pool with their keys and values in it."""
    hidden, pool, _ = forward_probed(model, params, pool, batch)
    return hidden, pool


def forward_probed(
    model: Model,
    params: DecoderParams,
    pool: Pool,
    batch: TokenBatch,
    captures: tuple[int, ...] = (),
    edit: Edit = unchanged,
) -> tuple[Float[Array, "T D"], Pool, tuple[Float[Array, "T D"], ...]]:
    """What `forward` gives, and the residual stream's rows after so many layers as each of `captures` says.

    0 are the embeddings. `edit(number, x, batch)` gives the rows that go on after `number` layers in place of `x [T,
    D]`, after the model's own edit: it is called while the program is traced, so that what it leaves as it is costs
    nothing.
    """
    wrong = [number for number in captures if not 0 <= number <= len(model.config.layers)]
    if wrong:
        raise ConfigError(f"captures={wrong} are no numbers of layers from 0 to {len(model.config.layers)}; name some.")
    if model.sharing is None:
        return _forward(model, captures, edit, params, pool, batch)
    pools = pool_specs(pool, model.mesh)
    local = partial(_forward, _on_one_device(model), captures, edit)
    results = WHOLE, pools, (WHOLE,) * len(captures)
    inputs = model.sharing.params.replace(edits=WHOLE), pools, WHOLE
    return over_devices(local, model.mesh, inputs, results)(params, pool, batch)


def _forward(model: Model, captures: tuple[int, ...], edit: Edit, params: DecoderParams, pool: Pool, batch: TokenBatch):
    config = model.config
    x = embedded(model, params, batch.tokens)
    if pool.slot_groups:
        batch = located(batch, pool.positions, model.layout.num_pending)
    kept = {}

    def between(number, x):
        if model.edit is not None and number in model.edit.layers:
            x = model.edit.apply(number, x, batch, params.edits)
        kept[number] = x = edit(number, x, batch)
        return x

    stack = Stack(config.layers, tuple(range(len(config.layers))), config.norm_eps, config.residual_scale)
    x, groups = run_stack(model, stack, params.layers, x, pool, batch, between)
    return *_finished(model, params, pool, groups, batch, x), tuple(kept[number] for number in captures)


def embedded(model: Model, params: DecoderParams, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    """The rows of `tokens` as the model's layers take them."""
    config = model.config
    with jax.named_scope("embed"):
        axis = AXIS if params.embed.shape[0] < config.vocab_size else ""
        return embedding.embed(tokens, params.embed, config.embed_scale, axis)


def _finished(model: Model, params: DecoderParams, pool: Pool, groups: list, batch: TokenBatch, x):
    with jax.named_scope("final_norm"):
        x = rms_norm(x, params.final_norm, model.config.norm_eps)
    pool = with_groups(pool, groups)
    if not pool.slot_groups:
        return x, pool
    x = jnp.where(misplaced(batch, model.layout.num_pending)[:, None], jnp.nan, x)
    return x, pool.replace(positions=advanced(pool.positions, batch))


def with_groups(pool: Pool, groups: list) -> Pool:
    """The pool with other contents of its groups, those held by slot after those held by block."""
    count = len(pool.groups)
    return pool.replace(groups=tuple(groups[:count]), slot_groups=tuple(groups[count:]))


def _on_one_device(model: Model) -> Model:
    """The model as each device sees it: with its share of the heads."""
    size = tensor_size(model.mesh)

    def local(layer: LayerConfig) -> LayerConfig:
        (attention,) = layer.mixers
        heads, kv_heads = attention.num_heads // size, attention.num_kv_heads // size
        return replace(layer, mixers=(replace(attention, num_heads=heads, num_kv_heads=kv_heads),))

    return replace(model, config=replace(model.config, layers=tuple(map(local, model.config.layers))))


def _gathered(logits: Callable, axis: str, hidden, head):
    return gathered(logits(hidden, head), axis)


def head_logits(
    model: Model, params: DecoderParams, hidden: Float[Array, "T D"], rows: Int[Array, " R"]
) -> Float[Array, "R V"]:
    """Float32 logits of the picked rows of `hidden`, all of them on every device of a model that is shared: one gather
    costs less than the many small sums that drawing over a divided vocabulary would take."""
    config = model.config
    head, which = (params.embed, "embed") if isinstance(params.head, tuple) else (params.head, "head")
    logits = partial(embedding.logits, scale=config.logit_scale, softcap=config.logit_softcap)
    if model.sharing is not None:
        spec = getattr(model.sharing.params, which)
        logits = over_devices(partial(_gathered, logits, spec[0] or ""), model.mesh, (WHOLE, spec), WHOLE)
    with jax.named_scope("head"):
        return logits(hidden.at[rows].get(mode="clip"), head)
