# SPDX-License-Identifier: Apache-2.0
"""What a row of the static records is: one kernel at one choice of sizes and formats."""

from dataclasses import dataclass
from typing import Any

import jax

# The layer that a call is compiled for, of so many that its storage is stacked by.
LAYERS, LAYER = 4, 1
# Of the least bytes that a call has to move.
MOST_BYTES = 1.05


@dataclass(frozen=True)
class Row:
    """One kernel at one choice of sizes and formats, compiled by itself.

    `entry` is a key of `rows.ENTRIES`, `impl` the implementation's name, `kv_format` what its pages, states or weights
    are made of. `sizes` has its op's static sizes, and `words` that name them. `quick` rows are those that `make aot`
    compiles. `targets` names the chips that have what the kernel is made for, `()` all of the platform. `min_blocks` is
    how many thread blocks a GPU's multiprocessor has to have room for; `max_kernels` how many device programs the call
    may launch; `most_bytes` how many times the least bytes it may move.
    """

    entry: str
    impl: str
    platform: str
    dtype: str
    kv_format: str
    sizes: Any
    quick: bool = False
    min_blocks: int = 1
    max_kernels: int = 1
    most_bytes: float = MOST_BYTES
    tensor_cores: bool = True
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Names the row in tables and records."""
        return " ".join([self.entry, self.impl, f"{self.dtype}/{self.kv_format}", *self.sizes.words])


def placed(tree: Any, sharding: Any) -> Any:
    """The shapes of a tree, on the device that `sharding` names."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
