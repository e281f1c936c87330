# SPDX-License-Identifier: Apache-2.0
"""Kernels on the GPU that is here: each against the oracle, then timed against the hardware and against other kernels.

    python -m benchmarks.device_kernels

Prints nothing of times if a kernel's answer is wrong. Each time is that of one call within a loop inside `jit`, so that
no launch is counted; the limit is the memory's bandwidth or the
arithmetic's peak, both measured first in the same process. Other kernels get the same sequences, in the layout of their
own. Writes a line of JSON a result. Takes some minutes, compiling included. `--interpret-smoke` runs all of it at
a tiny size on a CPU, where times say nothing.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import device_layers
from benchmarks.device_peers import PEERS
from benchmarks.timing import seconds_a_call, seconds_an_update
from pallas_kernels.kv_append.op import kv_append
from pallas_kernels.kv_formats.pages import KvPages, abstract_pages
from pallas_kernels.paged_attention.cases import CASES, KV_FORMATS, Case
from pallas_kernels.paged_attention.op import (
    AttentionParams,
    SequenceRows,
    cut_pieces,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.shapes import ceil_div
from tests.pallas_kernels.problems import Problem

GIGA = 1e9
FORMATS_CASE = Case("formats", (37, 0, 90), (3, 0, 2), 6, 2, 128, 128, window=60, sinks=True)
WIDTHS_CASES = tuple(Case(f"H{width}", (300, 70), (1, 2), 8, 2, width, width) for width in (64, 80, 96, 128, 192, 256))


@dataclass(frozen=True)
class Timed:
    """One call to time: `num_sequences` that have `context` tokens, `new` of them queries."""

    entry: str
    num_sequences: int
    context: int
    new: int = 1
    kv_format: str = "bfloat16"
    dtype: str = "bfloat16"
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layers: int = 2

    @property
    def name(self) -> str:
        """Names the call in the table."""
        sizes = f"S{self.num_sequences}-T{self.context}-Q{self.new}-N{self.num_heads}-K{self.num_kv_heads}"
        return f"{self.entry} {self.dtype}/{self.kv_format} {sizes}-H{self.head_dim}-B{self.block_size}"

    @property
    def least_bytes(self) -> int:
        """What has to be read and written."""
        item = jnp.dtype(self.dtype).itemsize
        pages = abstract_pages(self.kv_format, (1, 1, 1, self.num_kv_heads), self.head_dim, self.head_dim)
        row = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
        queries = self.num_sequences * self.new
        if self.entry == "append":
            return queries * (row + 2 * self.num_kv_heads * self.head_dim * item)
        return self.num_sequences * self.context * row + 2 * queries * self.num_heads * self.head_dim * item

    @property
    def least_flops(self) -> int:
        """The products of queries that see what they may and no more."""
        if self.entry == "append":
            return 0
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.num_sequences * seen * self.num_heads * self.head_dim


CALLS = (
    Timed("decode", 64, 4096),
    Timed("decode", 64, 4096, kv_format="fp8_e4m3"),
    Timed("decode", 64, 4096, kv_format="int8"),
    Timed("decode", 64, 4096, head_dim=64),
    Timed("decode", 64, 4096, num_heads=9, num_kv_heads=3, head_dim=64),
    Timed("decode", 64, 4096, block_size=128),
    Timed("decode", 8, 8192),
    Timed("decode", 1, 65536),
    Timed("decode", 64, 4096, new=4),
    Timed("prefill", 1, 4096, 4096),
    Timed("prefill", 1, 16384, 2048),
    Timed("prefill", 1, 16384, 2048, kv_format="fp8_e4m3"),
    Timed("prefill", 1, 4096, 4096, head_dim=64),
    Timed("append", 64, 1),
    Timed("append", 64, 1, kv_format="fp8_e4m3"),
    Timed("append", 1, 2048, 2048, kv_format="fp8_e4m3"),
)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 if a kernel is wrong, 2 if there is no GPU."""
    options = _parse(arguments)
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.interpret_smoke:
        print(
            f"the device is {device.device_kind!r} and no GPU; run this on a machine with one, after "
            "`pip install 'metrale-jax[gpu]'`, or try --interpret-smoke.",
            file=sys.stderr,
        )
        return 2
    how = {"platform": "cpu" if options.interpret_smoke else "cuda"}
    how["impl"] = "triton-interpreted" if options.interpret_smoke else "triton"
    layers = _layer_calls(how, options.interpret_smoke)
    small = {call.small().name: call.small() for call in layers}
    wrong = [*_wrong(how, options.interpret_smoke), *(fault for call in small.values() if (fault := call.fault()))]
    if wrong:
        print("\n".join(["No times: these answers are wrong.", *wrong]))
        return 1
    calls = [replace(call, **SMOKE[call.entry]) for call in _first_of_each(CALLS)] if options.interpret_smoke else CALLS
    limits = measured_limits(1 << 6 if options.interpret_smoke else 1 << 13)
    facts = {"device": device.device_kind, "jax": jax.__version__, "commit": _commit()}
    print(f"{device.device_kind}: {limits[0] / GIGA:.0f} GB/s read, {limits[1] / GIGA / 1e3:.0f} TFLOP/s in bfloat16")
    lines = [result for call in calls if options.only in call.name for result in _results(call, how, limits, options)]
    lines += [_layer_result(call, limits, options) for call in layers if options.only in call.name]
    with options.out.open("w") as file:
        file.writelines(json.dumps({**line, **facts}) + "\n" for line in lines)
    return 0


