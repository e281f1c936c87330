# SPDX-License-Identifier: Apache-2.0
"""What a load does to the memory of its process: no collections meanwhile, and what was freed is given back."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_memory() -> Iterator[None]:
    """A load during which nothing is collected, and after which what compiling and reading freed goes to the system.

    Tracing makes hundreds of thousands of objects that live on; each full collection would walk them all.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        release_freed_memory()


def release_freed_memory() -> None:
    """Nothing; memory that was freed leaves the process. The C library keeps it otherwise, in an arena per thread."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own; other C libraries keep little
        if trim is not None:
            trim(0)
