# SPDX-License-Identifier: Apache-2.0
"""A device finds its programs by sizes alone; shapes that do not fit them are refused all the same."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from metrale_jax.engine.device import PART, Device
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
    assert len(request.output) == 1 and not engine.unread, "its first token is out, and nothing new was launched"
    kit.finish(engine)
    assert request.output == kit.solo(kit.job(kit.golden.prompt[:7]))
    assert asked


def test_blocks_of_groups_that_were_split_are_joined_as_they_were_however_many_each_has():
    rng = np.random.default_rng(0)
    sizes = ((2, 3), (1, 5))  # layers, and numbers a block, of each group
    shapes = tuple([jax.ShapeDtypeStruct((layers, PART, width), np.float32)] for layers, width in sizes)
    content = [rng.normal(size=(layers, 2 * PART, width)).astype(np.float32) for layers, width in sizes]
    parts = [tuple([whole[:, start : start + PART]] for whole in content) for start in (0, PART)]
    device = SimpleNamespace(_shapes=lambda: (shapes, ()))
    for counts in ((PART + 3, 2), (0, 1), (2 * PART, 2 * PART)):
        flat = Device.split_blocks(parts, counts)
        blocks = flat[: counts[0]], flat[counts[0] :]
        joined, slot = Device.join(device, blocks, [])
        assert slot == () and len(joined) == -(-max(counts) // PART)
        for group, count in enumerate(counts):
            whole = np.concatenate([part[group][0] for part in joined], axis=1)
            np.testing.assert_array_equal(whole[:, :count], content[group][:, :count])
            assert not whole[:, count:].any()
    for wrong in (np.zeros((2, 1, 4), np.float32), np.zeros((2, 1, 3), np.float16)):
        with pytest.raises(ValueError, match="a block is"):
            Device.join(device, ([[wrong]], []), [])
