# SPDX-License-Identifier: Apache-2.0
"""Unfinished answers in files: saved by one process, carried on by another that runs the same model."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from metrale_jax.core.errors import ConfigError, RequestError
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.moves import saved_state
from metrale_jax.engine.request import Request, TokenLogprob
from metrale_jax.engine.saved import SavedState, bytes_of
from metrale_jax.engine.saved_file import read_saved, write_saved
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.steps.build import Steps
from pallas_kernels.shapes import ceil_div

# Numbers of each weight that its fingerprint looks at.
SAMPLES = 1024


@dataclass(frozen=True)
class SavedAnswer:
    """What `load_saved` found: a prompt, how it is answered, what there is of the answer, and its state, if it had run
    by then."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    output: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    state: SavedState | None


def fingerprint(steps: Steps, params: DecoderParams) -> dict[str, str]:
    """What a saved state is good for: the model's description, the form in which it keeps state, and its weights.

    Of each weight the shape and some of its numbers are looked at, evenly spread.
    """
    model = steps.model
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        flat = leaf.reshape(-1)
        step = max(1, flat.shape[0] // SAMPLES)
        digest.update(f"{leaf.shape} {leaf.dtype.name}".encode() + np.asarray(flat[::step]).tobytes())
    return {
        "family": model.config.family,
        "config": hashlib.sha256(repr(model.config).encode()).hexdigest()[:16],
        "state": hashlib.sha256(repr(model.layout).encode()).hexdigest()[:16],
        "keys and values": ", ".join(model.layout.kv_formats),
        "block size": str(model.layout.block_size),
        "weights": digest.hexdigest()[:32],
    }


def save_request(path: Path, engine: Engine, request: Request, seed: int, model: Mapping[str, str]) -> int:
    """Bytes of the file that holds `request` as it stands; it goes on as if nothing had been. `model` is the model's
    fingerprint. Raises `RequestError` for one that has ended, is another engine's, or is one of several that share a
    prompt."""
    engine.settle()
    if request.finished:
        raise RequestError(f"answer of {len(request.output)} tokens has ended; there is nothing to go on from.")
    if request.search is not None:
        raise RequestError(
            f"beam_width={request.params.beam_width} is a beam search, which cannot be saved; save an answer that is "
            "drawn (beam_width=0)."
        )
    if not any(one is request for one in (*engine.running.values(), *engine.filling, *engine.waiting)):
        raise RequestError(
            f"answer to {len(request.prompt)} tokens is not this LLM's; save it with the one that it was submitted to."
        )
    # One that waits may have been put aside, or loaded and not run yet.
    swap = engine.memory.swap
    state = saved_state(engine, request) if request.lease is not None else swap.peek(request.request_id)
    header = {
        "model": dict(model),
        "prompt": list(request.prompt),
        "params": asdict(request.params),
        "seed": seed,
        "output": list(request.output),
        "logprobs": [asdict(one) for one in request.logprobs],
        "prompt_logprobs": [asdict(one) for one in request.prompt_logprobs] if request.output else [],
        "cached_tokens": request.cached_tokens,
        "state": None if state is None else {name: getattr(state, name) for name in ("seq_len", "known_len", "held")},
    }
    return write_saved(path, header, [] if state is None else jax.tree.leaves((state.blocks, state.slot)))


def load_saved(path: Path, engine: Engine, model: Mapping[str, str], regime: Callable[[int], Any]) -> SavedAnswer:
    """What is in the file. Raises `ConfigError` where it is damaged, or of another model, saying what differs."""
    header, arrays = read_saved(path)
    try:
        found = dict(header["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"state file {str(path)!r} is not of a saved answer ({error!r}); save one.") from None
    for name, here in model.items():
        if found.get(name) != here:
            raise ConfigError(
                f"state file {str(path)!r} is of another model: its {name} is {found.get(name)!r}, here it is "
                f"{here!r}; load the model and the options that it was saved with."
            )
    try:
        facts = header["state"]
        saved = SavedAnswer(
            prompt=_ints(header["prompt"]),
            params=_params(header["params"]),
            seed=_int(header["seed"]),
            output=_ints(header["output"]),
            logprobs=_logprobs(header["logprobs"]),
            prompt_logprobs=_logprobs(header["prompt_logprobs"]),
            cached_tokens=_int(header["cached_tokens"]),
            state=None if facts is None else _state(facts, arrays, engine, regime),
        )
        _check(saved, engine)
        return saved
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"state file {str(path)!r} does not hold together ({error}); save it again.") from None


def _check(saved: SavedAnswer, engine: Engine) -> None:
    """Nothing. Raises ValueError for what no engine can have saved."""
    limits, state, length = engine.limits, saved.state, len(saved.prompt) + len(saved.output)
    most = limits.max_context_tokens if saved.params.max_tokens is None else saved.params.max_tokens
    if not all(0 <= token < limits.vocab_size for token in (*saved.prompt, *saved.output)):
        raise ValueError(f"it has tokens outside of the vocabulary of {limits.vocab_size}")
    if len(saved.output) >= most or length >= limits.max_context_tokens:
        raise ValueError(f"{len(saved.output)} tokens of an answer to {len(saved.prompt)} leave none to come")
    if saved.params.logprobs is not None and len(saved.logprobs) != len(saved.output):
        raise ValueError(f"{len(saved.logprobs)} log-probabilities are not those of {len(saved.output)} tokens")
    if not 0 <= saved.cached_tokens <= len(saved.prompt):
        raise ValueError(f"{saved.cached_tokens} tokens cached are not of a prompt of {len(saved.prompt)}")
    if state is None:
        return
    blocks = ceil_div(state.seq_len, limits.block_size)
    held = [list(one) for one in state.held]
    in_order = all(one == sorted(set(one)) and all(0 <= index < blocks for index in one) for one in held)
    if not 0 < state.seq_len < length or len(held) != len(engine.memory.allocators) or not in_order:
        raise ValueError(f"its state after {state.seq_len} of {length} tokens is not one")


def carry_on(engine: Engine, request: Request, saved: SavedAnswer) -> None:
    """Puts a request that was just submitted for `saved`'s prompt where that stood."""
    if request.constraint is not None:
        for token in saved.output:
            request.constraint.accept(token)
    if request.watch is not None and saved.output:
        request.watch(list(saved.output))
    request.output.extend(saved.output)
    request.logprobs.extend(saved.logprobs)
    request.prompt_logprobs.extend(saved.prompt_logprobs)
    request.cached_tokens, request.entered = saved.cached_tokens, bool(saved.output)
    if saved.state is not None:
        request.known_len = saved.state.known_len
        engine.memory.swap.put(request.request_id, saved.state, anyhow=True)


def _state(facts: Mapping[str, Any], arrays: list[np.ndarray], engine: Engine, regime: Callable) -> SavedState:
    held = tuple(_ints(blocks) for blocks in facts["held"])
    blocks, slot = engine.device.as_state(max(map(len, held)), arrays)
    known_len = _int(facts["known_len"])
    return SavedState(_int(facts["seq_len"]), known_len, regime(known_len), held, blocks, slot, bytes_of(arrays))


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _ints(values: list) -> tuple[int, ...]:
    return tuple(map(_int, values))


def _params(values: Mapping[str, Any]) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in values.items() if name in known})


def _logprobs(values: list) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(v["token_id"], v["logprob"], tuple(map(tuple, v["top"]))) for v in values)
