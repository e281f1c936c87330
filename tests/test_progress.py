# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows of long work."""

import pytest

from metrale_jax.progress import TerminalProgress, compiling


def test_a_late_compile_is_a_stage_of_its_own_until_it_ends():
    seen = []
    with pytest.raises(RuntimeError), compiling(lambda *stage: seen.append(stage), "advance"):
        seen.append("compiled")
        raise RuntimeError
    assert seen == [("compile advance", 0, 1), "compiled", ("compile advance", 1, 1)]


def test_a_bar_is_on_the_terminal_while_its_stage_lasts(capsys):
    progress = TerminalProgress()
    with compiling(progress, "advance"):
        assert "compile advance:   0%" in capsys.readouterr().err
        with compiling(progress, "advance"):
            pass
        progress("generate", 1, 3)
        assert "generate:" in capsys.readouterr().err
    progress("generate", 3, 3)
    assert not progress._bars
