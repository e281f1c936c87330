# SPDX-License-Identifier: Apache-2.0
"""Host time of the engine's plain Python, in microseconds: the median of several tries with p10 and p90.

    python -m benchmarks.host_loop --only radix engine dispatch

One JSON line a figure. No model runs: `engine` steps over a device that answers at once, `dispatch` over compiled
programs that take a model's many arrays and compute next to nothing.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.engine.admission import Ask, Limits
from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.device import Device, Hidden
from metrale_jax.engine.lease import Lease
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.paged import PagedKvSpec
from metrale_jax.state.pool import make_layout, make_pool
from metrale_jax.steps.outcome import StepOutput

TRIES = 25
BLOCK_SIZE = 16
NUM_PROMPTS = 64
PROMPT_BLOCKS = 128
CONTEXT = 8192
CACHED_BLOCKS = NUM_PROMPTS * PROMPT_BLOCKS


def radix_once(windows: tuple[int, ...]) -> dict[str, float]:
    """Microseconds a block of each operation, on a tree of 8192 blocks: prompts of 2048 tokens that share the half."""
    allocators = tuple(BlockAllocator(2 * CACHED_BLOCKS + 1) for _ in windows)
    tree = RadixTree(allocators, windows, BLOCK_SIZE)
    half = PROMPT_BLOCKS * BLOCK_SIZE // 2
    prompts = [[*range(half), *range(half * (2 + n), half * (3 + n))] for n in range(NUM_PROMPTS)]
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable):
        start = time.perf_counter()
        out = work()
        spent[name] += time.perf_counter() - start
        return out

    def admit(prompt: list[int]) -> Lease:
        match = tree.match(None, prompt, len(prompt))
        return Lease(allocators, windows, BLOCK_SIZE, match.tables, pin=Pin(tree, match.node))

    leases = [Lease(allocators, windows, BLOCK_SIZE, pin=Pin(tree, tree.match(None, [], 0).node)) for _ in prompts]
    num_tokens = 2 * half
    for lease in leases:
        timed("allocate", lambda lease=lease: lease.grow(num_tokens, 0))
    for lease, prompt in zip(leases, prompts, strict=True):
        timed("insert", lambda lease=lease, prompt=prompt: lease.pin.extend(prompt, lease.tables))
    for lease in leases:
        timed("release", lease.release)
    leases = [timed("match", lambda prompt=prompt: admit(prompt)) for prompt in prompts]
    assert all(lease.pin.num_tokens == num_tokens for lease in leases)
    for lease in leases:
        timed("release_matched", lease.release)
    figures = {name: seconds / CACHED_BLOCKS for name, seconds in spent.items()}
    num_nodes = tree.stats.num_nodes
    spent.clear()
    timed("evict", lambda: tree.evict([allocator.num_usable for allocator in allocators]))
    assert tree.stats.num_nodes == 0
    return {name: seconds * 1e6 for name, seconds in {**figures, "evict": spent["evict"] / num_nodes}.items()}


def radix() -> list[dict]:
    """A figure for each operation of the prefix cache, for one group of blocks and for two, one with a window."""
    figures = []
    for windows in ((0,), (0, 512)):
        tries = [radix_once(windows) for _ in range(TRIES)]
        for name in tries[0]:
            values = [figure[name] for figure in tries]
            figures.append(figure_of(f"radix/{name}/{len(windows)}-groups", "us_per_block", values))
    return figures


def figure_of(name: str, unit: str, values: list[float]) -> dict:
    """The median of `values` under `unit`, and the tenths below and above it."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    numbers = {unit: tenths[4], "p10": tenths[0], "p90": tenths[8]}
    return {"name": name, **{key: round(number, 3) for key, number in numbers.items()}, "tries": len(values)}


class InstantDevice:
    """An engine's device whose every token is 5, at once."""

    num_compiles = 0
    pool_lost = False

    @staticmethod
    def has_run(sizes):
        """Nothing is compiled."""
        return True

    def __init__(self, num_rows: int):
        ones = np.ones(num_rows, np.int32)
        flags = np.ones((num_rows, 1), bool)
        self._out = StepOutput(5 * ones[:, None], ones, flags[:, 0], flags)

    def resident(self, arrays):
        """The same arrays."""
        return arrays

    def advance(self, decoding, chunks) -> Hidden:
        """Nothing."""
        return Hidden(None, None)

    def draw(self, hidden, picks, rows, num_logprobs: int) -> StepOutput:
        """The same tokens."""
        return self._out

    def copy_blocks(self, copies) -> None:
        """Nothing."""

    def copy_slots(self, copies) -> None:
        """Nothing."""

    def fetch(self, out):
        """What it is given."""
        return out


