# SPDX-License-Identifier: Apache-2.0
"""DFlash (Z Lab 2026, arXiv 2602.06036): a few layers that draft a whole block of tokens in one pass.

The block is the last token and a mask token for each draft. Its tokens see each other both ways, and of the past the
target's own features: rows of the residual stream after some of its layers, joined and projected. Each drafter layer
makes keys and values of those features, which lie in its pages at their tokens' positions. The block's own lie past the
length and are overwritten by what the target makes of the drafts.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.core.batch import Segment, TokenBatch
from metrale_jax.core.config import AttentionConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SequenceState
from metrale_jax.layers import embed as embedding
from metrale_jax.layers.attention import attend_segments, attention_state
from metrale_jax.layers.linear import linear
from metrale_jax.layers.mlp import mlp
from metrale_jax.layers.norm import rms_norm
from metrale_jax.layers.placement import Placement
from metrale_jax.layers.rope import apply_rope, rope_tables
from metrale_jax.models.decoder import DecoderParams, Model
from metrale_jax.models.proposer import AbstractProposer, Drafts, Wish
from metrale_jax.sampling.rules import ruled_logits
from metrale_jax.speculative.dflash_files import IGNORED, DFlashConfig, DFlashLayerParams, described
from metrale_jax.speculative.passes import refuse_sharing
from metrale_jax.speculative.registry import Ask, Opened, wanted_directory
from metrale_jax.state import paged
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import Pool
from metrale_jax.steps.batches import uniform_batch
from metrale_jax.steps.outcome import sample_rows
from pallas_kernels.paged_attention.op import AttentionParams, by_length


@dataclass(frozen=True)
class DFlash(AbstractProposer):
    """Drafts a block at once; `dflash_files` reads its config."""

    config: DFlashConfig

    @property
    def captures(self) -> tuple[int, ...]:
        """Where the features come from."""
        return self.config.captures

    def layer_states(self, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
        """Keys and values of each layer."""
        return tuple((attention_state(attention, formats),) for attention in self.config.attentions)

    def observe(self, model: Model, params: DecoderParams, pool: Pool, batch: TokenBatch, hidden, captured) -> Pool:
        """The pool with every layer's keys and values of the step's tokens, drafts included: those that are rejected
        lie past the length."""
        refuse_sharing(model)
        config, weights = self.config, params.drafter
        with jax.named_scope("features"):
            joined = jnp.concatenate(captured, axis=-1).astype(params.embed.dtype)
            features = rms_norm(linear(joined, weights.fc), weights.hidden_norm, config.norm_eps)
        groups = list(pool.groups)
        for number, own in enumerate(weights.layers):
            groups = _Layer(config, model, number).append(own, features, batch, groups)
        return pool.replace(groups=tuple(groups))

    def propose(
        self,
        model: Model,
        params: DecoderParams,
        pool: Pool,
        state: SequenceState,
        limits: Int[Array, " S"],
        wish: Wish,
    ) -> tuple[Drafts, Pool]:
        """`limits` drafts of each row, each drawn by itself, of a block of as many mask tokens."""
        refuse_sharing(model)
        config, weights, count = self.config, params.drafter, wish.num_drafts
        num_rows = limits.shape[0]
        if not count:
            return Drafts(jnp.zeros((num_rows, 0), jnp.int32), limits), pool
        check_count(config, count)
        here = state.replace(seq_len=jnp.where(limits > 0, state.seq_len, 0))
        masks = jnp.full((num_rows, count), config.mask_token, jnp.int32)
        run = uniform_batch(here, masks, limits, model.layout.block_size)
        block = seeing_both_ways(run)
        x = embedding.embed(run.tokens, params.embed, config.embed_scale)
        groups = list(pool.groups)
        for number, own in enumerate(weights.layers):
            batch = run if config.causal or config.attentions[number].window else block
            x, groups = _Layer(config, model, number).run(own, x, batch, groups)
        x = rms_norm(x, weights.final_norm, config.norm_eps)
        masked = x.reshape(num_rows, count + 1, -1)[:, 1:].reshape(num_rows * count, -1)
        head = params.embed if isinstance(params.head, tuple) else params.head
        with jax.named_scope("head"):
            logits = embedding.logits(masked, head, config.logit_scale, config.logit_softcap)
        positions = state.seq_len[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)
        # Of the rules only that against early stops applies, which looks back on nothing.
        sampling = state.sampling.replace(extras=())
        tokens = sample_rows(logits, sampling, positions, 0).tokens
        scores = ruled_logits(logits, sampling, positions).reshape(num_rows, count, -1) if wish.scores else ()
        return Drafts(tokens, limits, scores), pool.replace(groups=tuple(groups))


def seeing_both_ways(batch: TokenBatch) -> TokenBatch:
    """Equal rows each of whose new tokens sees all of the row's."""

    def tree_of_all(rows):
        bits = jnp.left_shift(1, rows.query_lens) - 1
        tree = jnp.broadcast_to(bits[:, None], (bits.shape[0], rows.max_query_len))
        rows = rows.replace(tree=tree, pieces=())
        return rows.replace(pieces=by_length(rows))

    def turned(segment: Segment) -> Segment:
        return replace(segment, rows=tuple(tree_of_all(rows) for rows in segment.rows))

    return batch.replace(segments=tuple(map(turned, batch.segments)))


