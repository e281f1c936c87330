# SPDX-License-Identifier: Apache-2.0
"""How far a recurrent state kept in few bits drifts from one kept in float32: `python -m benchmarks.state_drift`.

Runs the same tokens one by one through the gated delta rule, with gates of heads and of channels, and through state
space duality, with states in each dtype, and prints a JSON line for each dtype, rule and number of steps: the root mean
square of the outputs' difference over that of the outputs, in a window of steps before it. It is a measurement of
accuracy and needs no quiet machine.
"""

import argparse
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.op import DeltaTokens, delta_rows
from pallas_kernels.ssd.op import SsdHeads, SsdStorage, SsdTokens, ssd_rows
from pallas_kernels.state_rows import StateRows

HEADS, WIDTH, WINDOW = 4, 64, 100


def delta_step(key, per_channel: bool, half_life: float, matrix, rows: StateRows):
    """Outputs and states of the gated delta rule: keys of length one, strengths below one, decays about a half-life in
    tokens."""
    names = jax.random.split(key, 5)
    shape = (1, 1, HEADS, WIDTH)

    def unit(name):
        array = jax.random.normal(name, shape)
        return array / jnp.linalg.norm(array, axis=-1, keepdims=True)

    decays = -np.log(2) / half_life * jax.random.exponential(names[3], shape if per_channel else shape[:-1])
    strengths = jax.nn.sigmoid(jax.random.normal(names[4], shape[:-1]))
    tokens = DeltaTokens(unit(names[1]), jax.random.normal(names[2], shape), decays, strengths)
    out, matrix, _ = delta_rows(unit(names[0]), tokens, matrix, (), 0, rows, "cpu")
    return out[0, 0], matrix


def ssd_step(key, half_life: float, matrix, rows: StateRows):
    """Outputs and states of state space duality: steps about one, decays about a half-life in tokens."""
    names = jax.random.split(key, 4)
    x, b, c = (jax.random.normal(name, (1, HEADS, WIDTH)) for name in names[:3])
    tokens = SsdTokens(x, jax.random.exponential(names[3], (1, HEADS)), b, c)
    heads = SsdHeads(jnp.full(HEADS, -np.log(2) / half_life, jnp.float32), jnp.zeros(HEADS))
    out, kept = ssd_rows(tokens, heads, SsdStorage(matrix), 0, rows, "cpu")
    return out[0], kept.matrix


STEPS = {
    "delta, gates of heads": partial(delta_step, per_channel=False),
    "delta, gates of channels": partial(delta_step, per_channel=True),
    "ssd": ssd_step,
}


@partial(jax.jit, static_argnames=("dtype", "rule", "half_life", "num_steps"))
def outputs(seed: int, dtype: str, rule: str, half_life: float, num_steps: int) -> jax.Array:
    """What is read at each step `[steps, V, Hv]`, from states kept in `dtype`."""
    one = jnp.ones(1, jnp.int32)

    def step(matrix, at):
        rows = StateRows(one, at[None], one, 0 * one, 0 * one, 1)
        key = jax.random.fold_in(jax.random.key(seed), at)
        out, matrix = STEPS[rule](key, half_life=half_life, matrix=matrix, rows=rows)
        return matrix, out

    matrix = jnp.zeros((1, 2, HEADS, WIDTH, WIDTH), jnp.dtype(dtype))
    return jax.lax.scan(step, matrix, jnp.arange(num_steps, dtype=jnp.int32))[1]


def main() -> None:
    """Nothing; prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--half-life", type=float, default=1000.0, help="tokens after which half of a state is left")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for rule in STEPS:
        run = partial(outputs, options.seed, rule=rule, half_life=options.half_life)
        exact = np.asarray(run(dtype="float32", num_steps=options.steps), np.float64)
        for dtype in ("bfloat16", "float16"):
            found = np.asarray(run(dtype=dtype, num_steps=options.steps), np.float64)
            for count in sorted({*(n for n in (100, 1000) if n < options.steps), options.steps}):
                window = slice(max(count - WINDOW, 0), count)
                drift = np.sqrt(np.mean((found[window] - exact[window]) ** 2) / np.mean(exact[window] ** 2))
                facts = {"dtype": dtype, "rule": rule, "steps": count}
                print(json.dumps({**facts, "half_life": options.half_life, "relative_drift": float(f"{drift:.2e}")}))


if __name__ == "__main__":
    main()