SMOKE = {
    "decode": {"num_sequences": 2, "context": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32},
    "prefill": {"context": 24, "new": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32},
    "append": {"num_sequences": 4, "num_kv_heads": 2, "head_dim": 32},
}


def _first_of_each(calls) -> list:
    return list({call.entry: call for call in reversed(calls)}.values())


def _wrong(how: dict, smoke: bool) -> Iterator[str]:
    """The kernels' answers that are not the oracle's."""
    cases = CASES[:1] if smoke else (*CASES, *WIDTHS_CASES)
    problems = [(case, "float32" if smoke else "bfloat16", "") for case in cases]
    problems += [] if smoke else [(FORMATS_CASE, "bfloat16", kv_format) for kv_format in KV_FORMATS]
    for case, dtype, kv_format in problems:
        problem = Problem(case, dtype, kv_format=kv_format)
        checks = [problem.assert_decode_is_right] + ([] if case.tree else [problem.assert_ragged_is_right])
        for check in checks[:1] if smoke else checks:
            try:
                check(**how)
            except AssertionError as error:
                yield f"{case.name} {dtype}/{kv_format or dtype} {check.__name__}: {str(error).strip().splitlines()[0]}"


def measured_limits(side: int) -> tuple[float, float]:
    """Bytes a second of reading memory, and operations a second of a large product in bfloat16."""
    data = jnp.ones((side, side * 8), jnp.bfloat16)
    square = jnp.ones((side, side), jnp.bfloat16)
    read = seconds_a_call(lambda x: jnp.max(x), data, 20)
    multiply = seconds_a_call(lambda x: x @ x, square, 20)
    return data.nbytes / read, 2 * side**3 / multiply


def _results(call: Timed, how: dict, limits: tuple[float, float], options) -> Iterator[dict]:
    floor = max(call.least_bytes / limits[0], call.least_flops / limits[1])
    times = 2 if options.interpret_smoke else 50
    yield _line(call, how["impl"], _ours(call, how, times), floor)
    if call.entry == "prefill" and call.kv_format == call.dtype and not options.interpret_smoke:
        yield _line(call, "mosaic_gpu", _ours(call, {**how, "impl": "mosaic_gpu"}, times), floor)
    for name, peer in PEERS.items():
        yield _line(call, name, peer(call, times), floor)


