# SPDX-License-Identifier: Apache-2.0
"""The time of a short call on a device: many of them in one program, less the time of one."""

import time
from collections.abc import Callable
from typing import Any

import jax

ROUNDS = 5


def seconds_a_call(call: Callable, x: jax.Array, times: int, *arguments: Any) -> float:
    """The best time of `call(x, *arguments)`; each call in the loop waits for the last one, whose result it is given
    a number of."""

    def body(_, carry):
        x, arguments = carry
        first = (0,) * x.ndim
        found = jax.tree.leaves(call(x, *arguments))[0]
        return x.at[first].set((found[(0,) * found.ndim] * 0 + 1).astype(x.dtype)), arguments

    def loop(x, arguments, count):
        return jax.lax.fori_loop(0, count, body, (x, arguments))[0]

    return best_of_loops(jax.jit(loop, donate_argnums=0), x, times, arguments)


def seconds_an_update(update: Callable, state: Any, times: int, *arguments: Any) -> float:
    """The best time of `state = update(state, *arguments)`, in place."""

    def loop(state, arguments, count):
        return jax.lax.fori_loop(0, count, lambda _, state: update(state, *arguments), state)

    return best_of_loops(jax.jit(loop, donate_argnums=0), state, times, arguments)


def best_of_loops(loop: Callable, state: Any, times: int, arguments: tuple) -> float:
    """Seconds a round of `loop(state, arguments, count)`, whose launch and end are taken off."""

    def run(count):
        nonlocal state
        start = time.perf_counter()
        state = jax.block_until_ready(loop(state, arguments, count))
        return time.perf_counter() - start

    run(1)
    one, many = (min(run(count) for _ in range(ROUNDS)) for count in (1, times + 1))
    # A machine that is busy with else may make the longer loop the shorter: then launches are not taken off.
    return (many - one) / times if many > one else many / (times + 1)
