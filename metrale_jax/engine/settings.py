# SPDX-License-Identifier: Apache-2.0
"""`EngineConfig`: the host loop's limits, resolved once and never written back."""

from dataclasses import dataclass, replace

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.option_types import refuse_wrong_types
from metrale_jax.engine.snapshots import DEFAULT_POLICY, SnapshotPolicy
from metrale_jax.speculative.policy import MODES
from metrale_jax.state.pool import PoolLayout
from pallas_kernels.shapes import ceil_div
from pallas_kernels.storage import served_count

# Every count up to these is walked through when the shapes of steps are made, and has rows in host memory.
MOST = {"max_sequences": 1 << 14, "prefill_tokens": 1 << 17}
COUNTS = ("max_sequences", "max_context_tokens", "block_size", "kv_cache_bytes", "prefill_tokens", "prefill_rows")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine.

    `max_sequences` run at once; `max_context_tokens` bounds prompt plus answer; `block_size` is tokens a KV block;
    `kv_cache_bytes` the pool's size; `prefill_tokens` the budget of one prefill step, shared by at most
    `prefill_rows` prompts; with `prefix_cache`, what requests wrote is kept for prompts that begin the same.
    `mixed_steps` decode and prefill in one pass over the weights, which pays where reading them takes the time;
    `step_tokens` is how many prompt tokens take as long as that: prompts are cut where padding them takes longer, and
    0 cuts none. Of a model with recurrent layers `num_snapshots` states are kept for later prompts, taken as
    `snapshot_policy` says. `swap_bytes` of the host's memory are for what preempted requests hold; one that does not
    fit there is run again. Of a model with a proposer steps draft one of `draft_widths` tokens a row at most, as a
    policy of `draft_mode` decides (see `DraftPolicy`). Raises `ConfigError` for values out of range.
    """

    max_sequences: int = 32
    max_context_tokens: int = 4096
    block_size: int = 16
    kv_cache_bytes: int = 192 << 20
    prefill_tokens: int = 512
    prefill_rows: int = 8
    prefix_cache: bool = True
    mixed_steps: bool = True
    step_tokens: int = 0
    num_snapshots: int = 0
    snapshot_policy: SnapshotPolicy = DEFAULT_POLICY
    swap_bytes: int = 0
    draft_widths: tuple[int, ...] = ()
    draft_mode: str = "auto"

    def __post_init__(self):
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} is not an integer above 0; give a count.")
            if value > MOST.get(name, value):
                raise ConfigError(f"{name}={value} is above {MOST[name]}, the most of one engine; give less.")
        refuse_wrong_types(self)
        if self.draft_mode not in MODES:
            raise ConfigError(f"draft_mode={self.draft_mode!r} is not one of {', '.join(MODES)}; choose one.")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} is not a power of two; use 16, 32 or 64.")


def blocks_for(layout: PoolLayout, config: EngineConfig) -> int:
    """Blocks a group, block 0 included, that `kv_cache_bytes` pay for, and no more than all rows can use.

    Where the platform's kernels could not address so many, there are more, or fewer if those are not paid for. Raises
    `ConfigError` if they do not hold one block.
    """
    each = layout.block_bytes
    longest = ceil_div(config.max_context_tokens, config.block_size) + 1
    wanted = config.max_sequences * longest + 1
    if not each:
        return wanted  # blocks of nothing, which count tokens
    if config.kv_cache_bytes < 3 * each:
        raise ConfigError(
            f"kv_cache_bytes={config.kv_cache_bytes} holds fewer than 3 blocks of {each} bytes; give "
            f"{3 * each} or more."
        )
    most = config.kv_cache_bytes // each
    return served_count(min(most, wanted), most, layout.gaps)


def within_pool(layout: PoolLayout, config: EngineConfig) -> EngineConfig:
    """`config` with a context that one sequence can fill: no longer than what the pool holds."""
    tokens = (blocks_for(layout, config) - 2) * config.block_size
    return replace(config, max_context_tokens=min(config.max_context_tokens, tokens))