def _layer_calls(how: dict, smoke: bool) -> list[device_layers.LayerCall]:
    calls = [call.on(**how) for call in device_layers.CALLS]
    return [call.tiny() for call in _first_of_each(calls)] if smoke else calls


def _layer_result(call: device_layers.LayerCall, limits: tuple[float, float], options) -> dict:
    floor = max(call.least_bytes / limits[0], call.least_flops / limits[1])
    return _line(call, call.row.impl, call.seconds(2 if options.interpret_smoke else 50), floor)


def _line(call: Timed | device_layers.LayerCall, name: str, found: float | str, floor: float) -> dict:
    """One result, printed too; `found` is a time or the reason why there is none."""
    line = {"call": call.name, "kernel": name, "floor_us": round(1e6 * floor, 2)}
    if isinstance(found, str):
        print(f"{call.name:56} {name:22} {found}", flush=True)
        return {**line, "absent": found}
    print(f"{call.name:56} {name:22} {1e6 * found:9.1f} µs {100 * floor / found:5.1f} % of the limit", flush=True)
    return {**line, "us": round(1e6 * found, 2), "of_limit": round(floor / found, 4)}


def _ours(call: Timed, how: dict, times: int) -> float:
    pages, rows = make_pages(call), make_rows(call)
    params = AttentionParams(call.head_dim**-0.5)
    if call.entry == "append":
        return _append_seconds(call, pages, how, times)
    num_queries = call.num_sequences * call.new
    if call.entry == "decode":
        shape = (call.num_sequences, call.new, call.num_heads, call.head_dim)
        attend = decode_attention
    else:
        shape, attend = (num_queries, call.num_heads, call.head_dim), prefill_attention
        rows = rows.replace(pieces=jax.jit(cut_pieces, static_argnums=1)(rows, num_queries))
    q = jax.random.normal(jax.random.key(0), shape, call.dtype)
    return seconds_a_call(lambda q, pages, rows: attend(q, pages, 1, rows, params, **how), q, times, pages, rows)


def _append_seconds(call: Timed, pages: KvPages, how: dict, times: int) -> float:
    num_tokens = call.num_sequences * call.new
    slots = jnp.arange(num_tokens, dtype=jnp.int32) + call.block_size
    new = jax.random.normal(jax.random.key(0), (num_tokens, call.num_kv_heads, call.head_dim), call.dtype)
    return seconds_an_update(
        lambda pages, slots, new: kv_append(pages, 1, slots, new, new, **how), pages, times, slots, new
    )


def make_rows(call: Timed) -> SequenceRows:
    """Sequences whose blocks lie scattered over the pool."""
    width = ceil_div(call.context, call.block_size)
    blocks = 1 + np.random.default_rng(0).permutation(call.num_sequences * width)
    lens = (np.full(call.num_sequences, value, np.int32) for value in (call.context, call.new))
    starts = np.arange(call.num_sequences, dtype=np.int32) * call.new
    table = jnp.asarray(blocks.reshape(call.num_sequences, width), jnp.int32)
    most = call.num_sequences * call.new if call.entry == "prefill" else call.new
    return SequenceRows(table, *map(jnp.asarray, lens), jnp.asarray(starts), most)


def make_pages(call: Timed) -> KvPages:
    """Pages of random numbers, room for an append's tokens included."""
    num_blocks = 2 + call.num_sequences * ceil_div(max(call.context, call.new), call.block_size)
    shape = (call.layers, num_blocks, call.block_size, call.num_kv_heads)

    def fill(leaf):
        return jax.random.normal(jax.random.key(leaf.ndim), leaf.shape, jnp.bfloat16).astype(leaf.dtype)

    return jax.jit(lambda: jax.tree.map(fill, abstract_pages(call.kv_format, shape, call.head_dim, call.head_dim)))()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _parse(arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("device_kernels.json"), help="where the lines of JSON go")
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    parser.add_argument("--interpret-smoke", action="store_true", help="everything at a tiny size, on a CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
