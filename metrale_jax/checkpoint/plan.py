# SPDX-License-Identifier: Apache-2.0
"""`load_plan`: whether a checkpoint holds exactly what a tree of specs wants, told before any data is read."""

import re
from dataclasses import dataclass

import jax

from metrale_jax.checkpoint.source import AbstractTensorSource
from metrale_jax.core.errors import CheckpointError
from metrale_jax.core.specs import ParamSpec, Source

_SHOWN = 8
_FLOATS = ("float", "bfloat")


@dataclass(frozen=True)
class LoadPlan:
    """What a load that was found possible will do: arrays to make, bytes to read, tensors left alone."""

    num_params: int
    num_bytes: int
    ignored: tuple[str, ...]


def load_plan(specs, source: AbstractTensorSource, ignored: tuple[str, ...] = ()) -> LoadPlan:
    """The plan for loading `specs` (a tree of `ParamSpec`) from `source`.

    `ignored` are regular expressions; a tensor that no spec names must match one of them whole. `CheckpointError`
    lists every tensor that is missing, unexpected, of another shape or neither of floating point nor the codes that are
    expected.
    """
    leaves = spec_leaves(specs)
    infos = source.tensors()
    wanted = {item.name: item for spec in leaves for item in spec.sources}
    spare = [name for name in infos if name not in wanted]
    skipped = tuple(name for name in spare if any(re.fullmatch(pattern, name) for pattern in ignored))
    present = [item for name, item in wanted.items() if name in infos]
    problems = (
        _listed("missing", [f"{item.name} {list(item.shape)}" for name, item in wanted.items() if name not in infos]),
        _listed(
            "unexpected",
            [f"{source.location(name)} {list(infos[name].shape)}" for name in sorted(set(spare) - set(skipped))],
        ),
        _listed("of the wrong shape", [text for item in present if (text := _wrong_shape(item, source))]),
        _listed("not of floating point", [text for item in present if (text := _not_floating(item, source))]),
        _listed("not the codes expected", [text for item in present if (text := _wrong_codes(item, source))]),
    )
    if any(problems):
        raise CheckpointError(
            " ".join(("The checkpoint is not what its config promises.", *filter(None, problems)))
            + " Check that config and weights are complete and of one model and revision."
        )
    return LoadPlan(len(leaves), sum(source_bytes(spec, source) for spec in leaves), skipped)


def spec_leaves(specs) -> list[ParamSpec]:
    """The specs of a tree in its order."""
    leaves = jax.tree.leaves(specs)
    assert all(isinstance(leaf, ParamSpec) for leaf in leaves), "a tree of specs has ParamSpec leaves only"
    return leaves


def source_bytes(spec: ParamSpec, source: AbstractTensorSource) -> int:
    """Bytes of the arrays that a parameter is made from."""
    return sum(source.tensors()[item.name].num_bytes for item in spec.sources)


def _wrong_shape(item: Source, source: AbstractTensorSource) -> str | None:
    shape = source.tensors()[item.name].shape
    if shape == item.shape:
        return None
    return f"{source.location(item.name)} is {list(shape)}, expected {list(item.shape)}"


def _not_floating(item: Source, source: AbstractTensorSource) -> str | None:
    dtype = source.tensors()[item.name].dtype
    return None if item.dtype or dtype.startswith(_FLOATS) else f"{source.location(item.name)} is {dtype}"


def _wrong_codes(item: Source, source: AbstractTensorSource) -> str | None:
    dtype = source.tensors()[item.name].dtype
    if item.dtype in ("", dtype):
        return None
    return f"{source.location(item.name)} is {dtype}, expected {item.dtype}"


def _listed(fault: str, tensors: list[str]) -> str | None:
    if not tensors:
        return None
    more = f"; and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    noun = "tensor is" if len(tensors) == 1 else "tensors are"
    return f"{len(tensors)} {noun} {fault}: {'; '.join(tensors[:_SHOWN])}{more}."
