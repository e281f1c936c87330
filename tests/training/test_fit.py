# SPDX-License-Identifier: Apache-2.0
"""The loop learns, and one that was stopped gives what it would have given."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.training.fit import CHECKPOINTS, Course, Lessons, fit, order
from metrale_jax.training.pack import Text, pack
from metrale_jax.training.programs import Programs, Recipe
from tests.speculative.plain_head import KINDS, D, V, config_of, params_of, random_rows

STEPS = 60


@pytest.fixture(scope="module", params=KINDS)
def run(request):
    """Programs, params and lessons in which the next token depends on the last one and its hidden row."""
    config = config_of(request.param)
    params = params_of(config)
    rng = np.random.default_rng(1)
    texts = [Text(tuple(rng.integers(0, V, 12).tolist()), 2, 12 * number) for number in range(8)]
    table = random_rows(2, V, D)
    rows = [random_rows(seed, 96, D).astype(np.float16) for seed in (3, 4, 5, 6)]
    rows[0] = (table[[token for text in texts for token in text.tokens]] * 0.5).astype(np.float16)
    scorer = table[np.asarray(params.token_ids)]
    kept = rows if request.param == "eagle3" else rows[:1]
    lessons = Lessons(pack(texts, 24), kept, table, jnp.asarray(scorer), jnp.asarray(table))
    return Programs(config, Recipe(3e-3, STEPS, 2, single_steps=20), "cpu"), params, lessons


def quiet(step, loss, right):
    """Says nothing."""


def test_the_loss_goes_down_and_the_heads_rows_stay(run, tmp_path):
    programs, params, lessons = run
    trained, history = fit(programs, params, lessons, Course(0, 1, 1e9), tmp_path, quiet)
    assert [(entry["step"], len(entry["right"])) for entry in history] == [(20, 1), (40, 2), (60, 2)]
    firsts = [entry["right"][0] for entry in history]
    assert history[2]["loss"] < 0.9 * history[1]["loss"] and firsts[0] < firsts[1] < firsts[2], history
    assert trained.head is params.head and trained.token_ids is params.token_ids
    assert not np.array_equal(trained.fc.weight, params.fc.weight)


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(run, tmp_path):
    programs, params, lessons = run
    course = Course(0, 1, 0.0, {"steps": STEPS})
    whole, history = fit(programs, params, lessons, replace(course, save_seconds=1e9), tmp_path / "whole", quiet)

    def stopping(step, loss, right):
        if step == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(programs, params, lessons, course, tmp_path / "cut", stopping)
    assert [path.name for path in (tmp_path / "cut" / CHECKPOINTS).iterdir()] == ["0000040"]
    # A save that was cut short has no metadata, and is passed over.
    (tmp_path / "cut" / CHECKPOINTS / "0000060").mkdir()
    seen = []
    again, same = fit(programs, params, lessons, course, tmp_path / "cut", lambda step, *_: seen.append(step))
    assert seen == [60] and same == history
    for array, expected in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(array, expected)
    other = replace(course, settings={"steps": 61})
    with pytest.raises(ConfigError, match="unfinished run with steps=60"):
        fit(programs, params, lessons, other, tmp_path / "cut", quiet)
    shutil.rmtree(tmp_path / "cut")


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    course = Course(7, 2, 1.0)
    found = np.concatenate([order(course, 6, step) for step in range(6)])
    assert sorted(found[:6]) == sorted(found[6:]) == list(range(6))
    assert list(found[:6]) != list(found[6:])


def test_a_loss_that_is_no_number_is_told(run, tmp_path):
    programs, params, lessons = run
    bad = replace(lessons, scorer=jnp.full_like(lessons.scorer, jnp.nan))
    with pytest.raises(ConfigError, match="the loss is nan at step 0"):
        fit(programs, params, bad, Course(0, 1, 1e9), tmp_path, quiet)
