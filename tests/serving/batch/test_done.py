# SPDX-License-Identifier: Apache-2.0
"""Done lines against a plain set, and ids with their first lines."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batch.done import PAGE_BYTES, DoneLines, SeenIds


@given(st.lists(st.integers(1, 60)))
@settings(max_examples=200, deadline=None)
def test_done_lines_are_those_that_were_added(lines):
    done, plain = DoneLines(), set()
    for line in lines:
        assert done.add(line) == (line not in plain)
        plain.add(line)
        assert done.count == len(plain)
        assert done.floor == next(free for free in range(1, 62) if free not in plain)
        assert [line in done for line in range(1, 62)] == [line in plain for line in range(1, 62)]


def test_bits_below_the_floor_are_dropped():
    done, rng = DoneLines(), random.Random(1)
    lines = list(range(1, 100_001))
    for start in range(0, len(lines), 500):
        some = lines[start : start + 500]
        rng.shuffle(some)
        for line in some:
            assert done.add(line)
    assert done.floor == 100_001 and done.count == 100_000
    assert len(done._bits) <= 2 * PAGE_BYTES
    assert 1 in done and 100_000 in done and 100_001 not in done


def test_an_id_belongs_to_the_line_that_brought_it_first():
    ids = SeenIds()
    assert [ids.first_line(name, line) for line, name in enumerate(['"a"', '"b"', '"a"', "1", '"1"', '"a"'], 1)] == [
        1,
        2,
        1,
        4,
        5,
        1,
    ]
    ids.close()
