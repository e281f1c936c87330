# SPDX-License-Identifier: Apache-2.0
"""The oracle itself, against rules written down again in numpy over logits of whole forwards."""

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.generate import first_state, generate_tokens
from metrale_jax.sampling.constraints import FixedMask, full_mask, mask_of
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import make_pool

PROMPT, TOKENS, ROOM, VOCAB = 9, 14, 32, 131


class Alternating:
    """Even ids, then odd ids, and so on."""

    def __init__(self, count=0):
        self.count = count

    def mask(self):
        return mask_of(range(self.count % 2, VOCAB, 2), VOCAB)

    def accept(self, token):
        assert token % 2 == self.count % 2, "what the mask did not allow was drawn"
        self.count += 1

    def fork(self):
        return Alternating(self.count)


def raw_logits(model, tokens):
    """Logits after the last of `tokens`, by one forward over all of them."""
    layout, width = model.layout, ROOM // model.layout.block_size
    state = first_state(layout, len(tokens), width, SamplingParams(), 0, (), VOCAB)
    pool = make_pool(layout, (width + 1,) * len(layout.groups))
    flat = np.zeros(ROOM, np.int32)
    flat[: len(tokens)] = tokens
    lengths = np.asarray([len(tokens)], np.int32)
    _, _, logits = model.steps.run("score", model.params, pool, state, flat, lengths)
    return np.asarray(logits)[len(tokens) - 1].astype(np.float64)


def by_hand(model, prompt, params, stop_ids=(), alternating=False):
    """Greedy tokens under the rules, one whole forward each."""
    answer = []
    while len(answer) < TOKENS and not (answer and answer[-1] in stop_ids):
        known = [*prompt, *answer]
        x = raw_logits(model, known)
        if params.allowed_token_ids is not None:
            x[[i for i in range(VOCAB) if i not in params.allowed_token_ids]] = -np.inf
        x[list(params.banned_token_ids)] = -np.inf
        for word in params.bad_words:
            if list(word[:-1]) == answer[len(answer) - len(word) + 1 :]:
                x[word[-1]] = -np.inf
        if alternating:
            x[1 - len(answer) % 2 :: 2] = -np.inf
        if len(answer) < params.min_tokens:
            x[list(stop_ids)] = -np.inf
        for token in set(known):
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        for token in set(answer):
            x[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
        for token, bias in params.logit_bias:
            x[token] += bias
        answer.append(int(x.argmax()))
    return answer


def solo(model, prompt, params, stop_ids=(), **options):
    return generate_tokens(model.steps, model.params, prompt, params, 3, stop_ids, **options)


@pytest.fixture(scope="module")
def model(golden):
    return golden("llama-default", 8)


GREEDY = {"temperature": 0, "max_tokens": TOKENS}


def rules_for(free):
    """Fields that change the answer `free` of greedy decoding."""
    return [
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {free[0]: -100, 5: 1.0}},
        {"allowed_token_ids": list(range(0, VOCAB, 3))},
        {"banned_token_ids": free[:3]},
        {"bad_words": [free[2:5], [free[0]], [free[7], free[8]]]},
        {"repetition_penalty": 0.8, "presence_penalty": 1.0, "banned_token_ids": [free[0]], "bad_words": [free[1:3]]},
    ]


@pytest.mark.parametrize("case", range(7))
def test_greedy_answers_keep_to_the_rules(model, case):
    prompt = model.prompt[:PROMPT].tolist()
    free = solo(model, prompt, SamplingParams(**GREEDY))
    assert free == by_hand(model, prompt, SamplingParams(**GREEDY))
    params = SamplingParams(**GREEDY, **rules_for(free)[case])
    answer = solo(model, prompt, params)
    assert answer == by_hand(model, prompt, params) and answer != free


def test_stop_ids_wait_for_the_least_length_under_other_rules(model):
    prompt = model.prompt[:PROMPT].tolist()
    params = SamplingParams(**GREEDY, min_tokens=6, frequency_penalty=1.0)
    stop_ids = by_hand(model, prompt, SamplingParams(**GREEDY, frequency_penalty=1.0))[2:9:3]
    answer = solo(model, prompt, params, stop_ids)
    assert answer == by_hand(model, prompt, params, stop_ids) and len(answer) >= 6


def test_a_structure_is_asked_before_each_draw_and_told_after(model):
    prompt = model.prompt[:PROMPT].tolist()
    params = SamplingParams(**GREEDY, repetition_penalty=1.2)
    structure = Alternating()
    assert solo(model, prompt, params, structure=structure) == by_hand(model, prompt, params, alternating=True)
    assert structure.count == TOKENS


def test_a_structure_that_allows_all_changes_no_draw(model):
    prompt = model.prompt[:PROMPT].tolist()
    params = SamplingParams(temperature=1.0, top_p=0.9, typical_p=0.95, top_n_sigma=2, max_tokens=TOKENS)
    assert solo(model, prompt, params, structure=FixedMask(full_mask(VOCAB))) == solo(model, prompt, params)


def test_rules_that_leave_no_token_are_an_error(model):
    prompt = model.prompt[:PROMPT].tolist()
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, banned_token_ids=list(range(VOCAB)))
        with pytest.raises(RequestError, match="no token may be drawn after 9 tokens, of 131; loosen the rules"):
            solo(model, prompt, params)


def test_texts_and_foreign_ids_are_refused(model):
    prompt = model.prompt[:PROMPT].tolist()
    with pytest.raises(RequestError, match="bad_words='word' is a text"):
        solo(model, prompt, SamplingParams(bad_words=["word"]))
    with pytest.raises(RequestError, match="logit_bias names the token id 131, which"):
        solo(model, prompt, SamplingParams(logit_bias={131: 1}))
