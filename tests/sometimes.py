# SPDX-License-Identifier: Apache-2.0
"""Long lists of parameters of which a few run with every change and all with `make test-all`."""

from collections.abc import Iterable

import pytest


def mostly_slow(values: Iterable, always: Iterable[str], named=str) -> list:
    """`values` as pytest parameters with ids by `named`; those whose id is not in `always` are marked slow.

    An id in `always` that is none of theirs is an error, so that a renamed case is not lost.
    """
    values, always = list(values), set(always)
    unknown = always - {named(value) for value in values}
    assert not unknown, f"{sorted(unknown)} are no parameters; known are {sorted(map(named, values))}"
    marks = [() if named(value) in always else pytest.mark.slow for value in values]
    return [pytest.param(value, id=named(value), marks=mark) for value, mark in zip(values, marks, strict=True)]
