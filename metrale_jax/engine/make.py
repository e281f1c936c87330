# SPDX-License-Identifier: Apache-2.0
"""`make_engine`: an engine over one model, its parts fitted to each other."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from metrale_jax.core.config import rope_regime
from metrale_jax.engine.admission import Limits
from metrale_jax.engine.buckets import ShapePlan, make_shape_plan
from metrale_jax.engine.device import Device
from metrale_jax.engine.drafting import Drafting
from metrale_jax.engine.hooks import Hook, ignore
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.saved import SwapFiles, SwapSpace
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.engine.snapshots import Snapshots
from metrale_jax.engine.spill import Spill
from metrale_jax.engine.tiers import Tier
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.speculative.policy import DraftPolicy
from metrale_jax.state.pool import zeros
from metrale_jax.steps.build import Steps


def make_engine(
    steps: Steps,
    params: DecoderParams,
    config: EngineConfig,
    fill: Callable = zeros,
    clock: Callable[[], float] = time.monotonic,
    shapes: ShapePlan | None = None,
    on_finish: Hook = ignore,
    tier: Tier | None = None,
    swap_directory: Path | None = None,
) -> Engine:
    """An idle engine with a pool of its own; `fill` makes the pool's arrays (tests pass NaN). What the pool gives up of
    kept prefixes goes to `tier`, if there is one. What preempted requests hold, and
    `swap_bytes` have no room for, goes to files below `swap_directory`."""
    model = steps.model
    shapes = shapes or make_shape_plan(config, len(model.config.eos_token_ids))
    num_blocks = blocks_for(model.layout, config)
    back = 0 if model.proposer is None else model.proposer.looks_back
    windows = tuple(spec.window and spec.window + back for spec in model.layout.groups)
    snapshots = Snapshots(shapes.num_slots + 1, shapes.num_snapshots) if model.layout.slot_groups else None
    memory = Memory(
        num_blocks,
        windows,
        config.block_size,
        partial(rope_regime, model.config),
        keep=config.prefix_cache,
        snapshots=snapshots,
        policy=config.snapshot_policy,
        swap_bytes=config.swap_bytes,
    )
    limits = Limits(
        max_context_tokens=config.max_context_tokens,
        max_sequences=config.max_sequences,
        vocab_size=model.config.vocab_size,
        block_size=config.block_size,
        usable_blocks=memory.num_usable,
        max_stop_ids=shapes.stop_ids,
        recompute_len=model.config.recompute_len,
        norm_tokens=model.layout.norm_tokens,
    )
    device = Device(steps, params, num_blocks, shapes, fill)
    if swap_directory is not None:
        memory.swap = SwapSpace(config.swap_bytes, SwapFiles(swap_directory, device))
    if tier is not None and config.prefix_cache:
        memory.attach(Spill(tier, device, config.block_size, windows, bool(model.layout.slot_groups)))
    drafting = None
    if model.proposer is not None and config.draft_widths:
        drafting = Drafting(DraftPolicy(config.draft_widths, config.draft_mode), limits, shapes)
    return Engine(device, memory, shapes, limits, clock, on_finish, drafting)
