# SPDX-License-Identifier: Apache-2.0
"""Beam search in the engine: what transformers finds, in any company and with any memory."""

import json

import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import Ask
from metrale_jax.sampling.params import SamplingParams
from tests.conftest import GOLDENS

EARLY_STOPPING = {"true": True, "false": False, "never": "never"}


def stored_searches(kit, name):
    """(ask, expected (tokens, score)s) of the searches that transformers made over a golden model."""
    for group in json.loads((GOLDENS / "beams" / f"{name}.json").read_text()):
        for early, found in group["found"].items():
            params = SamplingParams(
                beam_width=group["width"],
                n=group["num_return"],
                length_penalty=group["length_penalty"],
                early_stopping=EARLY_STOPPING[early],
                max_tokens=group["max_tokens"],
                min_tokens=group["min_tokens"],
                stop_token_ids=group["stop_ids"],
            )
            yield Ask(kit.golden.prompt[: group["prompt_len"]].tolist(), params, [0] * params.n), found


def assert_found(request, wanted):
    assert request.error is None and request.finish_reason in ("stop", "length")
    assert [list(item.tokens) for item in request.hypotheses] == [tokens for tokens, _ in wanted]
    for item, (_, score) in zip(request.hypotheses, wanted, strict=True):
        assert abs(item.score - score) < 1e-4 * max(1.0, abs(score))


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-default", "qwen3"))]
)
def test_searches_among_strangers_find_what_transformers_finds(kit, name):
    kit = kit(name)
    engine = kit.engine(16)
    strangers = [
        kit.job(kit.golden.prompt[:length], SamplingParams(temperature=0.8, max_tokens=20), seed=length)
        for length in (5, 17, 30)
    ]
    requests, found, mixed = [], [], []
    for index, (ask, wanted) in enumerate(list(stored_searches(kit, name))[::3]):
        requests.append(engine.submit(ask)[0])
        found.append(wanted)
        if index % 5 == 0:
            job = strangers[index % 3]
            mixed.append((job, kit.submit(engine, job)))
    kit.finish(engine, most_steps=6000)
    for request, wanted in zip(requests, found, strict=True):
        assert_found(request, wanted)
    for job, request in mixed:
        assert request.output == kit.solo(job)


def test_a_search_that_is_thrown_out_midway_finds_the_same(kit):
    kit = kit("gemma2")
    engine = kit.engine(16)
    long = [item for item in stored_searches(kit, "gemma2") if item[0].params.max_tokens > 12]
    for ask, wanted in long[:12]:
        request = engine.submit(ask)[0]
        for _ in range(len(wanted) + 3):
            engine.step()
            engine._preempt_newest()
            engine.check()
        kit.finish(engine)
        assert_found(request, wanted)
        assert request.num_preemptions > 0


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8])
def test_a_cancelled_search_gives_everything_back(kit, after):
    kit = kit("gemma2")
    engine = kit.engine(16)
    ask, _ = next(item for item in stored_searches(kit, "gemma2") if item[0].params.max_tokens > 12)
    request = engine.submit(ask)[0]
    for _ in range(after):
        engine.step()
    engine.cancel(request)
    assert request.finish_reason == "abort"
    engine.check()
    kit.finish(engine)


def test_what_a_search_cannot_do_is_refused(kit):
    kit = kit("llama-default")
    engine = kit.engine(usable_blocks=12)

    def refused(match, **params):
        with pytest.raises(RequestError, match=match):
            engine.submit(Ask([5, 6, 7], SamplingParams(**params), [0]))

    refused("beam_width=9 is above the 8 sequences", beam_width=9)
    refused("stop strings", beam_width=2, stop=["a"])
    refused("logprobs=1 with beam_width=2", beam_width=2, logprobs=1)
    refused("8 beams of up to 40 tokens need", beam_width=8, max_tokens=40)
    kit.finish(engine)
