# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: the one place where a platform is chosen.

An implementation is a row of data: its name, the platforms it serves, and lazy import strings of its function and of
`supports`, which looks at static facts only and answers with a reason to decline or with an empty string. The platform
is an argument, carried from the composition root (or from the target being compiled for), never the attached device.
Where a row is far slower than the kernels that come before it, it serves a platform by name only: what the kernels
decline is then an error that says what they serve, not a silent loss of speed.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

PLATFORMS = ("cpu", "cuda", "tpu")


class DispatchError(ValueError):
    """An implementation asked for by name that is unknown or declines the case; `reasons` are those of each that was
    asked."""

    def __init__(self, message: str, reasons: Sequence[str] = ()):
        super().__init__(message)
        self.reasons = tuple(reasons)


@dataclass(frozen=True)
class Implementation:
    """One row of an op's table; `target` and `supports` are `"package.module:function"`, `""` serves everything.

    On `by_name_only`, some of its platforms, the row runs if it is asked for and never by itself.
    """

    name: str
    platforms: tuple[str, ...]
    target: str
    supports: str = ""
    by_name_only: tuple[str, ...] = ()

    @property
    def interpreted(self) -> "Implementation":
        """The row for tests that runs this kernel's programs on the CPU, one after another and operation by operation:
        the function beside its own whose name ends in `_interpreted`."""
        name, target = f"{self.name}-interpreted", f"{self.target}_interpreted"
        return Implementation(name, ("cpu",), target, self.supports, by_name_only=("cpu",))

    def declines(self, platform: str, by_name: bool, facts: dict) -> str:
        """Why the row does not run, or an empty string."""
        if platform not in self.platforms:
            return f"serves {self.platforms}, not {platform}"
        if platform in self.by_name_only and not by_name:
            return f"on {platform} it runs only if asked for by name"
        return imported(self.supports)(**facts) if self.supports else ""


def imported(where: str) -> Callable:
    """The function at `"package.module:function"`."""
    module, function = where.split(":")
    return getattr(importlib.import_module(module), function)


def choose(op: str, table: Sequence[Implementation], platform: str, impl: str = "auto", **facts) -> Callable:
    """The function of the first row that serves `platform` and `facts`, or of the row named `impl`.

    Raises `DispatchError` if `impl` is unknown or declines, or if no row serves; the message carries every reason.
    """
    rows = [row for row in table if impl in ("auto", row.name)]
    if not rows:
        raise DispatchError(
            f"impl={impl!r} is not one of {op}'s implementations; use {[r.name for r in table]} or 'auto'."
        )
    # What serves other platforms is a reason only for whoever asked for it, or where there is nothing else.
    here = [row for row in rows if platform in row.platforms] or rows
    reasons = []
    for row in here:
        reason = row.declines(platform, impl == row.name, facts)
        if not reason:
            return imported(row.target)
        reasons.append(f"{row.name}: {reason}")
    message = f"{op} has no implementation for {platform} that takes this ({'; '.join(reasons)}); pass impl='xla'."
    raise DispatchError(message, reasons)


def by_platform(default: Callable, **special: Callable) -> Callable:
    """`default`, or while lowering for a platform named in `special` that platform's form of the same function."""
    unknown = sorted(set(special) - set(PLATFORMS))
    assert not unknown, f"{unknown} are no platforms; known are {PLATFORMS}"

    def call(*arguments):
        return jax.lax.platform_dependent(*arguments, default=default, **special)

    return call
