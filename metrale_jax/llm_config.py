# SPDX-License-Identifier: Apache-2.0
"""`LLMConfig`: what `LLM` can be told, and the engine's limits that follow from it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.option_types import refuse_wrong_types
from metrale_jax.engine.disk import DiskStore
from metrale_jax.engine.settings import EngineConfig, within_pool
from metrale_jax.engine.tiers import Tier
from metrale_jax.models.decoder import Model
from metrale_jax.run_options import RunOptions
from metrale_jax.speculative.registry import draft_widths
from metrale_jax.state.pool import PoolLayout
from pallas_kernels.shapes import ceil_div

# Engine settings where a platform differs. On a CPU arithmetic takes the time of a step, and rows and tokens of padding
# cost as much as others: passes that fit beat one pass that does both.
ENGINE_SETTINGS = {"cpu": {"mixed_steps": False, "step_tokens": 16}}

LOG = logging.getLogger(__name__)

# More states than this for each sequence that can run are hardly found again.
SNAPSHOTS_PER_SEQUENCE = 8


@dataclass(frozen=True)
class LLMConfig:
    """Everything that `LLM` can be told; None leaves the choice to the model or the device.

    `kv_dtype`, `block_size`, `attention` and what begins with `state_` are as in `RunOptions`. `max_context_tokens`
    bounds prompt plus answer, by default the model's own limit or what the KV pool of `kv_cache_mib` holds.
    `snapshot_mib` is for the states that a model with recurrent layers keeps for later prompts, by default as much as
    for keys and values. `swap_mib` of the host's memory are for what requests hold that have to make room for others,
    and files below `swap_dir` for what does not fit there; without either they are run again. Of kept prefixes that
    have to make room in the pool, `host_cache_mib` stay in the host's memory and `disk_cache_mib` in files of the
    directory `disk_cache`, where they are found again after a restart.
    `compile_cache` is a directory that keeps compiled programs across processes, `cache_dir` one for models that must
    be assembled. `request_log` is a file to which each request that ends adds a line of JSON ("-" for stderr; see
    `RequestLog`). `executables` is an archive of programs that `metrale-jax plan --compile` wrote: load only your own,
    for it is code. `tensor_parallel` devices share the model. `proposer`, `drafter`, `num_drafts`, `draft_confidence`,
    `draft_layer_ids` and `acceptance` are as in `RunOptions`; by `draft_mode` "auto" only what is measured to be
    quicker is drafted, by "always" as much as fits. The rest is as in `EngineConfig`.
    """

    dtype: str | None = None
    kv_dtype: str | None = None
    state_dtype: str = "float32"
    state_max_norm: float = 0.0
    state_norm_tokens: int = 4096
    attention: str = "auto"
    max_sequences: int = 32
    max_context_tokens: int | None = None
    block_size: int | None = None
    kv_cache_mib: int = 192
    snapshot_mib: int | None = None
    swap_mib: int = 0
    swap_dir: str | Path | None = None
    host_cache_mib: int = 0
    disk_cache: str | Path | None = None
    disk_cache_mib: int = 1024
    prefill_tokens: int = 512
    prefix_cache: bool = True
    compile_cache: str | Path | None = None
    cache_dir: str | Path | None = None
    request_log: str | Path | None = None
    executables: str | Path | None = None
    tensor_parallel: int = 1
    proposer: str | None = None
    drafter: str | Path | None = None
    num_drafts: int | None = None
    draft_confidence: float = 0.0
    draft_layer_ids: tuple[int, ...] | list[int] | None = None
    draft_mode: str = "auto"
    acceptance: str = "exact"

    def __post_init__(self):
        refuse_wrong_types(self)


def llm_config(options: Mapping[str, Any]) -> LLMConfig:
    """The config of these options. Raises `ConfigError` for a name that is none, or a value of another type."""
    known = {field.name for field in fields(LLMConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} is no option of LLM; known are {', '.join(sorted(known))}.")
    return LLMConfig(**options)


def run_options(config: LLMConfig) -> RunOptions:
    """What of the config the loading of the model goes by."""
    shared = {field.name for field in fields(RunOptions)} & {field.name for field in fields(LLMConfig)}
    return RunOptions(**{name: getattr(config, name) for name in sorted(shared)})


def checked_limits(config: LLMConfig) -> None:
    """Nothing, before the model is known. Raises `ConfigError` for values out of range."""
    _engine_limits(config, 1, 1 if config.block_size is None else config.block_size)


def _engine_limits(config: LLMConfig, max_context_tokens: int, block_size: int) -> EngineConfig:
    mebibytes = config.kv_cache_mib
    if isinstance(mebibytes, bool) or not isinstance(mebibytes, int) or mebibytes < 1:
        raise ConfigError(f"kv_cache_mib={mebibytes!r} is not an integer above 0; give a size in MiB.")
    for name in ("snapshot_mib", "swap_mib", "host_cache_mib", "disk_cache_mib"):
        size = getattr(config, name)
        if size is None and name == "snapshot_mib":
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigError(f"{name}={size!r} is not an integer from 0; give a size in MiB.")
    return EngineConfig(
        max_sequences=config.max_sequences,
        max_context_tokens=max_context_tokens,
        block_size=block_size,
        kv_cache_bytes=mebibytes << 20,
        prefill_tokens=config.prefill_tokens,
        prefix_cache=config.prefix_cache,
        swap_bytes=config.swap_mib << 20,
        draft_mode=config.draft_mode,
    )


def path_of(option: str | Path | None) -> Path | None:
    """The option as a path. Raises `ConfigError` for what is none."""
    if option is None or isinstance(option, Path):
        return option
    if not isinstance(option, str) or not option or "\0" in option:
        raise ConfigError(f"path {option!r} is none; give the name of a file or directory.")
    return Path(option)


def snapshot_count(config: LLMConfig, layout: PoolLayout) -> int:
    """How many states of recurrent layers are kept for later prompts; 0 for a model that has none."""
    if not layout.bytes_per_slot or not config.prefix_cache:
        return 0
    mebibytes = config.kv_cache_mib if config.snapshot_mib is None else config.snapshot_mib
    return min((mebibytes << 20) // layout.bytes_per_slot, SNAPSHOTS_PER_SEQUENCE * config.max_sequences)


def lower_tier(config: LLMConfig, layout: PoolLayout, model: Callable[[], Mapping[str, str]]) -> Tier | None:
    """Where kept prefixes go that have to make room in the pool; None for nowhere. `model()` is the fingerprint that
    files are kept under. Raises `ConfigError` for a directory that cannot be written."""
    if not config.prefix_cache or not (config.host_cache_mib or config.disk_cache):
        return None
    disk = None
    if config.disk_cache is not None:
        disk = DiskStore(path_of(config.disk_cache), config.disk_cache_mib << 20, model())
    return Tier(config.host_cache_mib << 20, disk)


def warn_of_a_cold_cache(config: LLMConfig, layout: PoolLayout) -> None:
    """Nothing; tells where no prompt can ever find anything cached though a prefix cache is asked for."""
    if not layout.bytes_per_slot or not config.prefix_cache or snapshot_count(config, layout):
        return
    each = ceil_div(layout.bytes_per_slot, 1 << 20)
    LOG.warning(
        "no prompt will find anything in the prefix cache: a state of this model's recurrent layers takes %d MiB, and "
        "snapshot_mib=%s, kv_cache_mib=%s leave room for none; set snapshot_mib to %d or a multiple, or "
        "prefix_cache=False.",
        *(each, config.snapshot_mib, config.kv_cache_mib, each),
    )


def engine_config(config: LLMConfig, model: Model) -> EngineConfig:
    """The engine's limits for one model. Raises `ConfigError` for a pool too small for it."""
    layout = model.layout
    block = layout.block_bytes
    least = ceil_div(3 * block, 1 << 20)
    if config.kv_cache_mib < least:
        raise ConfigError(
            f"kv_cache_mib={config.kv_cache_mib} holds fewer than 3 blocks of {block} bytes; give {least} or more."
        )
    limits = _engine_limits(config, model.config.max_context_tokens, layout.block_size)
    if model.proposer is None and config.draft_mode != "auto":
        raise ConfigError(f"draft_mode={config.draft_mode!r} is for drafts, and no proposer is chosen; name one.")
    widths = () if model.proposer is None else draft_widths(model.num_drafts)
    limits = replace(limits, num_snapshots=snapshot_count(config, layout), draft_widths=widths)
    return within_pool(layout, replace(limits, **ENGINE_SETTINGS.get(model.platform, {})))
