# SPDX-License-Identifier: Apache-2.0
"""Figures of a call compiled for an NVIDIA GPU that is not here: what XLA dumps, and what ptxas says of its PTX."""

import importlib.util
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from benchmarks.static.layer_rows import WRITING
from benchmarks.static.rows import Row, arguments, donated
from benchmarks.static.traffic import traffic
from metrale_jax.aot.targets import Target
from metrale_jax.core.errors import ConfigError

# Of one multiprocessor of compute capability 9.0 and 10.0 alike (CUDA C++ programming guide, technical specifications).
REGISTERS, REGISTERS_A_TIME = 65536, 256
SHARED_BYTES, SHARED_RESERVED = 233472, 1024
MAX_WARPS, MAX_BLOCKS, WARP = 64, 32, 32
# A warp that loads as much a thread asks for whole sectors of each row of a head.
WIDE_BYTES = 8

_THUNK = re.compile(
    r"^\d+: kCustomKernel \[.*?\] (\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]  "
    r"shared_memory: (\d+) bytes"
)
_OTHER_THUNK = re.compile(r"^\d+: (k\w+) ")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.(v[248]))?\.[bsuf](\d+)\b")
_STORE = re.compile(r"\bst\.global(?:\.[\w:]+)*?(?:\.(v[248]))?\.[bsuf](\d+)\b")
_ASYNC_LOAD = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)[,;]")
_MATRIX = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")


def figures(row: Row, target: Target) -> dict:
    """The figures of one row, as they are recorded."""
    call, shapes = arguments(row, SingleDeviceSharding(target.devices()[0]))
    with tempfile.TemporaryDirectory() as folder:
        jitted = jax.jit(call, donate_argnums=donated(row))
        compiled = jitted.lower(*shapes).compile(compiler_options={"xla_dump_to": folder})
        found = {**read_dump(Path(folder), row), **traffic(row)}
    return {**found, **state_figures(row, found, compiled.memory_analysis().temp_size_in_bytes)}


def state_figures(row: Row, found: dict, temp_bytes: int) -> dict:
    """Of a call that writes states in place: its temporaries beside the states or what is pending, and the bytes that
    the kernel's instructions ask for against the least, both with what masks leave out. Nobody reads from a program how
    often a loop over pending tokens and drafts goes round."""
    if row.entry not in WRITING:
        return {}
    states, *pending = (x.size * x.dtype.itemsize for x in jax.tree.leaves(WRITING[row.entry](row)))
    smallest = min(states, max(pending, default=states))
    shares = {"temp_bytes": temp_bytes, "pool_share": round(temp_bytes / smallest, 4)}
    if row.sizes.width > 1 or row.sizes.room or "unmasked_bytes" not in found:
        return shares
    a_thread = sum(int(size) * count for kind in ("loads", "stores") for size, count in found[kind].items())
    asked = a_thread * found["threads"] * math.prod(found["grid"])
    return {**shares, "asked_ratio": round(asked / found["unmasked_bytes"] / row.sizes.num_sequences, 4)}


def read_dump(folder: Path, row: Row) -> dict:
    """The figures that a folder of XLA's dump holds; those of the whole call are its largest kernel's."""
    (sequence,) = folder.glob("*thunk_sequence.txt")
    launches = parse_thunks(sequence.read_text())
    modules = [path for path in folder.glob("*.ptx") if ".entry" in path.read_text()]
    kernels = {name: found for path in modules for name, found in _kernel(path).items()}
    main = max((launch for launch in launches if launch["name"] in kernels), key=_weight(kernels, row))
    found = kernels[main["name"]]
    shared = main["shared_bytes"] + found.pop("static_shared")
    blocks = blocks_per_multiprocessor(main["threads"], found["registers"], shared)
    return {
        "kernels": len(launches),
        "grid": main["grid"],
        "threads": main["threads"],
        **found,
        "spill_bytes": sum(kernel["spill_bytes"] for kernel in kernels.values()),
        "shared_bytes": shared,
        "blocks": blocks,
        "occupancy": round(blocks * main["threads"] / WARP / MAX_WARPS, 3),
    }


