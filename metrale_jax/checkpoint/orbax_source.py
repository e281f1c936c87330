# SPDX-License-Identifier: Apache-2.0
"""`OrbaxSource`: a store of finished params as a tensor source, one tensor for each leaf, under its path in the tree.

`stored_specs` is the tree of specs that reads them: what a checkpoint's own specs make is what the store holds.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from metrale_jax.checkpoint.orbax_store import restore_arrays, store_leaves
from metrale_jax.checkpoint.source import AbstractTensorSource, TensorInfo
from metrale_jax.core.specs import Source, identity


def is_store(path: Path) -> bool:
    """Whether a directory holds a store of params, finished or not."""
    return any(child.is_dir() for child in path.glob("params*"))


def stored_specs(specs):
    """`specs` with each leaf's origin replaced by the store's entry of that leaf."""

    def stored(keys, spec):
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        return replace(spec, sources=(Source(name, spec.shape),), transform=identity)

    return jax.tree_util.tree_map_with_path(stored, specs)


class OrbaxSource(AbstractTensorSource):
    """The leaves of a store. Opening reads shapes alone; the first `read` restores all, each copy let go once taken.

    Raises `CheckpointError` for a store that is unfinished or damaged.
    """

    def __init__(self, path: Path):
        self._path = Path(path)
        self._infos = {
            name: TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype).name)
            for name, leaf in store_leaves(self._path).items()
        }
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray] = {}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every leaf of the store."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """The leaf as it was saved."""
        with self._lock:
            if name not in self._arrays:
                self._arrays = restore_arrays(self._path)
            return self._arrays[name]

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Nothing; `out` holds the leaf, converted, and the restored copy is let go."""
        np.copyto(out, self.read(name), casting="unsafe")
        with self._lock:
            self._arrays.pop(name, None)

    def location(self, name: str) -> str:
        """The store and the leaf's path in it."""
        return f"{self._path}: {name}"

    def close(self) -> None:
        """Nothing; restored arrays that nobody took are let go."""
        with self._lock:
            self._arrays = {}
