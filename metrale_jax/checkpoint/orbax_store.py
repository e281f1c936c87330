# SPDX-License-Identifier: Apache-2.0
"""Saving placed parameters and restoring them, under the same or another sharding, with Orbax.

A store is a directory: `params/` in Orbax's format, one entry for each leaf under its path in the tree, and
`metadata.json` beside it. Orbax is imported when used; it takes a second.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from metrale_jax.core.errors import CheckpointError

_PARAMS = "params"
_METADATA = "metadata.json"
_SHOWN = 8


def save_params(path: Path, params, metadata: Mapping[str, Any]) -> None:
    """Nothing; `path`, which must not exist, holds `params` (any tree of arrays) and `metadata` (plain JSON values).

    With several processes each calls this and writes its own shards; `path` must be on storage they share.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    text, leaves = json.dumps(metadata, indent=2, allow_nan=False), _by_path(params)
    if (path / _METADATA).exists() or (path / _PARAMS).exists():
        raise CheckpointError(f"{path} already holds a store of params. Give another directory, or remove it first.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / _PARAMS, leaves)
        if jax.process_index() == 0:
            _write_whole(path / _METADATA, text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. Free space or give another directory.") from error


def restore_params(path: Path, abstract):
    """A tree like `abstract` of the saved arrays.

    A leaf of `abstract` has shape, dtype and sharding; what was saved under another sharding or dtype comes back under
    these. `CheckpointError` lists leaves that the store lacks, that
    `abstract` lacks, or whose shapes differ; nothing is read then.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    wanted = _by_path(abstract)
    _check_store(path)
    with ocp.StandardCheckpointer() as checkpointer:
        _check_leaves(path, wanted, _stored(path, checkpointer))
        try:
            restored = checkpointer.restore(path / _PARAMS, wanted)
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from error
    return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in wanted])


def store_leaves(path: Path) -> dict[str, Any]:
    """What the store holds, by path in its tree: things with `shape` and `dtype`. Reads no array."""
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    _check_store(path)
    with ocp.StandardCheckpointer() as checkpointer:
        return dict(_stored(path, checkpointer))


def restore_arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of the store in host memory, as it was saved, by path in its tree."""
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in store_leaves(path)}
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(path / _PARAMS, restore_args=as_numpy)
        except (OSError, ValueError, KeyError) as error:
            raise _unreadable(path, error) from error


def restore_metadata(path: Path) -> dict[str, Any]:
    """The metadata that `save_params` was given."""
    path = Path(path)
    _check_store(path)
    try:
        return json.loads((path / _METADATA).read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / _METADATA} is not JSON ({error}). Save the store again.") from error


def _by_path(tree) -> dict[str, Any]:
    """The leaves of a tree under their paths, in its order: `layers/3/qkv`."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in pairs}
    assert len(leaves) == len(pairs), "two leaves of the tree have one path; keys must not hold a slash"
    return leaves


def _stored(path: Path, checkpointer) -> Mapping[str, Any]:
    try:
        return checkpointer.metadata(path / _PARAMS).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(f"{path / _PARAMS} is damaged: {first_line[:300]}. Save the store again.")


def _check_store(path: Path) -> None:
    # The metadata is written last, so its absence also tells of a save that did not finish.
    absent = [name for name in (_PARAMS, _METADATA) if not (path / name).exists()]
    if absent:
        raise CheckpointError(
            f"{path} lacks {' and '.join(absent)}, so it is no finished store of params. Check the path, or save again."
        )


def _check_leaves(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    missing = [f"{name} {list(leaf.shape)}" for name, leaf in wanted.items() if name not in stored]
    extra = [f"{name} {list(leaf.shape)}" for name, leaf in stored.items() if name not in wanted]
    shapes = [
        f"{name} is {list(stored[name].shape)}, expected {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in stored and tuple(stored[name].shape) != tuple(leaf.shape)
    ]
    faults = [
        f"{len(items)} {fault}: {'; '.join(items[:_SHOWN])}{' …' if len(items) > _SHOWN else ''}."
        for fault, items in (("missing", missing), ("unexpected", extra), ("of the wrong shape", shapes))
        if items
    ]
    if faults:
        raise CheckpointError(
            f"{path} does not hold the params that are wanted. {' '.join(faults)} Restore it with the config it was "
            "saved with."
        )


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".writing")
    temporary.write_text(text)
    os.replace(temporary, path)
