# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is and what it needs in memory, without reading a weight."""

import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from metrale_jax.checkpoint.plan import load_plan, spec_leaves
from metrale_jax.core.errors import TextError
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.models.decoder import make_model
from metrale_jax.runtime import chosen_dtype


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
    attention = config.layers[0].attention
    count = sum(math.prod(spec.shape) for spec in spec_leaves(checkpoint.specs))
    windows = sorted({layer.attention.window for layer in config.layers})
    yield "family", config.family
    yield "parameters", f"{count:,}"
    yield "layers", f"{len(config.layers)}, width {config.hidden_dim}, ffn {config.layers[0].mlp.hidden_dim}"
    yield "attention", f"{attention.num_heads} heads over {attention.num_kv_heads}, {attention.head_dim} wide"
    yield "windows", ", ".join("whole past" if window == 0 else f"{window} tokens" for window in windows)
    yield "vocabulary", f"{config.vocab_size:,}, head {'tied' if config.tie_embeddings else 'of its own'}"
    yield "context", f"{config.max_context_tokens:,} tokens"
    yield "stop ids", ", ".join(map(str, config.eos_token_ids)) or "none"


def _memory(checkpoint: Checkpoint, stored: str, block_size: int) -> Iterator[tuple[str, str]]:
    for dtype in dict.fromkeys([stored, "float32", "bfloat16"]):
        leaves = jax.tree.leaves(abstract_params(checkpoint.specs, dtype))
        weights = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
        layout = make_model(checkpoint.config, "cpu", block_size, dtype).layout
        block = sum(layout.bytes_per_block(group) for group in range(len(layout.groups)))
        context = block / block_size * checkpoint.config.max_context_tokens
        yield (
            f"memory in {dtype}",
            f"{_size(weights)} weights + {_size(block / block_size)} a token of context "
            f"({_size(context)} for all of it)",
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
