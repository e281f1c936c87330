# SPDX-License-Identifier: Apache-2.0
"""`plan`: whether a model fits a machine that is not here and how fast it can be there; compiles its programs for it.

Needs the model's config alone, and the compilers of the target (`pip install 'metrale-jax[aot]'`), since only they know
what workspace a program asks for.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from metrale_jax.aot.archive import purpose_of, write_archive
from metrale_jax.aot.budget import Budget, budget_of
from metrale_jax.aot.chips import CHIPS
from metrale_jax.aot.plan import MIB, Ask, Plan, size
from metrale_jax.aot.plot import check_can_plot, draw_plan
from metrale_jax.aot.roofline import decode_work, prefill_work
from metrale_jax.aot.shapes import MODELS, describe
from metrale_jax.aot.targets import COUNTS, Target, target_for
from metrale_jax.aot.workspace import Workspace, hungriest, measured
from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.core.errors import ConfigError
from metrale_jax.devices import host, without_devices
from metrale_jax.engine.buckets import make_shape_plan
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.engine.warmup import abstract_params, all_programs, program_kinds
from metrale_jax.llm_config import LLMConfig, engine_config
from metrale_jax.loading import has_weights, open_checkpoint, read_config
from metrale_jax.models.decoder import Model, make_model
from metrale_jax.models.family import Description, described
from metrale_jax.models.tensor_parallel import fitting_size, shared
from metrale_jax.progress import Progress, TerminalProgress, silent
from metrale_jax.run_options import (
    BLOCK_TOKENS,
    RunOptions,
    bounded,
    chosen_attention,
    chosen_block_size,
    chosen_formats,
)
from metrale_jax.runtime import check_writable, default_cache_dir
from metrale_jax.sharding.rules import make_mesh
from metrale_jax.steps.build import Steps, pool_key
from metrale_jax.steps.home import row_major, row_major_over
from pallas_kernels.shapes import ceil_div
from pallas_kernels.storage import served_count

HOST = "cpu"


@dataclass(frozen=True)
class Prepared:
    """A model as a target's devices would hold it: steps without a device, shapes of the params, engine settings."""

    target: Target
    steps: Steps
    params: Any
    config: EngineConfig
    devices: tuple

    @property
    def model(self) -> Model:
        """The static half."""
        return self.steps.model


def add_plan(commands: Any, epilog: str) -> None:
    """Nothing; the parser's `commands` have `plan`."""
    text = "whether a model fits a machine, and how fast it can be there; no device is needed"
    sub = commands.add_parser("plan", help=text, description=text, epilog=f"{epilog} {_MODEL}")
    sub.set_defaults(command=_plan)
    sub.add_argument("model", metavar="MODEL", help="a config.json or its directory, or any model; no weights are read")
    names = f"{', '.join(CHIPS)}, alone or with {', '.join(f'-{count}' for count in COUNTS[1:])} for so many; or {HOST}"
    sub.add_argument("--target", required=True, metavar="NAME", help=names)
    sub.add_argument("--max-seqs", type=int, default=32, metavar="N", help="sequences at once; default 32")
    sub.add_argument("--context", type=int, metavar="L", help="tokens of prompt and answer; default the model's limit")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16; default the checkpoint's own, on cpu float32")
    sub.add_argument("--kv-dtype", metavar="FORMAT", help="format of keys and values; default as LLM chooses")
    sub.add_argument("--attention", default="auto", metavar="NAME", help="as LLM takes it; default the platform's own")
    sub.add_argument("--prefill-tokens", type=int, default=512, metavar="T", help="of a prefill step; default 512")
    platforms = ", ".join(f"{count} on {platform}" for platform, count in BLOCK_TOKENS.items())
    sub.add_argument("--block-size", type=int, metavar="B", help=f"tokens a block; default {platforms}")
    sub.add_argument(
        "--snapshot-mib", type=int, metavar="M", help="for recurrent states that are kept; as LLM takes it"
    )
    sub.add_argument("--compile", type=Path, metavar="FILE", help="write all programs, for LLM(executables=FILE)")
    sub.add_argument("--plot", type=Path, metavar="PNG", help="draw memory by use and tokens/s against batch size")
    sub.add_argument("--json", action="store_true", help="print the plan as JSON")
    sub.add_argument("--cache-dir", type=Path, default=None, help="where models that come in parts are joined")
    sub.add_argument("--quiet", action="store_true", help="no progress")


_MODEL = f"`plan` also knows the shapes of {', '.join(MODELS)}."


def _plan(arguments: argparse.Namespace) -> int:
    """0 if the model fits, 1 if it does not."""
    progress = silent if arguments.quiet else TerminalProgress()
    _check(arguments)
    without_devices()
    here = arguments.target.strip().lower() == HOST
    target, devices = host() if here else (target_for(arguments.target, others=(HOST,)), None)
    description, name = _described(arguments)
    prepared = prepare(arguments, target, devices or target.devices(), description)
    ask = _ask(prepared, description.config.max_context_tokens)
    plan = make_plan(name, prepared, ask, arguments.compile is not None, progress)
    if arguments.plot is not None:
        decode = partial(decode_work, prepared.model, prepared.params, context=plan.ask.context)
        draw_plan(plan, lambda count: decode(num_sequences=count), arguments.plot)
    if arguments.json:
        print(json.dumps(plan.data(), indent=1))
    else:
        for title, value in plan.lines():
            print(f"{title:<16} {value}")
    if arguments.compile is not None and plan.fits:
        num_bytes, count = _archived(arguments.compile, prepared)
        print(f"{arguments.compile} holds {count} programs, {size(num_bytes)}", file=sys.stderr)
    return 0 if plan.fits else 1


