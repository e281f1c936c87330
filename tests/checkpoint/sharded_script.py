# SPDX-License-Identifier: Apache-2.0
"""Run by `test_orbax_store.py` in a process with eight CPU devices; prints `ok` when all held."""

import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from metrale_jax.checkpoint.orbax_store import restore_params, save_params
from metrale_jax.checkpoint.place import load_params, sharded_placer
from metrale_jax.checkpoint.safetensors_source import SafetensorsSource
from metrale_jax.core.specs import ParamSpec, Source


def check_restore(directory):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    one = SingleDeviceSharding(jax.devices()[0])
    rows = NamedSharding(mesh, PartitionSpec("tensor", None))
    values = {"wide": np.arange(64.0, dtype=np.float32).reshape(16, 4), "deep": (np.ones((8, 2), ml_dtypes.bfloat16),)}
    for saved_under, wanted in ((one, rows), (rows, one)):
        path = directory / type(saved_under).__name__
        save_params(path, jax.tree.map(lambda array, s=saved_under: jax.device_put(array, s), values), {})
        abstract = jax.tree.map(
            lambda array, s=wanted: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=s), values
        )
        restored = restore_params(path, abstract)
        for array, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(values), strict=True):
            assert array.sharding == wanted, array.sharding
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(array), expected)
        assert len(restored["wide"].addressable_shards) == len(wanted.device_set)


def check_load(directory):
    from safetensors.numpy import save_file

    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    weights = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    save_file({"w": weights}, directory / "model.safetensors")
    spec = ParamSpec((16, 4), ("mlp", "embed"), (Source("w", (16, 4)),))
    axes = {"mlp": "tensor", "embed": None}
    place = sharded_placer(lambda spec: NamedSharding(mesh, PartitionSpec(*(axes[axis] for axis in spec.axes))))
    (param,) = load_params([spec], SafetensorsSource(directory), np.float32, place)
    assert [shard.data.shape for shard in param.addressable_shards] == [(2, 4)] * 8
    np.testing.assert_array_equal(np.asarray(param), weights)


if __name__ == "__main__":
    check_restore(Path(sys.argv[1]))
    check_load(Path(sys.argv[1]))
    print("ok")
