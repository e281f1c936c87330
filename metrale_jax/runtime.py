# SPDX-License-Identifier: Apache-2.0
"""`load_model`: a named model on a device, ready for the step functions. Where the platform is decided.

This and what stands on it (`LLM`, the command line) are the composition root: devices, cache directories and JAX's
own settings are looked at here and passed down as values.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.place import Place, load_params, sharded_placer
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError, TextError
from metrale_jax.core.option_types import refuse_wrong_types
from metrale_jax.devices import devices_for
from metrale_jax.drafters import load_drafter, opened_proposer
from metrale_jax.engine.warmup import abstract_params
from metrale_jax.loading import Checkpoint, open_checkpoint
from metrale_jax.models.decoder import DecoderParams, Model, make_model
from metrale_jax.models.family import Description
from metrale_jax.models.tensor_parallel import shared
from metrale_jax.process_memory import quiet_memory
from metrale_jax.progress import Progress, silent
from metrale_jax.sharding.rules import make_mesh, named_sharding
from metrale_jax.state.formats import StateFormats
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major, row_major_over
from metrale_jax.text.tokenizer import Tokenizer
from pallas_kernels.kv_formats.registry import FORMATS
from pallas_kernels.paged_attention.op import IMPLEMENTATIONS
from pallas_kernels.state_rows import CHUNK

PLATFORM_NAMES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
DTYPES = ("float32", "bfloat16", "float16")
# What weights, activations and the KV cache are in where the checkpoint's own would not do. XLA's CPU compiler converts
# narrow weights at every use, and writes to narrow floats by converting the whole pool to float32 and back.
RUN_DTYPES: Mapping[str, str] = MappingProxyType({"cpu": "float32"})
# Tokens of a KV block on each platform. A TPU's kernel copies whole blocks, of which small ones leave its memory idle,
# and scales of rows are padded to 128 tokens there. Where rows are read one by one, small blocks waste least.
BLOCK_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 16, "cuda": 16, "tpu": 64})


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


@dataclass(frozen=True)
class RunOptions:
    """How a model is to run; None leaves the choice to the model or the device.

    `dtype` is that of weights and activations: float32 on a CPU, which converts narrower weights at every use, and the
    checkpoint's own elsewhere. `kv_dtype` is the format of the KV cache (a name of
    `pallas_kernels.kv_formats.registry`), by default that of the activations. `block_size` is tokens a KV block, by
    default what suits the platform (`BLOCK_TOKENS`). `attention` names an implementation of paged attention; "auto" is
    the platform's own. `state_dtype` is that of recurrent state, which gathers rounding errors for as long as its
    sequence; in 16 bits it is rounded wherever a step ends, so that an answer may depend on how its prompt was cut, and
    `num_pending` how many drafted tokens it can keep until they are judged. `state_max_norm` above 0 keeps it from
    blowing up in very long prompts: after every `state_norm_tokens` tokens of a sequence each head's matrix is scaled
    down to that Frobenius norm, if it is above it. That is another model's answer, if the same however it is cut.
    `proposer` (a name of `speculative.registry`) drafts up to `num_drafts` tokens at a time, which changes no answer;
    `drafter` is the model, directory or hub id that has its weights, where it needs any of its own.
    """

    dtype: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    max_context_tokens: int | None = None
    attention: str = "auto"
    state_dtype: str = "float32"
    num_pending: int = 0
    state_max_norm: float = 0.0
    state_norm_tokens: int = 4096
    proposer: str | None = None
    drafter: str | Path | None = None
    num_drafts: int | None = None

    def __post_init__(self):
        refuse_wrong_types(self)


def load_model(
    name: str,
    options: RunOptions = RunOptions(),
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
        asked = options.proposer, options.drafter, options.num_drafts
        place = cache_dir or default_cache_dir()
        opened = opened_proposer(*asked, replace(checkpoint, config=config), mesh, place)
        if opened is not None:
            formats = replace(formats, num_pending=max(formats.num_pending, opened.num_drafts))
        description, sharing = shared(Description(config, checkpoint.specs), mesh)
        attention = chosen_attention(options.attention)
        block_size = chosen_block_size(options.block_size, on)
        drafting = (None, 0) if opened is None else (opened.proposer, opened.num_drafts)
        model = make_model(description.config, on, block_size, formats, attention, sharing, *drafting)
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
    """Lets JAX keep compiled programs in `directory`, across processes. Raises `ConfigError` if it is not writable."""
    check_writable("compile cache", directory)
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
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


def chosen_dtype(dtype: str | None, default: str) -> str:
    """The name of a dtype to run in, `default` where none is asked for. Raises `ConfigError` for others."""
    name = dtype or default
    name = np.dtype(name).name if isinstance(name, type) else str(name)
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} is not one of {', '.join(DTYPES)}; choose one, or None for the default.")
    return name


def chosen_kv_format(kv_dtype: str | None, default: str) -> str:
    """The name of a format for keys and values, `default` where none is asked for. Raises `ConfigError` for others."""
    name = str(kv_dtype or default)
    if name not in FORMATS:
        raise ConfigError(f"kv_dtype={name!r} is not one of {', '.join(FORMATS)}; choose one, or None for the default.")
    return name


def chosen_block_size(block_size: int | None, platform: str) -> int:
    """Tokens of a KV block, the platform's own where none are asked for."""
    return BLOCK_TOKENS[platform] if block_size is None else block_size