@dataclass(frozen=True)
class _Layer:
    """One of the drafter's layers, which are numbered on from the target's in its pool."""

    config: DFlashConfig
    model: Model
    number: int

    @property
    def attention(self) -> AttentionConfig:
        return self.config.attentions[self.number]

    @property
    def place(self) -> tuple[int, int]:
        """Its group, and its index there."""
        return self.model.layout.placement[len(self.model.config.layers) + self.number][0]

    def append(self, own: DFlashLayerParams, rows: Float[Array, "T D"], batch: TokenBatch, groups: list) -> list:
        """The pool's groups with the keys and values of `rows`."""
        attention, (group, index) = self.attention, self.place
        with jax.named_scope("append"):
            both = linear(rows, own.kv).reshape(rows.shape[0], 2 * attention.num_kv_heads, attention.head_dim)
            k, v = jnp.split(both, 2, axis=1)
            k = self._turned(k, own.k_norm, batch)
            kv = paged.append(groups[group], index, batch.slots[group], k, v, self.model.platform)
        return [*groups[:group], kv, *groups[group + 1 :]]

    def run(self, own: DFlashLayerParams, x: Float[Array, "T D"], batch: TokenBatch, groups: list):
        """The layer's rows, and the groups with the keys and values of its input."""
        config, model, attention, (group, index) = self.config, self.model, self.attention, self.place
        place = Placement(group, config.norm_eps, model.platform, model.attention)
        hidden = rms_norm(x, own.mixer_norm, config.norm_eps)
        groups = self.append(own, hidden, batch, groups)
        with jax.named_scope("attend"):
            q = linear(hidden, own.q).reshape(x.shape[0], attention.num_heads, attention.head_dim)
            facts = AttentionParams(attention.scale, attention.window)
            q = self._turned(q, own.q_norm, batch)
            mixed = attend_segments(q, facts, (), batch, groups[group], index, place)
            x = x + linear(mixed.reshape(x.shape[0], -1), own.out)
        with jax.named_scope("mlp"):
            return x + mlp(rms_norm(x, own.mlp_norm, config.norm_eps), own.mlp, config.mlp, place), groups

    def _turned(self, heads: Float[Array, "T N H"], weight, batch: TokenBatch):
        tables = rope_tables(self.attention.rope, batch.positions, batch.rope_lens)
        return apply_rope(rms_norm(heads, weight, self.config.norm_eps), *tables)


def open_proposer(ask: Ask) -> Opened:
    """The drafter in the directory, which is for one target."""
    directory = wanted_directory("dflash", ask, "a DFlash drafter of this model")
    config, specs = described(directory, ask.target)
    count = ask.num_drafts or config.block_len - 1
    check_count(config, count)
    return Opened(DFlash(config), count, specs, SafetensorsSource(directory), IGNORED)


def check_count(config: DFlashConfig, num_drafts: int) -> None:
    """Nothing. Raises `ConfigError` for more drafts than a block has masks."""
    if not 0 < num_drafts < config.block_len:
        raise ConfigError(
            f"num_drafts={num_drafts} is not from 1 to {config.block_len - 1}, for which this DFlash drafter's blocks "
            f"of {config.block_len} tokens have room; give a number in between."
        )
