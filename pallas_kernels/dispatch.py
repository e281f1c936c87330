# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: the one place where a platform is chosen.

An implementation is a row of data: its name, the platforms it serves, a lazy import string and `supports`, which
looks at static facts only and answers with a reason to decline or with an empty string. The platform is an
argument, carried from the composition root (or from the target being compiled for), never the attached device.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

PLATFORMS = ("cpu", "cuda", "tpu")


class DispatchError(ValueError):
    """An implementation asked for by name that is unknown or declines the case."""


def always(**facts) -> str:
    """No reason to decline."""
    del facts
    return ""


@dataclass(frozen=True)
class Implementation:
    """One row of an op's table; `target` is `"package.module:function"`."""

    name: str
    platforms: tuple[str, ...]
    target: str
    supports: Callable[..., str] = always


def choose(op: str, table: Sequence[Implementation], platform: str, impl: str = "auto", **facts) -> Callable:
    """The function of the first row that serves `platform` and `facts`, or of the row named `impl`.

    Raises `DispatchError` if `impl` is unknown or declines, or if no row serves; the message carries every reason.
    """
    rows = [row for row in table if impl in ("auto", row.name)]
    if not rows:
        raise DispatchError(
            f"impl={impl!r} is not one of {op}'s implementations; use {[r.name for r in table]} or 'auto'."
        )
    reasons = []
    for row in rows:
        reason = row.supports(**facts) if platform in row.platforms else f"serves {row.platforms}, not {platform}"
        if not reason:
            module, function = row.target.split(":")
            return getattr(importlib.import_module(module), function)
        reasons.append(f"{row.name}: {reason}")
    raise DispatchError(
        f"{op} has no implementation for {platform} with {facts} ({'; '.join(reasons)}); try impl='xla'."
    )


def by_platform(default: Callable, **special: Callable) -> Callable:
    """`default`, or while lowering for a platform named in `special` that platform's form of the same function."""
    unknown = sorted(set(special) - set(PLATFORMS))
    assert not unknown, f"{unknown} are no platforms; known are {PLATFORMS}"

    def call(*arguments):
        return jax.lax.platform_dependent(*arguments, default=default, **special)

    return call
