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
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from metrale_jax.models.decoder import Model
from metrale_jax.state.pool import Pool, abstract_pool, copy_blocks, make_pool, zeros
from metrale_jax.steps.decode import decode
from metrale_jax.steps.mixed import mixed
from metrale_jax.steps.prefill import prefill
from metrale_jax.steps.prompt_scores import prompt_logprobs
from metrale_jax.steps.score import score
from metrale_jax.steps.serving import advance, candidates, finish, pick_rows, put_tokens
from metrale_jax.steps.verify import verify

# Position of the donated pool among each function's arguments after the model, and how many values it returns.
STEPS: Mapping[str, tuple[Callable, int, int]] = MappingProxyType(
    {
        "prefill": (prefill, 1, 3),
        "decode": (decode, 1, 3),
        "verify": (verify, 1, 3),
        "mixed": (mixed, 1, 5),
        "score": (score, 1, 3),
        "advance": (advance, 1, 3),
    }
)
# Functions of a model and its params that leave the pool alone.
HEADS: Mapping[str, Callable] = MappingProxyType(
    {"finish": finish, "candidates": candidates, "prompt_scores": prompt_logprobs}
)
# Functions of neither, and which of their arguments are donated.
UPKEEP: Mapping[str, tuple[Callable, tuple[int, ...]]] = MappingProxyType(
    {"copy_blocks": (copy_blocks, (0,)), "pick_rows": (pick_rows, ()), "put_tokens": (put_tokens, ())}
)


def jitted_step(name: str, model: Model, pool_formats: Pool | None = None, **static) -> Any:
    """The jitted step `name` of `STEPS` for one model, its pool donated; takes (params, pool, state, ...).

    `pool_formats` is a pool of `Format`s: the layout and sharding that the pool arrives and leaves in. Without it the
    pool leaves in the backend's default layout, which on a TPU need not be the one that the step works in.
    """
    function, pool_argument, num_results = STEPS[name]
    bound = partial(function, model, **static)
    if pool_formats is None:
        return jax.jit(bound, donate_argnums=pool_argument, keep_unused=True)
    results = (pool_formats, *[None] * (num_results - 1))
    return jax.jit(bound, donate_argnums=pool_argument, keep_unused=True, out_shardings=results)


def row_major(device: jax.Device) -> Callable[[Any], Format]:
    """The format of a pool array on `device`, as a function of the array: rows of heads lie as the steps work on them.

    A TPU's default layout puts the dimension that pads least last, and each step would begin and end with a copy.
    """
    return lambda leaf: Format(Layout(tuple(range(leaf.ndim))), SingleDeviceSharding(device))


class Steps:
    """Executables of one model, made on demand and kept. Safe to ask from several threads.

    `pool_format` gives the format of each pool array, which then arrives and leaves in it; None leaves it to the
    backend. `num_compiles` counts the executables made so far. Each is compiled inside the context `on_compile(name)`,
    which may be set at any time; several threads may be in one at once.
    """

    def __init__(
        self,
        model: Model,
        pool_format: Callable[[Any], Format] | None = None,
        on_compile: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.model, self.pool_format, self.on_compile = model, pool_format, on_compile
        self._made: dict[tuple, Future] = {}
        self._lock, self._tracing = Lock(), Lock()

    @property
    def num_compiles(self) -> int:
        """How many executables have been compiled."""
        return len(self._made)

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
                # One at a time: what is traced for one program may be reused by the next, and a program's text, which
                # compiled ones are found again by, must not depend on who traced first.
                with self.on_compile(name):
                    with self._tracing:
                        lowered = self._jitted(name, arguments, static).lower(*arguments)
                    compiled = lowered.compile()
                future.set_result(compiled)
            except BaseException as error:
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
                raise
        return future.result()

    def make_pool(self, num_blocks: tuple[int, ...], fill: Callable = zeros) -> Pool:
        """A fresh pool of `num_blocks[g]` blocks in group g, in the format of these steps."""
        # Made where it stays: a pool that was moved would be there twice for a moment.
        formats = self._formats(abstract_pool(self.model.layout, num_blocks))
        return jax.jit(partial(make_pool, self.model.layout, num_blocks, fill), out_shardings=formats)()

    def abstract_pool(self, num_blocks: tuple[int, ...]) -> Pool:
        """Shapes and formats of what `make_pool` makes."""
        pool = abstract_pool(self.model.layout, num_blocks)
        if self.pool_format is None:
            return pool
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.pool_format(x)), pool)

    def _formats(self, pool):
        return None if self.pool_format is None else jax.tree.map(self.pool_format, pool)

    def _jitted(self, name, arguments, static):
        if name in STEPS:
            return jitted_step(name, self.model, self._formats(arguments[1]), **static)
        if name in HEADS:
            return jax.jit(partial(HEADS[name], self.model, **static))
        function, donated = UPKEEP[name]
        formats = self._formats(arguments[0]) if donated else None
        return jax.jit(function, donate_argnums=donated, out_shardings=formats)

    def _shape_key(self, name, arguments):
        # Params never change shape under one model; hashing their hundreds of leaves each step would cost more than the
        # rest of the host's work.
        varying = arguments if name in UPKEEP else arguments[1:]
        leaves, tree = jax.tree.flatten(varying)
        return (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
