# SPDX-License-Identifier: Apache-2.0
"""`Home`: where the arrays of a model's steps are, on one device or shared out over a mesh."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from metrale_jax.state import paged
from metrale_jax.state.pool import Pool, pool_specs


@dataclass(frozen=True)
class Home:
    """`everywhere` is the sharding of what each device has whole; the pool's heads are shared out over `mesh`, if any.

    A pool lies row-major, as the steps work on rows of heads: a TPU's default layout puts the dimension that pads least
    last, and each step would begin and end with a copy.
    """

    everywhere: Sharding
    mesh: Mesh | None = None

    @property
    def devices(self) -> list[jax.Device]:
        """All devices, in the order of the mesh."""
        return list(self.everywhere.device_set) if self.mesh is None else list(self.mesh.devices.flat)

    def pool_formats(self, pool: Pool) -> Pool:
        """The layout and sharding of each array of a pool."""
        if self.mesh is None:
            return jax.tree.map(lambda leaf: lying_row_major(leaf, self.everywhere), pool)
        specs = pool_specs(pool, self.mesh)
        return jax.tree.map(lambda leaf, spec: lying_row_major(leaf, NamedSharding(self.mesh, spec)), pool, specs)

    def settled(self, arrays: Any) -> Any:
        """Shapes of `arrays` as a step takes them: what has no place of its own yet is everywhere."""
        return jax.tree.map(lambda leaf: leaf if _has_place(leaf) else placed_as(leaf, self.everywhere), arrays)


def row_major(device: jax.Device) -> Home:
    """The home of a model that `device` has for itself."""
    return Home(SingleDeviceSharding(device))


def row_major_over(mesh: Mesh) -> Home:
    """The home of a model that the devices of `mesh` share."""
    return Home(NamedSharding(mesh, PartitionSpec()), mesh)


def placed_as(leaf: Any, where: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `leaf` under a sharding or format."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def lying_row_major(leaf: Any, sharding: Sharding) -> Format:
    """The format of an array of a pool under a sharding: row-major, but for the axis of one head."""
    return Format(Layout(paged.order_in_memory(sharding.shard_shape(leaf.shape))), sharding)


def _has_place(leaf: Any) -> bool:
    # Arrays that were put on the default device by the way go where the others are.
    return getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)
