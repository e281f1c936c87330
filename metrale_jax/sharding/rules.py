# SPDX-License-Identifier: Apache-2.0
"""The frozen table from logical axes to mesh axes, and the mesh itself."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from metrale_jax.core.errors import ConfigError
from metrale_jax.sharding import axes

MESH_AXES = ("data", "expert", "tensor")

RULES: Mapping[str, str | None] = MappingProxyType(
    {
        axes.VOCAB: "tensor",
        axes.HIDDEN: None,
        axes.FFN: "tensor",
        axes.HEADS: "tensor",
        axes.KV_HEADS: "tensor",
        axes.HEAD_DIM: None,
        axes.LAYERS: None,
        axes.BLOCKS: None,
        axes.BLOCK_TOKENS: None,
        axes.EXPERTS: "expert",
        axes.SLOTS: None,
        axes.STATE: None,
        axes.QKV: "tensor",
        axes.GATE_UP: "tensor",
    }
)


def make_mesh(devices, tensor: int = 1, expert: int = 1, data: int = 1) -> Mesh:
    """A mesh `(data, expert, tensor)` over the first `data * expert * tensor` of `devices`."""
    needed = data * expert * tensor
    if needed > len(devices):
        raise ConfigError(
            f"mesh of {data}x{expert}x{tensor} needs {needed} devices, {len(devices)} are here; ask for less."
        )
    return Mesh(np.asarray(devices[:needed]).reshape(data, expert, tensor), MESH_AXES)


def partition_spec(logical: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Where each dimension goes. A dimension that its mesh axis does not divide is replicated.

    Raises `ConfigError` for an unknown logical axis, or for two dimensions on one mesh axis of size above one.
    """
    placed: list[str | None] = []
    for name, size in zip(logical, shape, strict=True):
        if name not in RULES:
            raise ConfigError(f"logical axis {name!r} has no rule; known axes are {sorted(RULES)}.")
        target = RULES[name]
        fits = target is not None and mesh.shape[target] > 1 and size % mesh.shape[target] == 0
        if fits and target in placed:
            raise ConfigError(
                f"axes {logical} put two dimensions on mesh axis {target!r}; give one of them another axis."
            )
        placed.append(target if fits else None)
    return PartitionSpec(*placed)


def tensor_size(mesh: Mesh | None) -> int:
    """Devices that share each layer; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape["tensor"]


def named_sharding(logical: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of an array of `shape` with these logical axes on `mesh`."""
    return NamedSharding(mesh, partition_spec(logical, shape, mesh))
