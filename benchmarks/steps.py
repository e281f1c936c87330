# SPDX-License-Identifier: Apache-2.0
"""One JSON line for each jitted step: lower, compile and run time apart, against limits measured in the same run.

    python benchmarks/steps.py --model smollm2-135m --sequences 1 8 32 --prefill 512

Decode reads every weight once, so its floor is weight bytes over the memory's bandwidth or the flops of all rows over
the peak of matrix products, whichever is longer. Limits are the best of several tries before and after the steps.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.checkpoint.hub import resolve_model
from metrale_jax.checkpoint.place import load_params
from metrale_jax.checkpoint.plan import load_plan
from metrale_jax.core.sequence import SamplingState, SequenceState
from metrale_jax.loading import open_checkpoint
from metrale_jax.models.decoder import Model, make_model
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import make_pool
from metrale_jax.steps.build import jitted_step

GIGA = 1e9


def measured_limits(num_threads: int) -> tuple[float, float]:
    """GB/s of reading memory with `num_threads` threads, and GFLOP/s of a large float32 matrix product."""
    # Parts larger together than any cache share, read by numpy's vector max, which holds no lock.
    parts = [np.ones(1 << 26, np.float32) for _ in range(num_threads)]
    side = 2048
    matrix = jnp.ones((side, side), jnp.float32)
    product = jax.jit(jnp.matmul)
    with ThreadPoolExecutor(num_threads) as threads:
        read = min(_seconds(lambda: list(threads.map(np.max, parts)), 10))
    multiply = min(_seconds(lambda: product(matrix, matrix).block_until_ready(), 10))
    return sum(part.nbytes for part in parts) / read / GIGA, 2 * side**3 / multiply / GIGA


def _seconds(call: Callable[[], object], times: int) -> list[float]:
    call()
    out = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        out.append(time.perf_counter() - start)
    return out


def make_state(model: Model, num_sequences: int, context_tokens: int, table_width: int) -> SequenceState:
    """Greedy sequences of `context_tokens` tokens each, on blocks of their own."""
    zeros = np.zeros(num_sequences, np.int32)
    tables = np.arange(1, num_sequences * table_width + 1, dtype=np.int32).reshape(num_sequences, table_width)
    floats = zeros.astype(np.float32)
    return SequenceState(
        seq_len=zeros + context_tokens,
        prompt_len=zeros + max(context_tokens, 1),
        last_token=1 + np.arange(num_sequences, dtype=np.int32),
        block_tables=(tables,) * len(model.layout.groups),
        recurrent_slot=1 + np.arange(num_sequences, dtype=np.int32),
        adapter_slot=zeros,
        sampling=SamplingState(
            temperature=floats,
            top_n_sigma=floats,
            top_k=zeros,
            top_p=floats + 1,
            min_p=floats,
            typical_p=floats + 1,
            seed=zeros.astype(np.uint32),
            min_len=zeros,
            stop_ids=np.full((num_sequences, 4), model.config.vocab_size, np.int32),
        ),
    )


def measure(name: str, model: Model, params, arguments: tuple, num_runs: int) -> tuple[dict[str, float], list[float]]:
    """Milliseconds of lowering and compiling, and the seconds of each run of a step, its output read by the host."""
    state = arguments[0]
    pool = make_pool(model.layout, tuple(int(table.max()) + 1 for table in state.block_tables))
    start = time.perf_counter()
    lowered = jitted_step(name, model).lower(params, pool, *arguments)
    middle = time.perf_counter()
    step = lowered.compile()
    end = time.perf_counter()
    box = [pool]

    def run():
        box[0], _, out = step(params, box[0], *arguments)
        assert np.asarray(out.finite).all(), f"{name} gave logits that are not finite"

    runs = _seconds(run, num_runs)
    return {"lower_ms": 1e3 * (middle - start), "compile_ms": 1e3 * (end - middle)}, runs


def _cases(model: Model, options: argparse.Namespace):
    """(step, number of sequences, tokens of the step, tokens that meet the head, arguments after the pool)."""
    width = -(-(options.context + 1) // model.layout.block_size)
    for count in options.sequences:
        yield "decode", count, count, count, (make_state(model, count, options.context, width),)
    for length in options.prefill:
        width = -(-(length + 1) // model.layout.block_size)
        tokens = np.arange(length, dtype=np.int32) % model.config.vocab_size
        yield "prefill", 1, length, 1, (make_state(model, 1, 0, width), tokens, np.asarray([length], np.int32))


def main() -> None:
    """Prints a line for each case, and first one for the machine."""
    options = _parse()
    checkpoint = open_checkpoint(resolve_model(options.model, Path.home() / ".cache" / "metrale-jax"))
    load_plan(checkpoint.specs, checkpoint.source, checkpoint.ignored)
    params = load_params(checkpoint.specs, checkpoint.source, options.dtype, lambda array, _: jnp.asarray(array))
    device = jax.devices()[0]
    formats = StateFormats(options.dtype, options.dtype)
    model = make_model(checkpoint.config, device.platform, options.block_size, formats)
    limits = [measured_limits(options.threads)]
    results = []
    for name, count, tokens, head_rows, arguments in _cases(model, options):
        times, runs = measure(name, model, params, arguments, options.runs)
        results.append((name, count, tokens, head_rows, times, runs))
    limits.append(measured_limits(options.threads))
    bandwidth, flops = (max(column) for column in zip(*limits, strict=True))
    facts = {"device": device.device_kind, "jax": jax.__version__, "commit": _commit(), "dtype": options.dtype}
    print(json.dumps({"limit_gb_s": round(bandwidth, 1), "limit_gflop_s": round(flops, 1), **facts}))
    for name, count, tokens, head_rows, times, runs in results:
        used = weight_use(params, tokens, head_rows)
        line = {"step": name, "sequences": count, "tokens": tokens, **summary(tokens, used, runs, (bandwidth, flops))}
        print(json.dumps({**line, **{key: round(value, 1) for key, value in times.items()}, **facts}))


def weight_use(params, tokens: int, head_rows: int) -> tuple[int, int]:
    """Bytes of weights that a step must read, and floating point operations of its matrix products."""
    layers = sum(leaf.size for leaf in jax.tree.leaves(params.layers) if leaf.ndim > 1)
    head = (params.embed if isinstance(params.head, tuple) else params.head).size
    return (layers + head) * params.embed.dtype.itemsize, 2 * (layers * tokens + head * head_rows)


def summary(tokens: int, used: tuple[int, int], runs: list[float], limits: tuple[float, float]) -> dict[str, float]:
    """Run time, rates, and the share of the time that the tighter limit allows for."""
    low, median, high = np.percentile(runs, [10, 50, 90])
    num_bytes, num_flops = used
    floor = max(num_bytes / limits[0], num_flops / limits[1]) / GIGA
    return {
        "median_ms": round(1e3 * median, 3),
        "p10_ms": round(1e3 * low, 3),
        "p90_ms": round(1e3 * high, 3),
        "tokens_s": round(tokens / median, 1),
        "gb_s": round(num_bytes / median / GIGA, 1),
        "gflop_s": round(num_flops / median / GIGA, 1),
        "of_limit": round(floor / median, 3),
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--context", type=int, default=160, help="tokens that each decoding sequence already has")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2, help="threads that read memory at once for its limit")
    options = parser.parse_args()
    if options.runs < 20:
        parser.error(f"--runs {options.runs} is below 20, which percentiles need; use 20 or more.")
    return options


if __name__ == "__main__":
    main()
