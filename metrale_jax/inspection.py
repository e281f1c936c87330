# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is and what it needs in memory, without reading a weight."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from metrale_jax.checkpoint.plan import load_plan, spec_leaves
from metrale_jax.core.errors import TextError
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.layers.registry import kind_names
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.models.decoder import make_model
from metrale_jax.run_options import chosen_dtype
from metrale_jax.state.formats import StateFormats


def describe_checkpoint(path: Path, dtype: str | None, block_size: int) -> Iterator[tuple[str, str]]:
    """(name, value) rows about the checkpoint at `path`; raises as loading it would. `dtype` None is the file's own."""
    EngineConfig(block_size=block_size)  # refuses what no engine could run with
    checkpoint = open_checkpoint(path)
    try:
        stored = chosen_dtype(dtype, checkpoint.config.dtype)
        plan = load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
        yield from _model(checkpoint)
        yield "file", f"{path}"
        yield "tensors", f"{len(checkpoint.source.tensors())} ({_size(plan.num_bytes)} once read)"
        yield from _memory(checkpoint, stored, block_size)
        yield "tokenizer", _tokenizer(checkpoint)
    finally:
        checkpoint.source.close()


def _model(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    config = checkpoint.config
    count = sum(math.prod(spec.shape) for spec in spec_leaves(checkpoint.specs))
    kinds = Counter(name for layer in config.layers for name in kind_names(layer))
    yield "family", config.family
    yield "parameters", f"{count:,}"
    yield "layers", f"{len(config.layers)}, width {config.hidden_dim}"
    yield "made of", ", ".join(f"{count} {name}" for name, count in kinds.items())
    for one in config.attentions:
        window = f"a window of {one.window} tokens" if one.window else "the whole past"
        yield "attention", f"{one.num_heads} heads over {one.num_kv_heads}, {one.head_dim} wide, {window}"
    for width in dict.fromkeys(layer.mlp.hidden_dim for layer in config.layers if layer.mlp is not None):
        yield "feed-forward", f"{width} wide"
    yield "vocabulary", f"{config.vocab_size:,}, head {'tied' if config.tie_embeddings else 'of its own'}"
    yield "context", f"{config.max_context_tokens:,} tokens"
    yield "stop ids", ", ".join(map(str, config.eos_token_ids)) or "none"


def _memory(checkpoint: Checkpoint, stored: str, block_size: int) -> Iterator[tuple[str, str]]:
    for dtype in dict.fromkeys([stored, "float32", "bfloat16"]):
        leaves = jax.tree.leaves(abstract_params(checkpoint.specs, dtype))
        weights = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
        layout = make_model(checkpoint.config, "cpu", block_size, StateFormats(dtype, dtype)).layout
        token = layout.block_data_bytes / block_size
        context = token * checkpoint.config.max_context_tokens
        yield (
            f"memory in {dtype}",
            f"{_size(weights)} weights + {_size(token)} a token of context ({_size(context)} for all of it)"
            + (f" + {_size(layout.bytes_per_slot)} a sequence of recurrent state" if layout.slot_groups else ""),
        )


def _tokenizer(checkpoint: Checkpoint) -> str:
    try:
        tokenizer = checkpoint.tokenizer()
    except TextError as error:
        return f"none ({error})"
    return f"{tokenizer.vocab_size:,} entries, chat template: {'yes' if tokenizer.has_chat_template else 'no'}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