class SmallSteps:
    """`Steps` whose programs compute next to nothing."""

    num_compiles = 0

    def __init__(self):
        self.model = SimpleNamespace(layout=make_layout(((PagedKvSpec(1, 8, 8, 0, "float32"),),), BLOCK_SIZE, "cpu"))

    def make_pool(self, num_blocks: tuple[int, ...], fill: Callable):
        """A fresh pool."""
        return make_pool(self.model.layout, num_blocks, fill)

    def executable(self, name: str, *arguments, **static) -> Callable:
        """The compiled program."""
        programs = {"advance": small_advance, "finish": small_finish, "pick_rows": lambda rows, picks: rows[picks]}
        donated = (1,) if name == "advance" else ()
        return jax.jit(programs[name], donate_argnums=donated, keep_unused=True).lower(*arguments).compile()


def small_advance(params, pool, last_tokens, decoding, chunks):
    """The pool as it is, and hidden rows."""
    counts = [len(rows.state.seq_len) for rows in (decoding, chunks) if not isinstance(rows, tuple)]
    return pool, jnp.zeros((sum(counts), 1)), ()


def small_finish(params, last_tokens, hidden, rows):
    """The same tokens, and 5 for every row."""
    flags = jnp.ones((len(hidden), 1), bool)
    return last_tokens, StepOutput(jnp.full(flags.shape, 5), jnp.ones(len(hidden), jnp.int32), flags[:, 0], flags)


def dispatch() -> list[dict]:
    """A figure for each number of arrays that a model may have, with 64 answers under way."""
    figures = []
    for num_leaves in (1, 300):
        leaf = jnp.zeros(8)
        params = DecoderParams(leaf, (leaf,) * num_leaves, leaf)
        shapes = shapes_for(64)
        engine = loaded_engine(64, (0,), Device(SmallSteps(), params, 64, shapes))
        figures.append(
            figure_of(f"dispatch/decode/64/{num_leaves}-arrays", "us_per_step", means(step_times(engine, 480)))
        )
    return figures


def shapes_for(num_running: int) -> ShapePlan:
    """Sizes of steps for so many answers under way, and 8 more."""
    return ShapePlan(num_running + 8, CONTEXT // BLOCK_SIZE, 512, 8, 8)


def loaded_engine(num_running: int, windows: tuple[int, ...], device=None) -> Engine:
    """An engine in which `num_running` answers of endless length are under way, from prompts of their own."""
    shapes = shapes_for(num_running)
    context, num_slots = CONTEXT, shapes.num_slots
    regime, num_blocks = (lambda length: ()), num_slots * context // BLOCK_SIZE
    memory = Memory(num_blocks + 1, windows, BLOCK_SIZE, regime, keep=True)
    limits = Limits(context, num_slots, 32000, BLOCK_SIZE, num_blocks, 8)
    engine = Engine(device or InstantDevice(num_slots), memory, shapes, limits)
    for index in range(num_running):
        engine.submit(Ask([index, *range(300)], SamplingParams(max_tokens=None), [index]))
    while engine.filling or engine.waiting:
        engine.step()
    assert len(engine.running) == num_running
    return engine


def step_times(engine: Engine, count: int, before: Callable = lambda: None) -> list[float]:
    """Microseconds of each of `count` steps; `before` is called ahead of each, and not timed."""
    times = []
    for _ in range(count):
        before()
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def means(times: list[float]) -> list[float]:
    """The means of runs of `BLOCK_SIZE` steps, in each of which every sequence enters a block once."""
    runs = range(0, len(times) - BLOCK_SIZE + 1, BLOCK_SIZE)
    return [statistics.mean(times[start : start + BLOCK_SIZE]) for start in runs]


def engine_steps() -> list[dict]:
    """A figure for each load: answers that go on, prompts that enter beside them, and many who wait."""
    figures = []

    def add(name: str, times: list[float]) -> None:
        figures.append(figure_of(f"engine/{name}", "us_per_step", means(times)))

    for num_running in (1, 8, 64):
        add(f"decode/{num_running}", step_times(loaded_engine(num_running, (0,)), 480))
    add("decode/64/2-groups", step_times(loaded_engine(64, (0, 512)), 480))
    engine = loaded_engine(64, (0,))
    serial = iter(range(1000, 100_000))

    def one_more():
        """One prompt of 256 tokens, half of them cached, with an answer of 4."""
        tokens = [*range(128), *[next(serial) % 32000] * 128]
        engine.submit(Ask(tokens, SamplingParams(max_tokens=4), [0]))

    add("mixed/64", step_times(engine, 480, one_more))
    for num_waiting in (10, 10_000):
        engine = loaded_engine(64, (0,))
        for index in range(num_waiting + 8):
            engine.submit(Ask([7, index, *range(200)], SamplingParams(max_tokens=None), [0]))
        for _ in range(20):  # those for whom there are slots enter
            engine.step()
        add(f"decode/72/{num_waiting}-waiting", step_times(engine, 480))
    return figures


BENCHMARKS = {"radix": radix, "engine": engine_steps, "dispatch": dispatch}


def main() -> None:
    """Prints the figures asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=list(BENCHMARKS), help="which to run")
    gc.collect()
    for name in parser.parse_args().only:
        for figure in BENCHMARKS[name]():
            print(json.dumps(figure))


if __name__ == "__main__":
    main()
