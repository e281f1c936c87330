# SPDX-License-Identifier: Apache-2.0
"""Shapes to compile with: models from config dicts, and a step's arguments without a byte of data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from metrale_jax.aot.drafters import DRAFTERS
from metrale_jax.aot.model_configs import (
    GEMMA3_27B,
    LLAMA_8B,
    NEMOTRON_H_8B,
    OLMO_HYBRID_7B,
    QWEN3_8B,
    QWEN3_32B,
    SMALL,
)
from metrale_jax.core.errors import ConfigError
from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.models.decoder import Model, Sharing, make_model
from metrale_jax.models.family import Description, described
from metrale_jax.models.hf_config import RawConfig
from metrale_jax.models.proposer import AbstractProposer
from metrale_jax.models.registry import family_for
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import Pool, abstract_pool
from metrale_jax.steps.home import placed_as, row_major_over
from metrale_jax.steps.serving import ChunkRows, DecodeRows


@dataclass(frozen=True)
class ModelCase:
    """A model to compile: its config as a checkpoint spells it, the blocks of its pool, and how many layers keep its
    shape: a cut model has each kind of layer, and what is wrong with a step is wrong with it too. `num_slots` are those
    of its pool where layers keep recurrent state; `pattern` is the field with a letter a layer, if there is one, and
    `proposer` names what drafts for the model, if anything does.

    The pool has to be so large that no step's logits or weights have the size of one of its arrays.
    """

    name: str
    values: Mapping[str, Any]
    num_blocks: int
    few_layers: int
    num_slots: int = 2
    pattern: str = ""
    proposer: str = ""

    def drafted_by(self, proposer: str) -> "ModelCase":
        """The model with a proposer of `drafters.DRAFTERS`."""
        return replace(self, name=f"{self.name}+{proposer}", proposer=proposer)

    def cut(self) -> "ModelCase":
        """The model with few layers, and with a pool of the same bytes."""
        layers = self.values["num_hidden_layers"]
        few = min(self.few_layers, layers)
        values = {**self.values, "num_hidden_layers": few}
        if self.pattern:
            values[self.pattern] = values[self.pattern][:few]
        blocks, slots = (count * layers // few for count in (self.num_blocks, self.num_slots))
        return replace(self, values=values, num_blocks=blocks, num_slots=slots)


MODELS: Mapping[str, ModelCase] = MappingProxyType(
    {
        case.name: case
        for case in (
            ModelCase("small", SMALL, 16384, 4),
            ModelCase("llama-3.1-8b", LLAMA_8B, 2048, 4),
            ModelCase("qwen3-8b", QWEN3_8B, 2048, 4),
            ModelCase("qwen3-32b", QWEN3_32B, 2048, 4),
            ModelCase("gemma-3-27b", GEMMA3_27B, 2048, 6),
            ModelCase("nemotron-h-8b", NEMOTRON_H_8B, 2048, 9, 193, "hybrid_override_pattern"),
            ModelCase("olmo-hybrid-7b", OLMO_HYBRID_7B, 256, 4, 225),
        )
    }
)


@dataclass(frozen=True)
class StepSizes:
    """Static sizes of the steps: sequences decoding, blocks a table row, tokens a block, drafts a sequence, and the
    chunk of prompt tokens with the sequences that share it."""

    num_sequences: int = 64
    table_width: int = 128
    block_size: int = 16
    num_drafts: int = 3
    chunk_tokens: int = 512
    chunk_sequences: int = 4
    num_stop_ids: int = 4


def model_for(name: str) -> ModelCase:
    """The model of that name, "small+mtp" for one with a proposer. Raises `ConfigError` for one unknown."""
    base, _, proposer = name.partition("+")
    if base not in MODELS or (proposer and proposer not in DRAFTERS):
        raise ConfigError(
            f"model {name!r} is unknown to aot; use one of {sorted(MODELS)}, with + and one of {sorted(DRAFTERS)} "
            "behind it for what drafts."
        )
    return MODELS[base].drafted_by(proposer) if proposer else MODELS[base]


def describe(case: ModelCase) -> Description:
    """Config and weight specs of a model."""
    family = family_for(case.values["architectures"][0])
    return described(family, RawConfig(case.values, family.defaults, f"aot model {case.name!r}"))


def abstract_model(
    description: Description,
    platform: str,
    sizes: StepSizes,
    sharing: Sharing | None = None,
    proposer: AbstractProposer | None = None,
) -> Model:
    """The static half of a model whose keys and values have its weights' dtype."""
    dtype = description.config.dtype
    formats = StateFormats(dtype, dtype, num_pending=sizes.num_drafts)
    drafting = proposer, sizes.num_drafts if proposer is not None else 0
    return make_model(description.config, platform, sizes.block_size, formats, "auto", sharing, *drafting)


