# SPDX-License-Identifier: Apache-2.0
"""How far a recurrent state kept in few bits drifts from one kept in float32: `python -m benchmarks.state_drift`.

Runs the same tokens one by one through the gated delta rule with states in each dtype and prints a JSON line for each
dtype, gate and number of steps: the root mean square of the outputs' difference over that of the outputs, in a window
of steps before it. It is a measurement of accuracy and needs no quiet machine.
"""

import argparse
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.op import DeltaTokens, delta_rows
from pallas_kernels.state_rows import StateRows

HEADS, WIDTH, WINDOW = 4, 64, 100


def draw(key, per_channel: bool, half_life: float) -> tuple[jax.Array, DeltaTokens]:
    """Queries and tokens of one step: keys of length one, strengths below one, decays about a half-life in tokens."""
    names = jax.random.split(key, 5)
    shape = (1, 1, HEADS, WIDTH)

    def unit(name):
        array = jax.random.normal(name, shape)
        return array / jnp.linalg.norm(array, axis=-1, keepdims=True)

    decays = -np.log(2) / half_life * jax.random.exponential(names[3], shape if per_channel else shape[:-1])
    strengths = jax.nn.sigmoid(jax.random.normal(names[4], shape[:-1]))
    return unit(names[0]), DeltaTokens(unit(names[1]), jax.random.normal(names[2], shape), decays, strengths)


@partial(jax.jit, static_argnames=("dtype", "per_channel", "half_life", "num_steps"))
def outputs(seed: int, dtype: str, per_channel: bool, half_life: float, num_steps: int) -> jax.Array:
    """What is read at each step `[steps, V, Hv]`, from states kept in `dtype`."""
    one = jnp.ones(1, jnp.int32)

    def step(matrix, at):
        q, tokens = draw(jax.random.fold_in(jax.random.key(seed), at), per_channel, half_life)
        rows = StateRows(one, at[None], one, 0 * one, 0 * one, 1)
        out, matrix, _ = delta_rows(q, tokens, matrix, (), 0, rows, "cpu")
        return matrix, out[0, 0]

    matrix = jnp.zeros((1, 2, HEADS, WIDTH, WIDTH), jnp.dtype(dtype))
    return jax.lax.scan(step, matrix, jnp.arange(num_steps, dtype=jnp.int32))[1]


def main() -> None:
    """Nothing; prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--half-life", type=float, default=1000.0, help="tokens after which half of a state is left")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for per_channel in (False, True):
        run = partial(outputs, options.seed, per_channel=per_channel, half_life=options.half_life)
        exact = np.asarray(run(dtype="float32", num_steps=options.steps), np.float64)
        for dtype in ("bfloat16", "float16"):
            found = np.asarray(run(dtype=dtype, num_steps=options.steps), np.float64)
            for count in sorted({*(n for n in (100, 1000) if n < options.steps), options.steps}):
                window = slice(max(count - WINDOW, 0), count)
                drift = np.sqrt(np.mean((found[window] - exact[window]) ** 2) / np.mean(exact[window] ** 2))
                facts = {"dtype": dtype, "gates": "channel" if per_channel else "head", "steps": count}
                print(json.dumps({**facts, "half_life": options.half_life, "relative_drift": float(f"{drift:.2e}")}))


if __name__ == "__main__":
    main()
