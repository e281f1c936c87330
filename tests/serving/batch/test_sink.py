# SPDX-License-Identifier: Apache-2.0
"""Lines held in a journal until their place has come."""

import random

import pytest

from serving.batch.jsonl import JsonlFile
from serving.batch.sink import HeldSink
from tests.serving.batch.inputs import read


def text(line):
    return b'{"line":%d,"text":"%s"}\n' % (line, b"x" * (line % 50))


@pytest.mark.parametrize("compact_bytes", [0, 300, 10**6])
def test_shuffled_lines_come_out_in_order_through_breaks_and_compaction(tmp_path, compact_bytes):
    output, journal = tmp_path / "out.jsonl", tmp_path / "held.jsonl"
    rng = random.Random(compact_bytes)
    lines = list(range(1, 201))
    blank = {1, 7, 8, 200}
    order = sorted(lines, key=lambda line: line + rng.uniform(0, 20))
    sink = HeldSink(JsonlFile(output), journal, True, compact_bytes)
    for count, line in enumerate(order):
        if count % 23 == 22:
            sink.close(False)
            sink = HeldSink(JsonlFile(output), journal, True, compact_bytes)
            for passed in blank & set(order[:count]):
                sink.skip(passed)
        assert line not in sink.done
        (sink.skip(line) if line in blank else sink.put(line, text(line)))
        written = [got for got in output.read_bytes().splitlines(keepends=True)]
        expected = [text(before) for before in range(1, sink.done.floor) if before not in blank]
        assert written == expected
    sink.close(True)
    assert list(read(output)) == [line for line in lines if line not in blank]
    assert journal.stat().st_size == 0


def test_a_line_in_both_files_is_not_written_twice(tmp_path):
    (tmp_path / "out.jsonl").write_bytes(text(1) + text(2))
    (tmp_path / "held.jsonl").write_bytes(text(2) + text(4) + text(3)[:5])
    sink = HeldSink(JsonlFile(tmp_path / "out.jsonl"), tmp_path / "held.jsonl", True)
    assert [line in sink.done for line in range(1, 6)] == [True, True, False, True, False]
    sink.put(3, text(3))
    sink.close(True)
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(map(text, range(1, 5)))
