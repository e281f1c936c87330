# SPDX-License-Identifier: Apache-2.0
"""How much of its memory map a process has left. Each kernel that is compiled for a CPU takes three mappings of it."""

from pathlib import Path

USED, LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def room_for_as_many(used: Path = USED, limit: Path = LIMIT) -> bool:
    """Whether the process may map as much again as it has. True where the system does not say.

    A process that comes to the limit does not hear of it in order: whatever asks for memory next fails.
    """
    try:
        with used.open("rb") as lines:
            return 2 * sum(1 for _ in lines) <= int(limit.read_text())
    except (OSError, ValueError):
        return True
