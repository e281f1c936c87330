# SPDX-License-Identifier: Apache-2.0
"""The promise, cell by cell: a request's tokens are those of the request alone, whatever was served before it or beside
it, however its prompt is cut and however few blocks there are."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from metrale_jax.models.decoder import make_model
from metrale_jax.run_options import RunOptions
from metrale_jax.runtime import load_model
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.formats import StateFormats
from metrale_jax.steps.build import Steps
from tests.engine.conftest import LONG, Job, Kit

SMOLLM2 = "smollm2-135m"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12)
STRANGERS = SamplingParams(temperature=0.8, min_p=0.02, max_tokens=20), SamplingParams(temperature=0, max_tokens=20)
# The prompt that is looked at ends within a block, and so does what an earlier request shares with it. Both are longer
# than the windows (20 tokens) and than a chunk of 64.
PROMPT_TOKENS, SHARED_TOKENS = 101, 75
# Strangers that run when it comes, and strangers that come after it and go before it; the first of these begins as it
# does.
EARLY, LATE, LATE_SHARED_TOKENS = (3, 9, 14, 7, 20), (50, 11, 5), 43
# Enough for it beside the early ones as they stand when it comes, too few as they grow.
FEW_BLOCKS = 31
MOST_STEPS = 600


@dataclass(frozen=True)
class Cell:
    """One way to be served: `warmth` says what was served before, `chunk` the prompt tokens of a step, `tight` that
    company makes the blocks too few."""

    warmth: str
    chunk: int
    company: bool
    tight: bool
    sampled: bool


def cells(warmth: str, chunk: int) -> list[Cell]:
    """The cells of one state of the cache and one size of chunks."""
    return [Cell(warmth, chunk, *rest) for rest in itertools.product((False, True), repeat=3)]


WARMTHS, CHUNKS = ("cold", "warm", "shared"), (16, 64, LONG.prefill_tokens)
ALL_CELLS = [cell for pair in itertools.product(WARMTHS, CHUNKS) for cell in cells(*pair)]


@dataclass(frozen=True)
class Scene:
    """A request, one served before it that begins as it does, and those around it."""

    target: Job
    sharing: Job
    early: tuple[Job, ...]
    late: tuple[Job, ...]


def scene_of(kit: Kit, params: SamplingParams) -> Scene:
    """The scene on a kit's model; its strangers draw by turns with noise and greedily."""
    vocab = kit.golden.config.vocab_size
    rng = np.random.default_rng(11)
    prompt = rng.integers(3, vocab, PROMPT_TOKENS)

    def job(index, length, shared=0):
        own = STRANGERS[index % len(STRANGERS)]
        return kit.job([*prompt[:shared], *rng.integers(3, vocab, length - shared)], own, seed=100 + index)

    early = tuple(job(index, length) for index, length in enumerate(EARLY))
    late = tuple(job(10 + index, length, 0 if index else LATE_SHARED_TOKENS) for index, length in enumerate(LATE))
    # The last to be served of all: whoever needs a block takes it from this one.
    target = kit.job(prompt, replace(params, priority=1), seed=7)
    return Scene(target, job(20, SHARED_TOKENS + 20, SHARED_TOKENS), early, late)


def failure_of(kit: Kit, scene: Scene, cell: Cell, paced: bool) -> str:
    """What is wrong with a cell; empty where nothing is. Engines that are `paced`, a token a step, run out of blocks in
    the cells that are made for it."""
    engine = kit.engine(cell.chunk, FEW_BLOCKS if cell.tight else None)
    before = {"cold": [], "warm": [scene.target], "shared": [scene.sharing]}[cell.warmth]
    served = [(job, kit.submit(engine, job)) for job in before]
    run(engine, lambda: engine.has_work)
    early = [(job, kit.submit(engine, job)) for job in scene.early if cell.company]
    run(engine, lambda: any(not request.output for _, request in early))
    target = kit.submit(engine, scene.target)
    engine.step()
    late = [(job, kit.submit(engine, job)) for job in scene.late if cell.company]
    kit.finish(engine, MOST_STEPS)

    block_size = engine.limits.block_size
    reached = {"cold": 0, "warm": PROMPT_TOKENS - 1, "shared": SHARED_TOKENS}[cell.warmth]
    cached = reached // block_size * block_size
    if target.cached_tokens != cached:
        return f"{target.cached_tokens} tokens were cached, not {cached}"
    runs_out = cell.tight and cell.company
    if (target.num_preemptions > 0) != runs_out and (paced or not runs_out):
        return f"it was preempted {target.num_preemptions} times"
    for job, request in [(scene.target, target), *served, *early, *late]:
        if request.output != kit.solo(job):
            whose = "its own" if request is target else f"a neighbour's of {len(job.prompt)} tokens"
            return f"{whose} answer is {request.output} and alone {kit.solo(job)} ({request.error})"
    return ""


