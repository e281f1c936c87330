# SPDX-License-Identifier: Apache-2.0
"""The solo matrix with a proposer of each kind: what is drafted changes no token of anybody's answer.

Requests are hot, so that drafts of any drafter are accepted at times and rejected at others: the noise that the target
and the drafter share decides more than their logits.
"""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from metrale_jax.sampling.params import SamplingParams
from tests.conftest import nan_fill
from tests.engine.conftest import LONG, Kit
from tests.engine.test_solo_matrix import Cell, cells, check, scene_of
from tests.sometimes import mostly_slow
from tests.speculative.tiny_drafters import DRAFTERS

NUM_DRAFTS = 3
HOT = SamplingParams(temperature=3.0, top_p=0.99, max_tokens=12)
RULED = SamplingParams(temperature=2.0, repetition_penalty=1.3, logit_bias={7: 2.0}, min_tokens=6, max_tokens=12)
QUICK = [
    Cell("cold", 16, company=True, tight=False, sampled=True),
    Cell("warm", 64, company=True, tight=True, sampled=False),
    Cell("shared", LONG.prefill_tokens, company=True, tight=False, sampled=True),
    Cell("shared", 64, company=False, tight=False, sampled=False),
]
MODELS = ("llama-default", "mistral-window", "glm4-moe")
CASES = [f"{drafter}, {model}" for drafter, model in itertools.product(DRAFTERS, MODELS)]


class DraftKit(Kit):
    """Engines that draft over a checkpoint, and what it answers alone without."""

    def __init__(self, golden, drafter: str):
        self.plain = Kit(golden, True, LONG)
        steps, params = golden.drafted_by(*DRAFTERS[drafter](golden), LONG.block_size, NUM_DRAFTS)
        name = f"{golden.name}, {drafter}"
        drafted = SimpleNamespace(
            name=name, params=params, config=golden.config, steps=steps, layout=steps.model.layout
        )
        super().__init__(drafted, True, LONG)
        self.counts = [0, 0]

    def fill(self, spec):
        """Storage by block as ever; what is carried by slot lies as it is."""
        return nan_fill(spec) if spec.ndim < 4 else super().fill(spec)

    def engine(self, prefill_tokens=64, usable_blocks=None, **options):
        """An engine that always drafts."""
        drafts = {"draft_widths": (NUM_DRAFTS,), "draft_mode": "always"}
        engine = super().engine(prefill_tokens, usable_blocks, **drafts, **options)
        read = engine.drafting.read

        def counted(timing, requests, counts, drafts, now, compiles):
            if not isinstance(drafts, tuple):
                self.counts[0] += int(jnp.sum(drafts))
                self.counts[1] += int(jnp.sum(counts) - len(requests))
            read(timing, requests, counts, drafts, now, compiles)

        engine.drafting.read = counted
        return engine

    def solo(self, job):
        """The answer to `job` alone, without drafts."""
        return self.plain.solo(job)


@pytest.mark.parametrize("case", mostly_slow(CASES, [f"{drafter}, llama-default" for drafter in DRAFTERS]))
def test_a_cell_of_each_kind_gives_the_solo_answer(golden, record_property, case):
    drafter, model = case.split(", ")
    kit = DraftKit(golden(model, LONG.block_size), drafter)
    scenes = {True: scene_of(kit, HOT), False: scene_of(kit, RULED)}
    check(kit, scenes, QUICK, record_property, paced=False)
    proposed, accepted = kit.counts
    assert 0 < accepted < proposed


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_cell_gives_the_solo_answer(golden, record_property, case):
    drafter, model = case.split(", ")
    kit = DraftKit(golden(model, LONG.block_size), drafter)
    scenes = {True: scene_of(kit, HOT), False: scene_of(kit, RULED)}
    every = [cell for warmth in ("cold", "warm", "shared") for chunk in (16, 64) for cell in cells(warmth, chunk)]
    check(kit, scenes, every, record_property, paced=False)
