# SPDX-License-Identifier: Apache-2.0
"""Host time of the engine's plain Python, in microseconds a block: the median of several tries with p10 and p90.

    python -m benchmarks.host_loop --only radix

One JSON line a figure. Nothing here needs a device.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from metrale_jax.engine.blocks import BlockAllocator
from metrale_jax.engine.lease import Lease
from metrale_jax.engine.pin import Pin
from metrale_jax.engine.radix import RadixTree

TRIES = 25
BLOCK_SIZE = 16
NUM_PROMPTS = 64
PROMPT_BLOCKS = 128
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
            tenths = statistics.quantiles([figure[name] for figure in tries], n=10, method="inclusive")
            figures.append(
                {
                    "name": f"radix/{name}/{len(windows)}-groups",
                    "us_per_block": round(tenths[4], 3),
                    "p10": round(tenths[0], 3),
                    "p90": round(tenths[8], 3),
                    "tries": TRIES,
                }
            )
    return figures


BENCHMARKS = {"radix": radix}


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
