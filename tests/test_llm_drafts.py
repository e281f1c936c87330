# SPDX-License-Identifier: Apache-2.0
"""Drafts on a real model with a tokenizer: texts end where they do without, in form and out of it."""

import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import MetraleError
from metrale_jax.speculative.drafter_files import write_drafter
from tests.conftest import GOLDENS
from tests.speculative.head_problems import head_of, random_params

OPTIONS = {"max_sequences": 1, "max_context_tokens": 256, "kv_cache_mib": 32, "prefill_tokens": 128}
LIST = "one two three four five six seven eight nine ten " * 3
PROMPT = f"{LIST}one two three"
LONG = SamplingParams(temperature=0, max_tokens=48)
ROW = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}, "ready": {"type": "boolean"}},
    "required": ["name", "ready"],
    "additionalProperties": False,
}
ROWS = {"type": "array", "items": ROW, "minItems": 4, "maxItems": 4}


@pytest.fixture(scope="module")
def plain():
    return LLM("smollm2-135m", **OPTIONS, prefix_cache=False)


@pytest.fixture(scope="module")
def drafting():
    return LLM("smollm2-135m", **OPTIONS, proposer="ngram", num_drafts=7, draft_mode="always")


def accepted(llm):
    return llm.stats().drafts.accepted


def test_a_stop_string_within_an_accepted_run_ends_the_text(plain, drafting):
    whole = plain.generate(PROMPT, LONG)[0].text
    before = accepted(drafting)
    assert drafting.generate(PROMPT, LONG)[0].text == whole
    assert accepted(drafting) - before > 20, "nothing was copied of a list that goes round"
    for stop in ("six", " two th", "t nine"):
        assert stop in whole
        params = SamplingParams(temperature=0, max_tokens=48, stop=[stop])
        expected = plain.generate(PROMPT, params)[0]
        pieces = list(drafting.stream(PROMPT, params))
        assert "".join(str(piece) for piece in pieces) == expected.text == whole[: whole.index(stop)]
        result = pieces[-1].result
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, "stop")


def test_an_answer_in_form_is_drafted_too_the_bonus_token_included(plain, drafting):
    prompt = 'As JSON: [{"name": "red", "ready": true}, {"name": "red", "ready": true}, ...]. Again:'
    params = SamplingParams(temperature=0.5, seed=4, max_tokens=120, json_schema=ROWS, logprobs=1)
    expected = plain.generate(prompt, params)[0]
    before = accepted(drafting)
    found = drafting.generate(prompt, params)[0]
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    assert accepted(drafting) - before > 5
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours.token_id == theirs.token_id and abs(ours.logprob - theirs.logprob) < 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proposer": "oracle"}, "proposer='oracle' is not one of ngram, "),
        ({"num_drafts": 3}, "num_drafts=3 is for a proposer, and none is chosen"),
        ({"proposer": "ngram", "num_drafts": 0}, "num_drafts=0 is not from 1 to 64"),
        ({"proposer": "ngram", "drafter": str(GOLDENS / "qwen3")}, "has no weights of its own"),
        ({"proposer": "model"}, "proposer='model' needs a smaller model"),
        ({"proposer": "mtp"}, "."),
        ({"proposer": "model", "drafter": "/no/such/model"}, "drafter='/no/such/model'"),
        ({"acceptance": "typical"}, "acceptance='typical' is for drafts, and no proposer is chosen"),
        ({"draft_confidence": 0.5}, "draft_confidence=0.5 is for a proposer, and none is chosen"),
        ({"draft_layer_ids": [0]}, r"draft_layer_ids=\[0\] is for a proposer, and none is chosen"),
        ({"proposer": "ngram", "draft_confidence": 1.0}, "draft_confidence=1.0 is no probability"),
        ({"proposer": "ngram", "draft_confidence": 0.5}, "proposer='ngram' has no use for it"),
        (
            {"proposer": "ngram", "draft_layer_ids": [0]},
            r"draft_layer_ids=\(0,\) is given, and proposer='ngram' has no",
        ),
        ({"proposer": "self", "draft_confidence": 0.5}, "proposer='self' has no use for it"),
        ({"proposer": "self", "draft_layer_ids": [0, 40]}, r"the layers \(0, 40\) to draft with are not .* 0 to \d+"),
        ({"proposer": "self", "draft_layer_ids": []}, r"the layers \(\) to draft with are not"),
        ({"draft_mode": "always"}, "draft_mode='always' is for drafts, and no proposer is chosen"),
        ({"proposer": "ngram", "acceptance": "hopeful"}, "acceptance='hopeful' is not one of exact, "),
        ({"proposer": "ngram", "draft_mode": "often"}, "draft_mode='often' is not one of auto, always"),
    ],
)
def test_what_cannot_draft_is_told(options, words):
    with pytest.raises(MetraleError, match=words):
        LLM(GOLDENS / "qwen3", max_context_tokens=64, **options)


def always(name, **options):
    options = {"kv_cache_mib": 4, "max_sequences": 2, "prefix_cache": False, "num_drafts": 3, **options}
    return LLM(GOLDENS / name, draft_mode="always", **options)


TOKENS = [[5, 9, 3, 17, 4, 8], [11, 2, 7]]
SHORT = SamplingParams(temperature=0, max_tokens=12)


def told(llm):
    return [result.token_ids for result in llm.generate(TOKENS, SHORT)]


def test_layers_to_draft_with_are_the_users_choice():
    plain = LLM(GOLDENS / "llama-default", kv_cache_mib=4, max_sequences=2, prefix_cache=False)
    every = range(len(plain.loaded.config.layers))
    shares = {}
    for layers in ([0], list(every)):
        llm = always("llama-default", proposer="self", draft_layer_ids=layers)
        assert llm.loaded.model.proposer.layers == tuple(layers)
        assert told(llm) == told(plain)
        drafts = llm.stats().drafts
        shares[len(layers)] = drafts.accepted / drafts.proposed
    assert shares[len(every)] == 1.0 > shares[1], "a model that skips nothing guesses what it says"


def test_a_head_that_is_not_sure_enough_drafts_nothing(tmp_path):
    plain = LLM(GOLDENS / "llama-default", kv_cache_mib=4, max_sequences=2, prefix_cache=False)
    head = head_of("mtp", plain.loaded.config, 20)
    write_drafter(tmp_path / "head", head, random_params(head), plain.loaded.config)
    proposed = {}
    for least in (0.0, 0.999):
        llm = always("llama-default", proposer="mtp", drafter=str(tmp_path / "head"), draft_confidence=least)
        assert told(llm) == told(plain)
        proposed[least] = llm.stats().drafts.proposed
    assert proposed[0.0] > 0 == proposed[0.999]