def _weight(kernels: dict, row: Row):
    """The kernel of interest is the one that is named after the entry; without such, the longest."""
    return lambda launch: (row.entry in launch["name"], kernels[launch["name"]]["instructions"])


def parse_thunks(text: str) -> list[dict]:
    """The kernels of a thunk sequence in order, up to the command buffer that holds them again."""
    launches = []
    for line in text.splitlines():
        if found := _THUNK.match(line):
            name, *numbers = found.groups()
            *shape, shared = map(int, numbers)
            launches.append(
                {"name": name, "grid": shape[:3], "threads": shape[3] * shape[4] * shape[5], "shared_bytes": shared}
            )
        elif (other := _OTHER_THUNK.match(line)) and other.group(1) != "kCommandBuffer":
            launches.append({"name": other.group(1), "grid": [], "threads": 0, "shared_bytes": 0})
    return launches


def _kernel(path: Path) -> dict[str, dict]:
    """Figures of the one kernel of a PTX file, by its name."""
    text = path.read_text()
    name = re.search(r"\.entry (\w+)", text).group(1)
    return {name: {**assembled(path, _TARGET.search(text).group(1)), **count_instructions(text)}}


def assembled(path: Path, architecture: str) -> dict:
    """Registers of a thread, bytes spilled and static shared memory, by ptxas."""
    command = [str(ptxas()), "-v", f"--gpu-name={architecture}", str(path), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = map(int, _SPILLS.search(said).groups())
    shared = _STATIC_SHARED.search(said)
    return {
        "registers": int(_REGISTERS.search(said).group(1)),
        "spill_bytes": stores + loads + stack,
        "static_shared": int(shared.group(1)) if shared else 0,
    }


def count_instructions(text: str) -> dict:
    """Matrix instructions by kind, loads and stores of device memory by bytes a thread, and the length of a kernel's
    PTX."""
    loads, stores = Counter(_loads(text)), Counter(_sizes(_STORE, text))
    wide = sum(size * count for size, count in loads.items() if size >= WIDE_BYTES)
    return {
        "matrix_ops": dict(sorted(Counter(_MATRIX.findall(text)).items())),
        "loads": {str(size): loads[size] for size in sorted(loads)},
        "stores": {str(size): stores[size] for size in sorted(stores)},
        "wide_share": round(wide / max(1, sum(size * count for size, count in loads.items())), 3),
        "instructions": text.count(";\n"),
    }


def _loads(text: str) -> Iterable[int]:
    yield from _sizes(_LOAD, text)
    for size in _ASYNC_LOAD.findall(text):
        yield int(size, 0)


def _sizes(pattern: re.Pattern, text: str) -> Iterable[int]:
    for vector, bits in pattern.findall(text):
        yield int(vector[1:] or 1) * int(bits) // 8 if vector else int(bits) // 8


def blocks_per_multiprocessor(threads: int, registers: int, shared: int) -> int:
    """How many thread blocks a multiprocessor holds at once."""
    warps = -(-threads // WARP)
    a_warp = -(-registers * WARP // REGISTERS_A_TIME) * REGISTERS_A_TIME
    return min(
        MAX_BLOCKS,
        MAX_WARPS // warps,
        REGISTERS // a_warp // warps,
        SHARED_BYTES // (shared + SHARED_RESERVED),
    )


def ptxas() -> Path:
    """The assembler of the nvcc wheel. Raises `ConfigError` with its install line."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        found = Path(place) / "cu13" / "bin" / "ptxas"
        if found.exists():
            return found
    raise ConfigError(
        "ptxas is not installed, which counts a kernel's registers; run `pip install 'metrale-jax[aot]'`."
    )
