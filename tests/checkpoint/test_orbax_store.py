# SPDX-License-Identifier: Apache-2.0
"""Saved params come back, under another sharding too, and a store that does not fit is refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.checkpoint.orbax_store import restore_metadata, restore_params, save_params
from metrale_jax.core.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
METADATA = {"architecture": "LlamaForCausalLM", "rope": {"theta": 1e4}}


def tree():
    return {"embed": jnp.arange(12.0).reshape(3, 4), "layers": [{"norm": jnp.ones(4, jnp.bfloat16)}]}


def abstract_of(params):
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), params)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("orbax") / "store"
    save_params(path, tree(), METADATA)
    return path


def refused(store, abstract):
    with pytest.raises(CheckpointError) as caught:
        restore_params(store, abstract)
    return str(caught.value)


def test_params_and_metadata_come_back(store):
    restored = restore_params(store, abstract_of(tree()))
    assert jax.tree.structure(restored) == jax.tree.structure(tree())
    for array, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(tree()), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected))
    assert restore_metadata(store) == METADATA


def test_leaves_that_are_missing_or_unexpected_or_misshapen_are_named(store):
    fitting = abstract_of(tree())
    extra = dict(fitting, head=fitting["embed"])
    assert "1 missing: head [3, 4]." in refused(store, extra)
    assert "1 unexpected: layers/0/norm [4]." in refused(store, {"embed": fitting["embed"]})
    misshapen = dict(fitting, embed=jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=fitting["embed"].sharding))
    assert "embed is [3, 4], expected [4, 3]" in refused(store, misshapen)


def test_another_dtype_is_converted(store):
    abstract = abstract_of(tree())
    abstract["embed"] = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=abstract["embed"].sharding)
    assert restore_params(store, abstract)["embed"].dtype == jnp.bfloat16


def test_a_store_is_never_overwritten(store):
    with pytest.raises(CheckpointError, match="already holds"):
        save_params(store, tree(), METADATA)


def test_an_unfinished_or_absent_store_is_told(tmp_path):
    save_params(tmp_path / "store", tree(), METADATA)
    (tmp_path / "store" / "metadata.json").unlink()
    assert "lacks metadata.json" in refused(tmp_path / "store", abstract_of(tree()))
    assert "lacks params and metadata.json" in refused(tmp_path / "nowhere", abstract_of(tree()))


def test_a_damaged_store_is_told(tmp_path):
    save_params(tmp_path / "store", tree(), METADATA)
    damaged = 0
    for file in (tmp_path / "store" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff" * 16)
            damaged += 1
    assert damaged
    assert "is damaged" in refused(tmp_path / "store", abstract_of(tree()))


def test_a_store_moves_between_one_device_and_a_mesh(tmp_path):
    environment = dict(
        os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT)
    )
    script = Path(__file__).with_name("sharded_script.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "ok", done.stderr[-3000:]