def run(engine, busy):
    steps = 0
    while busy():
        engine.step()
        steps += 1
        assert steps < MOST_STEPS, "work is left"


def check(kit: Kit, scenes: dict[bool, Scene], wanted: list[Cell], record_property, paced: bool = True) -> None:
    """Asserts that every wanted cell gives the solo answers, and records how many do."""
    failures = {cell: failure_of(kit, scenes[cell.sampled], cell, paced) for cell in wanted}
    passed = [cell for cell, failure in failures.items() if not failure]
    record_property("solo_cells", (kit.golden.name, len(passed), len(wanted)))
    failed = [f"{cell}: {failure}" for cell, failure in failures.items() if failure]
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def scenes(kit):
    """`scenes(name)`: a kit, and the scenes on it whose target is drawn greedily and with noise.

    Of a real model as many layers are taken as are asked for.
    """
    made = {}

    def make(name: str, num_layers: int | None = None) -> tuple[Kit, dict[bool, Scene]]:
        if (name, num_layers) not in made:
            own = smollm2_kit(num_layers) if name == SMOLLM2 else kit(name, config=LONG)
            made[name, num_layers] = own, {False: scene_of(own, GREEDY), True: scene_of(own, SAMPLED)}
        return made[name, num_layers]

    return make


def smollm2_kit(num_layers: int | None) -> Kit:
    """A kit on the first layers of a real model, or on all of them."""
    model = load_model(SMOLLM2, RunOptions(block_size=LONG.block_size))
    config = replace(model.config, layers=model.config.layers[:num_layers])
    params = model.params.replace(layers=model.params.layers[:num_layers])
    steps = Steps(make_model(config, "cpu", LONG.block_size, StateFormats("float32", "float32")))
    name = f"{SMOLLM2}, {len(config.layers)} layers"
    return Kit(
        SimpleNamespace(name=name, params=params, config=config, steps=steps, layout=steps.model.layout), True, LONG
    )


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("warmth", WARMTHS)
@pytest.mark.parametrize("name", ["llama-default", "gemma2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_every_cell_gives_the_solo_answer(scenes, record_property, name, warmth, chunk):
    check(*scenes(name), cells(warmth, chunk), record_property)


def test_a_cell_of_each_kind_gives_the_solo_answer_on_layers_of_a_real_model(scenes, record_property):
    quick = [
        Cell("cold", LONG.prefill_tokens, company=True, tight=False, sampled=True),
        Cell("warm", 16, company=False, tight=True, sampled=True),
        Cell("shared", 64, company=True, tight=True, sampled=False),
    ]
    check(*scenes(SMOLLM2, num_layers=2), quick, record_property)


@pytest.mark.parametrize("name", ["glm4-moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_cell_of_each_kind_gives_the_solo_answer_on_a_mixture_of_experts(scenes, record_property, name):
    quick = [
        Cell("cold", 16, company=True, tight=False, sampled=True),
        Cell("warm", 64, company=True, tight=True, sampled=False),
        Cell("shared", LONG.prefill_tokens, company=False, tight=False, sampled=True),
    ]
    check(*scenes(name), quick, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("warmth", WARMTHS)
def test_every_cell_gives_the_solo_answer_on_a_whole_real_model(scenes, record_property, warmth, chunk):
    check(*scenes(SMOLLM2), cells(warmth, chunk), record_property)
