# SPDX-License-Identifier: Apache-2.0
"""Command-line flags made from the fields of config dataclasses, so that the two cannot drift apart."""

import argparse
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# How a number that may be None is said not to be there.
NONES = ("none", "off")


def add_flags(parser: argparse.ArgumentParser, config: type, **defaults: Any) -> None:
    """One flag for each field of `config`: `--max-tokens N`, `--no-skip-special-tokens`, `--stop TEXT` (repeatable),
    `--logit-bias 5:1,7:-2`.

    `defaults` are the values that the command puts in place of the dataclass's own.
    """
    hints = get_type_hints(config)
    # What the fields mean is told where they are, and nowhere else.
    group = parser.add_argument_group(config.__name__, (config.__doc__ or "").replace("`", ""))
    for field in fields(config):
        flag = "--" + field.name.replace("_", "-")
        kinds = kinds_of(hints[field.name])
        own = None if field.default is MISSING else field.default
        about = f"default {defaults.get(field.name, own)}"
        literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if bool in kinds and literals:
            group.add_argument(
                flag, nargs="?", const=True, choices=literals, default=argparse.SUPPRESS, help=f"alone: yes; {about}"
            )
            group.add_argument(
                "--no-" + flag[2:], dest=field.name, action="store_false", default=argparse.SUPPRESS, help="as it says"
            )
        elif bool in kinds:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=about)
        elif tuple in kinds and Mapping in kinds:
            group.add_argument(
                flag, type=_pairs, action="extend", metavar="ID:NUMBER,...", default=argparse.SUPPRESS, help="pairs"
            )
        elif tuple in kinds or list in kinds:
            of = int if "ids" in field.name else str
            group.add_argument(flag, type=of, action="append", default=argparse.SUPPRESS, help="may be repeated")
        else:
            of = next((kind for kind in (int, float) if kind in kinds), str)
            name = of.__name__.upper().replace("STR", "TEXT")
            if of is not str and types.NoneType in kinds:
                of, name = _or_none(of), f"{name}|none"
            group.add_argument(flag, type=of, metavar=name, default=argparse.SUPPRESS, help=about)


def chosen(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of `config` that the user set."""
    given = vars(arguments)
    return {field.name: given[field.name] for field in fields(config) if field.name in given}


def is_none(text: str) -> bool:
    """Whether the text says of what may be None that it is not there."""
    return text.lower() in NONES


def _or_none(of: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if is_none(text) else of(text)

    read.__name__ = of.__name__  # as argparse says what a value is not
    return read


def _pairs(text: str) -> list[tuple[int, float]]:
    pairs = []
    for part in text.split(","):
        token, _, value = part.partition(":")
        try:
            pairs.append((int(token), float(value)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no token id, colon and number; write 5:1,7:-2") from None
    return pairs


def kinds_of(hint: Any) -> set[type]:
    """The types that an annotation allows, of a generic one its origin; a `Literal` stays as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        return {kind for part in get_args(hint) for kind in kinds_of(part)}
    return {hint if get_origin(hint) is Literal else get_origin(hint) or hint}
