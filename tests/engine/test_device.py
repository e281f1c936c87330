# SPDX-License-Identifier: Apache-2.0
"""A device finds its programs by sizes alone; shapes that do not fit them are refused all the same."""

from dataclasses import replace

import numpy as np
import pytest

from metrale_jax.engine.rows import Rows


def rows_of(engine, count: int) -> Rows:
    none = np.zeros(count, np.int32)
    tables = tuple(np.zeros((count, engine.shapes.table_width), np.int32) for _ in engine.memory.allocators)
    return Rows(none, none, none, tables)


def test_shapes_that_no_program_was_compiled_for_are_refused_and_the_pool_stays(kit):
    kit = kit("llama-default")
    engine = kit.engine()
    rows = rows_of(engine, 8)
    engine.device.advance(rows, None)
    num_compiles = engine.device.num_compiles
    for wrong in (
        replace(rows, tables=tuple(table[:, :-1] for table in rows.tables)),
        replace(rows, seq_lens=rows.seq_lens.astype(np.int16)),
        replace(rows, known_lens=rows.known_lens[:-1]),
    ):
        with pytest.raises(TypeError):
            engine.device.advance(wrong, None)
    assert not engine.device.pool_lost
    engine.device.advance(rows, None)
    assert engine.device.num_compiles == num_compiles


def test_devices_with_pools_of_different_sizes_share_one_model(kit):
    kit = kit("llama-default")
    first, second = kit.engine(), kit.engine(max_sequences=4)
    assert first.device.pool is not second.device.pool
    job = kit.job(kit.golden.prompt[:7])
    for engine in (first, second, first):
        request = kit.submit(engine, job)
        kit.finish(engine)
        assert request.output == kit.solo(job)


def test_what_is_drawn_is_read_before_a_new_program_is_waited_for(kit):
    kit = kit("llama-default", False)
    engine = kit.engine()
    asked = []
    engine.device.has_run = lambda sizes: asked.append((sizes, len(request.output))) or bool(sizes.chunk_tokens)
    request = kit.submit(engine, kit.job(kit.golden.prompt[:7]))
    engine.step()
    assert not request.output, "read one step late"
    engine.step()
    assert len(request.output) == 1 and not engine._unread, "its first token is out, and nothing new was launched"
    kit.finish(engine)
    assert request.output == kit.solo(kit.job(kit.golden.prompt[:7]))
    assert asked
