# SPDX-License-Identifier: Apache-2.0
"""Step functions compiled: the one place of `jax.jit` on the serving path, and the counter of compiles.

Each shape is lowered and compiled once, ahead of its first call, so that the host can compile while weights still
load, and a count that moves after warm-up is a fact and not a guess.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Sharding

from metrale_jax.core.errors import ConfigError
from metrale_jax.models.decoder import Model
from metrale_jax.state.pool import (
    Pool,
    abstract_pool,
    begin_slots,
    copy_blocks,
    copy_slots,
    limit_slots,
    make_pool,
    read_blocks,
    read_slots,
    write_blocks,
    write_slots,
    zeros,
)
from metrale_jax.steps.decode import decode
from metrale_jax.steps.drafted import advance_drafts, judge
from metrale_jax.steps.home import Home, placed_as
from metrale_jax.steps.mixed import mixed
from metrale_jax.steps.prefill import prefill
from metrale_jax.steps.probe import lens, probe
from metrale_jax.steps.prompt_scores import prompt_logprobs
from metrale_jax.steps.record import record
from metrale_jax.steps.score import score
from metrale_jax.steps.serving import advance, candidates, finish, keep_rows, pick_rows, put_tokens
from metrale_jax.steps.speculate import speculate
from metrale_jax.steps.verify import verify
from pallas_kernels.dispatch import DispatchError

# Position of the donated pool among each function's arguments after the model, and how many values it returns.
STEPS: Mapping[str, tuple[Callable, int, int]] = MappingProxyType(
    {
        "prefill": (prefill, 1, 3),
        "decode": (decode, 1, 3),
        "verify": (verify, 1, 3),
        "speculate": (speculate, 1, 3),
        "mixed": (mixed, 1, 5),
        "score": (score, 1, 3),
        "probe": (probe, 1, 3),
        "record": (record, 1, 3),
        "advance": (advance, 1, 3),
        "advance_drafts": (advance_drafts, 1, 3),
    }
)
# Functions of a model and its params that leave the pool alone.
HEADS: Mapping[str, Callable] = MappingProxyType(
    {
        "finish": finish,
        "judge": judge,
        "candidates": candidates,
        "prompt_scores": prompt_logprobs,
        "lens": lens,
    }
)
# Functions of neither, and which of their arguments are donated.
UPKEEP: Mapping[str, tuple[Callable, tuple[int, ...]]] = MappingProxyType(
    {
        "copy_blocks": (copy_blocks, (0,)),
        "copy_slots": (copy_slots, (0,)),
        "limit_slots": (limit_slots, (0,)),
        "begin_slots": (begin_slots, (0,)),
        "read_blocks": (read_blocks, ()),
        "write_blocks": (write_blocks, (0,)),
        "read_slots": (read_slots, ()),
        "write_slots": (write_slots, (0,)),
        "pick_rows": (pick_rows, ()),
        "keep_rows": (keep_rows, ()),
        "put_tokens": (put_tokens, ()),
    }
)


def jitted_step(name: str, model: Model, home: Home | None = None, pool: Pool | None = None, **static) -> Any:
    """The jitted step `name` of `STEPS` for one model, its pool donated; takes (params, pool, state, ...).

    `pool` gives the shapes of the pool, which arrives and leaves as it lies in `home`. Without them it leaves in the
    backend's default layout, which on a TPU need not be the one that the step works in.
    """
    function, pool_argument, num_results = STEPS[name]
    bound = partial(function, model, **static)
    if home is None:
        return jax.jit(bound, donate_argnums=pool_argument, keep_unused=True)
    results = (home.pool_formats(pool), *[_whole(home)] * (num_results - 1))
    return jax.jit(bound, donate_argnums=pool_argument, keep_unused=True, out_shardings=results)


def _whole(home: Home | None) -> Sharding | None:
    """The sharding of results that each device of a mesh has alike; None, which leaves it open, for one device."""
    return None if home is None or home.mesh is None else home.everywhere


def nothing_ready(key: str) -> None:
    """No program: all are compiled here."""


class Steps:
    """Executables of one model, made on demand and kept. Safe to ask from several threads.

    Their arrays are at `home`; None leaves that to the backend. `num_compiles` counts the executables compiled so far.
    Each is compiled inside the context `on_compile(name)`; several threads may be in one at once. `ready(key)` gives a
    program that was compiled elsewhere (see `aot.archive`), or None. Both may be set at any time.
    """

    def __init__(
        self,
        model: Model,
        home: Home | None = None,
        on_compile: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.model, self.home, self.on_compile = model, home, on_compile
        self.ready: Callable[[str], Callable | None] = nothing_ready
        self._made: dict[tuple, Future] = {}
        self._num_compiles = 0
        self._lock, self._tracing = Lock(), Lock()

    @property
    def num_compiles(self) -> int:
        """How many executables have been compiled."""
        return self._num_compiles

    def programs(self) -> dict[str, Any]:
        """Every executable made so far, by the key that `ready` is asked for."""
        with self._lock:
            made = dict(self._made)
        return {key_text(key): future.result() for key, future in made.items()}

    def run(self, name: str, *arguments, **static) -> Any:
        """The result of a step, or of an upkeep function, on these arguments; compiles it if the shape is new."""
        return self.executable(name, *arguments, **static)(*arguments)

    def executable(self, name: str, *arguments, **static) -> Callable:
        """The compiled function for arguments of these shapes (arrays or `ShapeDtypeStruct`s).

        A shape that another thread is compiling is waited for.
        """
        key = (name, *static.items(), *self._shape_key(name, arguments))
        with self._lock:
            future = self._made.get(key)
            mine = future is None
            if mine:
                future = self._made[key] = Future()
        if mine:
            try:
                future.set_result(self.ready(key_text(key)) or self._compiled(name, arguments, static))
            except BaseException as error:
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
                raise
        return future.result()

    def _compiled(self, name, arguments, static):
        # Traced one at a time: what is traced for one program may be reused by the next, and a program's text, which
        # compiled ones are found again by, must not depend on who traced first.
        with self.on_compile(name):
            with self._tracing:
                lowered = self._lowered(name, arguments, static)
            compiled = lowered.compile()
        with self._lock:
            self._num_compiles += 1
        return compiled

    def _lowered(self, name, arguments, static):
        try:
            return self._jitted(name, arguments, static).lower(*self._settled(arguments))
        except DispatchError as error:
            model = self.model
            raise ConfigError(
                f"a kernel of {model.platform} does not serve this model under these options "
                f"({'; '.join(error.reasons)}); choose another dtype or kv_dtype, or attention='xla', which is slow."
            ) from error

    def make_pool(self, num_blocks: tuple[int, ...], fill: Callable = zeros, num_slots: int = 2) -> Pool:
        """A fresh pool of `num_blocks[g]` blocks in group g and `num_slots` slots, at the home of these steps."""
        ready = self.ready(pool_key(num_blocks, num_slots)) if fill is zeros else None
        return (ready or self.pool_program(num_blocks, fill, num_slots))()

    def pool_program(self, num_blocks: tuple[int, ...], fill: Callable = zeros, num_slots: int = 2) -> Callable:
        """The jitted program that makes a pool; takes nothing."""
        # Made where it stays: a pool that was moved would be there twice for a moment.
        formats = self._formats(abstract_pool(self.model.layout, num_blocks, num_slots))
        return jax.jit(partial(make_pool, self.model.layout, num_blocks, fill, num_slots), out_shardings=formats)

    def abstract_pool(self, num_blocks: tuple[int, ...], num_slots: int = 2) -> Pool:
        """Shapes and formats of what `make_pool` makes."""
        pool = abstract_pool(self.model.layout, num_blocks, num_slots)
        return pool if self.home is None else jax.tree.map(placed_as, pool, self._formats(pool))

    def _formats(self, pool):
        return None if self.home is None else self.home.pool_formats(pool)

    def _settled(self, arguments):
        return arguments if self.home is None else self.home.settled(arguments)

    def _jitted(self, name, arguments, static):
        if name in STEPS:
            return jitted_step(name, self.model, self.home, arguments[1], **static)
        whole = _whole(self.home)
        if name in HEADS:
            return jax.jit(partial(HEADS[name], self.model, **static), out_shardings=whole)
        function, donated = UPKEEP[name]
        formats = self._formats(arguments[0]) if donated else whole
        return jax.jit(function, donate_argnums=donated, out_shardings=formats)

    def _shape_key(self, name, arguments):
        # Params never change shape under one model; hashing their hundreds of leaves each step would cost more than the
        # rest of the host's work.
        varying = arguments if name in UPKEEP else arguments[1:]
        leaves, tree = jax.tree.flatten(varying)
        return (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))


def key_text(key: tuple) -> str:
    """The key of an executable as text that is the same in every process."""
    return repr(key)


def pool_key(num_blocks: tuple[int, ...], num_slots: int) -> str:
    """The key of the program that makes a pool."""
    return key_text(("make_pool", num_blocks, num_slots))
