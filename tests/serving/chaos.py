# SPDX-License-Identifier: Apache-2.0
"""What scenes of chaos share, whatever the front: a small model and its answers, and the faults that befall it."""

import math
import threading
from collections.abc import Callable
from typing import Any

from metrale_jax import LLM, SamplingParams
from serving.core.keys import KeyRing

SIZES = {"max_sequences": 4, "max_context_tokens": 256, "prefill_tokens": 32, "kv_cache_mib": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 20}
PROMPTS = [f"Prompt number {n}, which is like no other." for n in range(6)]
LOUD, QUIET = "loud-loud-loud-loud", "quiet-quiet-quiet-quiet"
KEYS = f"""
[[keys]]
id = "loud"
token = "{LOUD}"
[[keys]]
id = "quiet"
token = "{QUIET}"
"""
RELEASE_S = 30


def solo_answers(model: LLM) -> dict[str, tuple[int, ...]]:
    """The answer to each prompt, alone."""
    return {prompt: model.generate([prompt], SamplingParams(**GREEDY))[0].token_ids for prompt in PROMPTS}


def two_tenants(directory) -> KeyRing:
    """Keys for one who floods and one who does not."""
    path = directory / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return KeyRing.open(path)


def failing(times: int, error: Exception, after: int = 0) -> Callable:
    """A function that goes on to another `after` so many calls, then raises so many times."""
    calls = [0]

    def around(inner: Callable) -> Callable:
        def call(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if after < calls[0] <= after + times:
                raise error
            return inner(*given, **named)

        return call

    return around


def mortal(step: Callable, dying: threading.Event) -> Callable:
    """The step of an engine whose thread ends once `dying` is set."""

    def die() -> Any:
        if dying.is_set():
            raise SystemExit("an interpreter that ends")
        return step()

    return die


def revived(model: LLM) -> None:
    """The model, fit for the next test, after its thread has died."""
    model.engine.recover(model.engine.roster.busy, "the test is over", pool_lost=True)
    model.engine.check()


def sticking(step: Callable, stuck: threading.Event, release: threading.Event) -> Callable:
    """The step of an engine that hangs from `stuck` until `release`."""

    def wait() -> Any:
        if stuck.is_set():
            release.wait(RELEASE_S)
        return step()

    return wait


class GatedDevice:
    """A device whose steps wait while it is closed. `num_begun` counts those that came, `is_held` says that one waits:
    where both were looked at, the engine goes no further before `open`."""

    def __init__(self, device: Any):
        self._device, self._turn, self._last = device, threading.Condition(), math.inf
        self.num_begun, self.is_held = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def close(self, after: int = 0) -> None:
        """Lets so many steps pass, and holds the next."""
        with self._turn:
            self._last = self.num_begun + after

    def open(self) -> None:
        """Lets steps go on."""
        with self._turn:
            self._last = math.inf
            self._turn.notify_all()

    def advance(self, decoding: Any, chunks: Any) -> Any:
        with self._turn:
            self.num_begun += 1
            self.is_held = self.num_begun > self._last
            assert self._turn.wait_for(lambda: self.num_begun <= self._last, RELEASE_S), "nobody opened the device"
            self.is_held = False
        return self._device.advance(decoding, chunks)