def chosen_attention(name: str) -> str:
    """The name of an implementation of paged attention. Raises `ConfigError` with the list for one unknown."""
    known = ("auto", *(row.name for row in IMPLEMENTATIONS))
    if name not in known:
        raise ConfigError(f"attention={name!r} is not one of {', '.join(known)}; choose one.")
    return name


def chosen_formats(options: RunOptions, platform: str, stored: str) -> tuple[str, StateFormats]:
    """The dtype to run in on a platform, `stored` being the checkpoint's own, and the formats of layers' state."""
    name = chosen_dtype(options.dtype, RUN_DTYPES.get(platform, stored))
    keys = chosen_kv_format(options.kv_dtype, RUN_DTYPES.get(platform, name))
    if options.state_dtype not in DTYPES:
        raise ConfigError(f"state_dtype={options.state_dtype!r} is not one of {', '.join(DTYPES)}; choose one.")
    norm, tokens = options.state_max_norm, options.state_norm_tokens
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 <= norm < float("inf"):
        raise ConfigError(f"state_max_norm={norm!r} is not a number from 0; give a Frobenius norm, or 0 for none.")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or tokens % CHUNK:
        raise ConfigError(
            f"state_norm_tokens={tokens!r} is not a multiple of {CHUNK}, which recurrent kernels scan by; use "
            f"{CHUNK} or a multiple."
        )
    limits = (float(norm), tokens) if norm else (0.0, 0)
    return name, StateFormats(keys, name, options.state_dtype, options.num_pending, *limits)


def bounded(config: ModelConfig, max_context_tokens: int | None) -> ModelConfig:
    """The config with a shorter context, or as it is for None. Raises `ConfigError` for a length out of range."""
    limit = config.max_context_tokens
    if max_context_tokens is None:
        return config
    if isinstance(max_context_tokens, bool) or not isinstance(max_context_tokens, int) or max_context_tokens < 2:
        raise ConfigError(f"max_context_tokens={max_context_tokens!r} is not an integer above 1; give a length.")
    if max_context_tokens > limit:
        raise ConfigError(
            f"max_context_tokens={max_context_tokens} is above the model's {limit}; ask for at most that many."
        )
    return replace(config, max_context_tokens=max_context_tokens)


def _tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, TextError | None]:
    # A model without a tokenizer still serves token ids; the error is kept for whoever asks for text.
    try:
        return checkpoint.tokenizer(), None
    except TextError as error:
        return None, error
