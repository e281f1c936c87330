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
    fingerprint. Raises `RequestError` for one that has ended or is one of several that share a prompt."""
    engine.settle()
    if request.finished:
        raise RequestError(f"answer of {len(request.output)} tokens has ended; there is nothing to go on from.")
    if request.search is not None or request.params.n > 1:
        raise RequestError(f"n={request.params.n} answers or a beam search cannot be saved; save one that is drawn.")
    state = saved_state(engine, request) if request.lease is not None else None
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
        for name, here in model.items():
            if header["model"].get(name) != here:
                raise ConfigError(
                    f"state file {str(path)!r} is of another model: its {name} is {header['model'].get(name)!r}, here "
                    f"it is {here!r}; load the model and the options that it was saved with."
                )
        facts = header["state"]
        state = None if facts is None else _state(facts, arrays, engine, regime)
        return SavedAnswer(
            prompt=tuple(header["prompt"]),
            params=_params(header["params"]),
            seed=header["seed"],
            output=tuple(header["output"]),
            logprobs=_logprobs(header["logprobs"]),
            prompt_logprobs=_logprobs(header["prompt_logprobs"]),
            cached_tokens=header["cached_tokens"],
            state=state,
        )
    except (KeyError, TypeError, ValueError, AttributeError, RequestError) as error:
        raise ConfigError(f"state file {str(path)!r} is damaged ({error!r}); save it again.") from None


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
    held = tuple(tuple(blocks) for blocks in facts["held"])
    blocks, slot = engine.device.as_state(max(map(len, held)), arrays)
    known_len = facts["known_len"]
    return SavedState(facts["seq_len"], known_len, regime(known_len), held, blocks, slot, bytes_of(arrays))


def _params(values: Mapping[str, Any]) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in values.items() if name in known})


def _logprobs(values: list) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(v["token_id"], v["logprob"], tuple(map(tuple, v["top"]))) for v in values)
