# SPDX-License-Identifier: Apache-2.0
"""A limit on the norm of recurrent state acts where a sequence stands, not where a step happened to end."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.admission import Ask
from metrale_jax.engine.warmup import LimitSlots, all_programs
from metrale_jax.evaluation import chunked_logits
from metrale_jax.generate import generate_tokens, limited_spans
from metrale_jax.models.decoder import make_model
from metrale_jax.run_options import RunOptions, chosen_formats
from metrale_jax.state.formats import StateFormats
from metrale_jax.steps.build import Steps
from metrale_jax.steps.home import row_major
from tests.conftest import nan_fill
from tests.engine.test_state_space_answers import PARAMS, answers, engine_of

MAX_NORM, EVERY = 0.25, 64
# What ends before a limit, on it, a token later, and two limits later; an answer of 20 tokens crosses one as it grows.
LENGTHS = (60, 64, 65, 130)


class Limited:
    """A golden model under a limit."""

    def __init__(self, golden):
        formats = StateFormats("float32", max_norm=MAX_NORM, norm_tokens=EVERY)
        self.steps = Steps(make_model(golden.config, "cpu", 16, formats), row_major(jax.devices()[0]))
        self.params, self.config = golden.params, golden.config


@pytest.fixture(scope="module")
def limited(golden):
    return Limited(golden("mamba2"))


def test_answers_are_the_same_however_prompts_are_cut_and_whatever_is_cached(limited, golden):
    prompts = [golden("mamba2").prompt[:length] for length in LENGTHS]
    alone = answers(engine_of(limited), prompts)
    assert alone[3] == generate_tokens(limited.steps, limited.params, prompts[3], PARAMS, fill=nan_fill)
    for engine in (engine_of(limited), engine_of(limited, prefix_cache=True, num_snapshots=6)):
        assert answers(engine, prompts) == alone
        engine.shapes = replace(engine.shapes, prefill_tokens=40)
        engine.roster._budget = replace(engine.roster._budget, prefill_tokens=40)
        assert answers(engine, prompts[::-1]) == alone[::-1]
        assert [answers(engine, [one]) for one in prompts] == [[one] for one in alone]
    assert engine.stats().cached_tokens > 2 * sum(LENGTHS[:3]), "found whole, or from a snapshot"
    free = [golden("mamba2").data[f"greedy_{length}"].tolist() for length in LENGTHS[2:]]
    assert alone[2:] != free, "the limit is felt"


def test_what_a_slot_holds_at_a_limit_is_within_it_and_logits_are_those_of_the_engine(limited, golden):
    prompt = golden("mamba2").prompt
    engine = engine_of(limited)
    [request] = engine.submit(Ask(tuple(map(int, prompt[:128])), replace(PARAMS, max_tokens=1), [0], ()))
    while not request.output:
        engine.step()
    groups, _, _ = engine.device.fetch(engine.device.read_slot(1))
    matrix = groups[0].matrix
    logits = np.concatenate(list(chunked_logits(limited.steps, limited.params, prompt[:130])))
    assert request.output[0] == logits[127].argmax()
    assert logits[129].argmax() == answers(engine, [prompt[:130]])[0][0]
    norms = np.linalg.norm(matrix[:, 0].reshape(*matrix.shape[:1], matrix.shape[2], -1), axis=-1)
    assert norms.max() <= MAX_NORM * (1 + 1e-5) and np.isclose(norms, MAX_NORM).any()


def test_spans_end_at_limits(limited):
    layout = limited.steps.model.layout
    assert limited_spans(layout, 0, 130) == [(0, 64), (64, 128), (128, 130)]
    assert limited_spans(layout, 64, 128) == [(64, 128)] and limited_spans(layout, 5, 9) == [(5, 9)]


def test_options_say_what_is_wrong_and_default_to_no_limit():
    assert chosen_formats(RunOptions(), "cpu", "float32")[1].norm_tokens == 0
    formats = chosen_formats(RunOptions(state_max_norm=3, state_norm_tokens=128), "cpu", "float32")[1]
    assert (formats.max_norm, formats.norm_tokens) == (3.0, 128)
    for options in ({"state_max_norm": -1.0}, {"state_max_norm": float("nan")}, {"state_max_norm": "3"}):
        with pytest.raises(ConfigError, match="state_max_norm=.* is not a number"):
            chosen_formats(RunOptions(**options), "cpu", "float32")
    for tokens in (0, 65, 64.0, True):
        with pytest.raises(ConfigError, match="state_norm_tokens=.* is not (a multiple of 64|an integer)"):
            chosen_formats(RunOptions(state_norm_tokens=tokens), "cpu", "float32")


def test_its_programs_are_announced(limited):
    shapes = engine_of(limited).shapes
    assert {LimitSlots(1), LimitSlots(8)} <= set(all_programs(shapes, 100, True, True))
    assert LimitSlots(1) not in all_programs(shapes, 100, True)
