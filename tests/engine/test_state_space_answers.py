# SPDX-License-Identifier: Apache-2.0
"""Models of Mamba-2 layers, with attention and with none, answer as transformers does: alone, and many at once."""

from dataclasses import replace

import pytest

from metrale_jax.engine.admission import Ask
from metrale_jax.engine.buckets import make_shape_plan
from metrale_jax.engine.make import make_engine
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.generate import generate_tokens
from metrale_jax.sampling.params import SamplingParams
from tests.conftest import nan_fill
from tests.engine.conftest import WideShapes
from tests.sometimes import mostly_slow

CONFIG = EngineConfig(
    max_sequences=4,
    max_context_tokens=160,
    block_size=16,
    kv_cache_bytes=1 << 20,
    prefill_tokens=64,
    prefill_rows=2,
    prefix_cache=False,
)
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LENGTHS = (130, 1, 65, 7, 2, 64, 63)
NAMES = pytest.mark.parametrize("name", mostly_slow(["mamba2", "nemotron-h", "falcon-h1-norm"], ["nemotron-h"]))


def engine_of(model, **changes):
    """An engine on memory of NaN, every step of its largest size."""
    config = replace(CONFIG, **changes)
    shapes = WideShapes(**vars(make_shape_plan(config, 1)), chunk_tokens=CONFIG.prefill_tokens)
    return make_engine(model.steps, model.params, config, nan_fill, shapes=shapes)


def answers(engine, prompts):
    """The tokens that the engine answers each prompt with."""
    requests = [engine.submit(Ask(tuple(map(int, prompt)), PARAMS, [0], ()))[0] for prompt in prompts]
    for _ in range(2000):
        if not engine.step():
            break
    engine.check()
    return [list(map(int, request.output)) for request in requests]


@NAMES
@pytest.mark.parametrize("length", [1, 65])
def test_one_sequence_alone_gives_the_tokens_of_transformers(name, length, golden):
    model = golden(name)
    found = generate_tokens(model.steps, model.params, model.prompt[:length], PARAMS, fill=nan_fill)
    assert found == model.data[f"greedy_{length}"].tolist()


@NAMES
def test_more_requests_than_slots_give_the_tokens_of_transformers(name, golden):
    model = golden(name)
    found = answers(engine_of(model), [model.prompt[:length] for length in LENGTHS])
    assert found == [model.data[f"greedy_{length}"].tolist() for length in LENGTHS]


@NAMES
def test_prompts_that_begin_alike_give_the_same_beside_a_cache(name, golden):
    model = golden(name)
    engine = engine_of(model, prefix_cache=True, num_snapshots=3)
    for length in (65, 130, 64, 130, 63, 63):
        assert answers(engine, [model.prompt[:length]]) == [model.data[f"greedy_{length}"].tolist()]
