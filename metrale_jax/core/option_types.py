# SPDX-License-Identifier: Apache-2.0
"""Options are what their annotations say: one check for every field of a config dataclass."""

import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from metrale_jax.core.errors import ConfigError

_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    types.NoneType: "None",
}


def refuse_wrong_types(config: Any) -> None:
    """Nothing; raises `ConfigError` for a field of a config dataclass that is of none of the types it is annotated
    with. A truth is no number, and an integer is one."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, kinds = getattr(config, field.name), _kinds(hints[field.name])
        if not any(_is(value, kind) for kind in kinds):
            words = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds)
            raise ConfigError(f"{field.name}={value!r} is not {words}; give one.")
        item = _item(hints[field.name])
        if isinstance(value, list | tuple) and item is not None and not all(_is(one, item) for one in value):
            raise ConfigError(f"{field.name}={value!r} is not of {item.__name__} alone; give a list of these.")


def _kinds(hint: Any) -> tuple[type, ...]:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(get_origin(kind) or kind for kind in kinds)


def _item(hint: Any) -> type | None:
    """What the items of a list are to be, where the annotation says so with one plain type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    items = {get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple) and get_args(kind)}
    return next((one for one in items if isinstance(one, type)), None) if len(items) == 1 else None


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