def num_bytes(case: ModelCase) -> int:
    """Bytes of a model's weights and pool on all devices together."""
    description = describe(case)
    leaves = jax.tree.leaves(abstract_params(description.specs, description.config.dtype))
    layout = abstract_model(description, "cpu", StepSizes()).layout
    pool = case.num_blocks * layout.block_bytes + case.num_slots * layout.bytes_per_slot
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves) + pool


def formatted_pool(model: Model, num_blocks: int, mesh: Mesh, num_slots: int = 2) -> Pool:
    """Shapes, dtypes and formats of the pool: row-major, key and value heads shared out over the mesh.

    A TPU's default layout puts the dimension that pads least last, for narrow heads the block's number; steps work on
    rows of heads, and each would begin and end with a copy of the pool into row-major order.
    """
    pool = abstract_pool(model.layout, (num_blocks,) * len(model.layout.groups), num_slots)
    return jax.tree.map(placed_as, pool, row_major_over(mesh).pool_formats(pool))


def abstract_state(model: Model, num_sequences: int, sizes: StepSizes, mesh: Mesh) -> SequenceState:
    """Shapes of the state of `num_sequences` sequences, the same on every device."""

    def of(dtype, *shape):
        return _placed((num_sequences, *shape), dtype, mesh)

    sampling = SamplingState(
        temperature=of(jnp.float32),
        top_n_sigma=of(jnp.float32),
        top_k=of(jnp.int32),
        top_p=of(jnp.float32),
        min_p=of(jnp.float32),
        typical_p=of(jnp.float32),
        seed=of(jnp.uint32),
        min_len=of(jnp.int32),
        stop_ids=of(jnp.int32, sizes.num_stop_ids),
    )
    return SequenceState(
        seq_len=of(jnp.int32),
        prompt_len=of(jnp.int32),
        last_token=of(jnp.int32),
        block_tables=tuple(of(jnp.int32, sizes.table_width) for _ in model.layout.groups),
        recurrent_slot=of(jnp.int32),
        adapter_slot=of(jnp.int32),
        sampling=sampling,
    )


def _prefill(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    state = abstract_state(model, sizes.chunk_sequences, sizes, mesh)
    tokens = _placed((sizes.chunk_tokens,), jnp.int32, mesh)
    return state, tokens, _placed((sizes.chunk_sequences,), jnp.int32, mesh)


def _decode(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    return (abstract_state(model, sizes.num_sequences, sizes, mesh),)


def _verify(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    drafts = _placed((sizes.num_sequences, sizes.num_drafts), jnp.int32, mesh)
    return *_decode(model, sizes, mesh), drafts, _placed((sizes.num_sequences,), jnp.int32, mesh)


def _speculate(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    return *_decode(model, sizes, mesh), _placed((sizes.num_sequences,), jnp.int32, mesh)


def _mixed(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    return *_decode(model, sizes, mesh), *_prefill(model, sizes, mesh)


def _advance(model: Model, sizes: StepSizes, mesh: Mesh) -> tuple:
    decode_state, prefill_state, tokens, lengths = _mixed(model, sizes, mesh)
    slots = _placed((sizes.num_sequences,), jnp.int32, mesh)
    decoding = DecodeRows(decode_state.replace(sampling=()), slots)
    last_tokens = _placed((sizes.num_sequences + 1,), jnp.int32, mesh)
    return last_tokens, decoding, ChunkRows(prefill_state.replace(sampling=()), tokens, lengths)


# What each step takes after params and pool.
ARGUMENTS: Mapping[str, Callable[[Model, StepSizes, Mesh], tuple]] = MappingProxyType(
    {"prefill": _prefill, "decode": _decode, "verify": _verify, "mixed": _mixed, "advance": _advance}
)
# And those of models with a proposer.
DRAFTING_ARGUMENTS: Mapping[str, Callable[[Model, StepSizes, Mesh], tuple]] = MappingProxyType(
    {**ARGUMENTS, "speculate": _speculate}
)


def step_tokens(step: str, sizes: StepSizes) -> int:
    """Tokens that a step runs over the layers."""
    decoding, chunk = sizes.num_sequences, sizes.chunk_tokens
    return {
        "prefill": chunk,
        "decode": decoding,
        "verify": decoding * (sizes.num_drafts + 1),
        "speculate": decoding * (sizes.num_drafts + 1),
    }.get(step, decoding + chunk)


def _placed(shape: tuple[int, ...], dtype, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
