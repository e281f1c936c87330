# SPDX-License-Identifier: Apache-2.0
"""What a process has mapped is held against what the system lets it map."""

import pytest

from serving.core.mappings import LIMIT, USED, room_for_as_many


@pytest.mark.parametrize("count, limit, room", [(10, "20\n", True), (11, "20\n", False), (0, "0", True)])
def test_as_much_again_has_room_or_not(tmp_path, count, limit, room):
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 00:00 0\n" * count)
    (tmp_path / "limit").write_text(limit)
    assert room_for_as_many(tmp_path / "maps", tmp_path / "limit") is room


def test_where_nothing_is_told_there_is_room(tmp_path):
    (tmp_path / "odd").write_text("unlimited")
    assert room_for_as_many(tmp_path / "maps", tmp_path / "limit")
    assert room_for_as_many(tmp_path / "odd", tmp_path / "odd")


def test_this_process_has_mappings_and_a_limit():
    assert len(USED.read_text().splitlines()) > 100 and int(LIMIT.read_text()) > 1000
