# SPDX-License-Identifier: Apache-2.0
"""What figures have to keep to. Pure functions of recorded data, so that the suite holds them without a compiler."""

from benchmarks.static.rows import Row

# The share of bytes that threads load eight or sixteen at a time; the rest are lengths, block ids and scales, which is
# much beside narrow heads of eight bits, and next to nothing is wide once a compiler no longer sees rows in one piece.
WIDE_SHARE = 0.5
# Instructions ask for more than is moved: threads of a program that need one key each ask for it. A state that is read
# and written twice doubles what they ask for.
MOST_ASKED = 1.75
# VMEM of the TPU that has least of it, less what the compiler needs beside a kernel's buffers.
MOST_VMEM_BYTES = 48 << 20
# How much worse than its record a figure may be, and which way is worse.
RECORDED = {
    "registers": 1.1,
    "shared_bytes": 1.1,
    "kernels": 1.0,
    "spill_bytes": 1.0,
    "vmem_bytes": 1.0,
    "bytes_ratio": 1.0,
    "asked_ratio": 1.0,
}


def problems(row: Row, figures: dict, recorded: dict | None) -> list[str]:
    """What speaks against a row's figures, each with its value and limit; `recorded` are those of the record."""
    return [*_limits(row, figures), *_against_record(figures, recorded or {})]


def _limits(row: Row, figures: dict) -> list[str]:
    found = []
    if figures.get("spill_bytes", 0):
        found.append(f"{figures['spill_bytes']} bytes are spilled, none may be")
    if figures.get("blocks", row.min_blocks) < row.min_blocks:
        found.append(f"{figures['blocks']} blocks fit a multiprocessor, {row.min_blocks} are meant to")
    if figures.get("kernels", 1) > row.max_kernels:
        found.append(f"{figures['kernels']} kernels are launched, {row.max_kernels} are meant to be")
    if row.tensor_cores and not sum(figures.get("matrix_ops", {"": 1}).values()):
        found.append("no matrix instruction is among them")
    if row.tensor_cores and figures.get("wide_share", 1) < WIDE_SHARE:
        found.append(f"{figures['wide_share']} of the bytes are loaded in wide pieces, {WIDE_SHARE} are meant to be")
    if figures.get("bytes_ratio", 1) > row.most_bytes:
        found.append(f"{figures['bytes_ratio']} of the least bytes are moved, {row.most_bytes} may be")
    if figures.get("asked_ratio", 1) > MOST_ASKED:
        found.append(f"{figures['asked_ratio']} of the least bytes are asked for, {MOST_ASKED} may be")
    if figures.get("pool_share", 0) >= 1:
        found.append(
            f"temporaries are {figures['pool_share']} times the smallest array of the pool, none may be copied"
        )
    if figures.get("vmem_bytes", 0) > MOST_VMEM_BYTES:
        found.append(f"{figures['vmem_bytes']} bytes of VMEM are taken, {MOST_VMEM_BYTES} may be")
    return found


def _against_record(figures: dict, recorded: dict) -> list[str]:
    return [
        f"{name} is {figures[name]}, recorded is {recorded[name]}"
        for name, slack in RECORDED.items()
        if name in figures and name in recorded and figures[name] > recorded[name] * slack
    ]
