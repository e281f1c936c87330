# SPDX-License-Identifier: Apache-2.0
"""`load_model`: a named model on a device, ready for the step functions. Where the platform is decided.

This and what stands on it (`LLM`, the command line) are the composition root: devices, cache directories and JAX's
own settings are looked at here and passed down as values.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.place import Place, load_params, sharded_placer
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError, TextError
from metrale_jax.devices import devices_for
from metrale_jax.drafters import load_drafter, opened_proposer
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.models.decoder import DecoderParams, Model, make_model
from metrale_jax.models.family import Description
from metrale_jax.models.tensor_parallel import shared
from metrale_jax.process_memory import quiet_memory
from metrale_jax.progress import Progress, silent
from metrale_jax.run_options import (
    DEFAULTS,
    PLATFORM_NAMES,
    RunOptions,
    bounded,
    chosen_acceptance,
    chosen_attention,
    chosen_block_size,
    chosen_formats,
)
from metrale_jax.sharding.rules import make_mesh, named_sharding
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major, row_major_over
from metrale_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, or the first of those that share it: compiled steps, params, and the tokenizer or the
    reason why there is none."""

    steps: Steps
    params: DecoderParams
    device: jax.Device
    tokenizer: Tokenizer | None
    tokenizer_error: TextError | None
    path: Path

    @property
    def model(self) -> Model:
        """The static half."""
        return self.steps.model

    @property
    def config(self) -> ModelConfig:
        """The model's description."""
        return self.steps.model.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer: the config's ids and the tokenizer's."""
        extra = self.tokenizer.eos_token_ids if self.tokenizer else ()
        return tuple(dict.fromkeys([*self.config.eos_token_ids, *extra]))


def load_model(
    name: str,
    options: RunOptions = DEFAULTS,
    cache_dir: Path | None = None,
    device: jax.Device | Sequence[jax.Device] | None = None,
    progress: Progress = silent,
    warm: Callable[[Steps, DecoderParams], None] = lambda steps, shapes: None,
) -> LoadedModel:
    """The model called `name` (alias, directory, .gguf file or hub id) on `device` (JAX's first by default), or shared
    among several devices.

    `warm(steps, shapes of the params)` is called in a thread of its own, to compile while the weights load.
    """
    path = resolve_model(
        name, cache_dir or default_cache_dir(), progress=lambda done, total: progress("download", done, total)
    )
    checkpoint = open_checkpoint(path)
    with quiet_memory(), closing(checkpoint.source):
        load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
        devices = devices_for(device, 1)
        device, mesh = devices[0], make_mesh(devices, tensor=len(devices)) if len(devices) > 1 else None
        on = PLATFORM_NAMES[device.platform]
        dtype, formats = chosen_formats(options, on, checkpoint.config.dtype)
        config = bounded(checkpoint.config, options.max_context_tokens)
        place = cache_dir or default_cache_dir()
        asked = options.proposer, options.drafter, options.num_drafts
        chosen = {"confidence": options.draft_confidence, "layers": options.draft_layer_ids}
        opened = opened_proposer(*asked, replace(checkpoint, config=config), mesh, place, **chosen)
        if opened is not None:
            formats = replace(formats, num_pending=max(formats.num_pending, opened.num_drafts))
        description, sharing = shared(Description(config, checkpoint.specs), mesh)
        attention = chosen_attention(options.attention)
        block_size = chosen_block_size(options.block_size, on)
        drafting = (None, 0) if opened is None else (opened.proposer, opened.num_drafts)
        model = make_model(description.config, on, block_size, formats, attention, sharing, *drafting)
        model = replace(model, acceptance=chosen_acceptance(options.acceptance, proposer=opened is not None))
        steps = Steps(model, row_major_over(mesh) if mesh else row_major(device))
        with ThreadPoolExecutor(max_workers=2) as aside:
            specs = description.specs.replace(drafter=() if opened is None else opened.specs)
            warming = aside.submit(warm, steps, abstract_params(specs, dtype, mesh))
            reading = aside.submit(_tokenizer, checkpoint)
            params = load_params(
                description.specs,
                checkpoint.source,
                jnp.dtype(dtype),
                _placer(device, mesh),
                lambda done, total: progress("load", done, total),
            )
            if opened is not None and opened.specs != ():
                own = load_drafter(opened, checkpoint, jnp.dtype(dtype), _placer(device, mesh))
                params = params.replace(drafter=own)
            tokenizer, error = reading.result()
            warming.result()
    return LoadedModel(steps, params, device, tokenizer, error, path)


def _placer(device: jax.Device, mesh: Mesh | None) -> Place:
    if mesh is None:
        return lambda array, spec: jax.device_put(array, device)
    return sharded_placer(lambda spec: named_sharding(spec.axes, spec.shape, mesh))


def default_cache_dir() -> Path:
    """Where assembled models and compiled programs are kept: `~/.cache/metrale-jax`."""
    return Path.home() / ".cache" / "metrale-jax"


def use_compile_cache(directory: Path) -> None:
    """Lets JAX keep compiled programs in `directory`, across processes. They may be moved to another one. Raises
    `ConfigError` if it is not writable."""
    check_writable("compile cache", directory)
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    # XLA's own caches lie in the same directory, and its name would be part of every program's key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    compilation_cache.reset_cache()  # JAX decides at its first compile whether there is one, and remembers


def check_writable(name: str, directory: Path) -> None:
    """Nothing; makes `directory` if it is not there. Raises `ConfigError`, with its `name`, if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{name} {str(directory)!r} cannot be written ({error.strerror}); name a writable directory or none."
        ) from None


@contextmanager
def profiled(directory: Path) -> Iterator[None]:
    """A context whose work JAX's profiler records under `directory`, for TensorBoard or Perfetto.

    Raises `ConfigError` if it is not writable or the process is being profiled already.
    """
    check_writable("profile directory", directory)
    try:
        jax.profiler.start_trace(directory)
    except RuntimeError:
        raise ConfigError(
            f"profile directory {str(directory)!r} has to wait: this process is being profiled; end that profile first."
        ) from None
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, TextError | None]:
    # A model without a tokenizer still serves token ids; the error is kept for whoever asks for text.
    try:
        return checkpoint.tokenizer(), None
    except TextError as error:
        return None, error