def prepare(
    arguments: argparse.Namespace, target: Target, devices: Sequence[jax.Device], description: Description
) -> Prepared:
    """The model for as many of the target's `devices` as can share it."""
    count = fitting_size(description, len(devices))
    mesh = make_mesh(devices, tensor=count) if count > 1 else None
    config = bounded(description.config, arguments.context)
    options = RunOptions(dtype=arguments.dtype, kv_dtype=arguments.kv_dtype)
    dtype, formats = chosen_formats(options, target.platform, config.dtype)
    description, sharing = shared(Description(config, description.specs), mesh)
    block_size = chosen_block_size(arguments.block_size, target.platform)
    attention = chosen_attention(arguments.attention)
    model = make_model(description.config, target.platform, block_size, formats, attention, sharing)
    steps = Steps(model, row_major_over(mesh) if mesh else row_major(devices[0]))
    params = abstract_params(description.specs, dtype, mesh)
    return Prepared(target, steps, params, _engine(arguments, model), tuple(devices[:count]))


def make_plan(name: str, prepared: Prepared, ask: Ask, whole: bool, progress: Progress) -> Plan:
    """The plan; `whole` compiles every program and not only the hungriest."""
    model, params, target = prepared.model, prepared.params, prepared.target
    capacity = target.chip.usable_memory
    bare = budget_of(model, params, capacity, 0, prepared.config.num_snapshots)
    if bare.room <= 0:
        workspace = Workspace(refusal="the weights alone do not fit, so nothing was compiled")
    else:
        shapes = make_shape_plan(prepared.config, len(model.config.eos_token_ids))
        vocab_size, kinds = model.config.vocab_size, program_kinds(model.layout)
        programs = all_programs(shapes, vocab_size, *kinds) if whole else hungriest(shapes, vocab_size)
        config = prepared.config if whole else _probing(prepared, bare)
        workspace = measured(prepared.steps, params, config, programs, progress)
    return Plan(
        model=name,
        dtype=str(params.embed.dtype),
        kv_format=", ".join(model.layout.kv_formats),
        attention=model.attention,
        chip=target.chip,
        num_devices=len(prepared.devices),
        idle_devices=target.num_devices - len(prepared.devices),
        ask=ask,
        budget=replace(bare, workspace=workspace.num_bytes),
        workspace=workspace,
        decode=decode_work(model, params, ask.num_sequences, ask.context),
        prefill=prefill_work(model, params, ask.chunk_tokens, max(0, ask.context - ask.chunk_tokens) // 2),
    )


def _check(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_can_plot(arguments.plot)
    for path in filter(None, (arguments.plot, arguments.compile)):
        # What takes minutes to make is not to fail for want of a place.
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} is in no directory that exists; name another file.")
        if path.is_dir():
            raise ConfigError(f"{str(path)!r} is a directory; name a file in it.")
        check_writable("directory", path.absolute().parent)


def _described(arguments: argparse.Namespace) -> tuple[Description, str]:
    """Config and specs of the model, and what to call it. Weights are looked at only where no config says it all."""
    name = arguments.model
    if name in MODELS:
        return describe(MODELS[name]), name
    path = Path(name)
    if not path.exists():
        path = resolve_model(name, arguments.cache_dir or default_cache_dir(), wanted=("*.json",))
    if path.suffix == ".json" or (path.is_dir() and not has_weights(path)):
        family, raw = read_config(path)
        return described(family, raw), name
    checkpoint = open_checkpoint(path)
    with closing(checkpoint.source):
        return Description(checkpoint.config, checkpoint.specs), name


def _engine(arguments: argparse.Namespace, model: Model) -> EngineConfig:
    layout, config = model.layout, model.config
    # Refused by its own name, before a pool's size is made of it.
    EngineConfig(
        max_sequences=arguments.max_seqs, prefill_tokens=arguments.prefill_tokens, block_size=layout.block_size
    )
    needed = arguments.max_seqs * (ceil_div(config.max_context_tokens, layout.block_size) + 1) + 1
    blocks = served_count(needed, sys.maxsize, layout.gaps)
    options = LLMConfig(
        max_sequences=arguments.max_seqs,
        prefill_tokens=arguments.prefill_tokens,
        block_size=layout.block_size,
        kv_cache_mib=max(1, ceil_div(blocks * layout.block_bytes, MIB)),
        snapshot_mib=arguments.snapshot_mib,
    )
    return engine_config(options, model)


def _ask(prepared: Prepared, limit: int) -> Ask:
    config = prepared.config
    return Ask(config.max_sequences, config.max_context_tokens, limit, config.prefill_tokens)


def _probing(prepared: Prepared, bare: Budget) -> EngineConfig:
    """Settings to measure a workspace under: a pool that leaves half of the room, for a compiler refuses what is too
    big and what a program needs beside its pool does not depend on the pool's size."""
    config, devices = prepared.config, len(prepared.devices)
    room = bare.room * devices // 2
    return replace(config, kv_cache_bytes=min(config.kv_cache_bytes, max(room, 3 * bare.block * devices)))


def _archived(path: Path, prepared: Prepared) -> tuple[int, int]:
    """Bytes and programs of the archive that was written."""
    steps, config = prepared.steps, prepared.config
    num_blocks = (blocks_for(steps.model.layout, config),) * len(steps.model.layout.groups)
    num_slots = make_shape_plan(config, len(steps.model.config.eos_token_ids)).pool_slots
    pool = steps.pool_program(num_blocks, num_slots=num_slots).lower().compile()
    programs = {**steps.programs(), pool_key(num_blocks, num_slots): pool}
    purpose = purpose_of(steps, prepared.params, config, prepared.target.chip.kind)
    return write_archive(path, purpose, programs), len(programs)
