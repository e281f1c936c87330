# SPDX-License-Identifier: Apache-2.0
"""What is settled of a request before any engine sees it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import RequestError, TextError
from metrale_jax.engine.admission import Limits
from metrale_jax.prepared import Preparer
from metrale_jax.sampling.constraints import full_mask, mask_of, without
from metrale_jax.text.gguf_tokenizer import tokenizer_from_gguf
from metrale_jax.text.tokenizer import Tokenizer
from tests.conftest import GOLDENS
from tests.text.conftest import find_gguf, read_fields

PLAIN = SamplingParams(max_tokens=4, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = find_gguf("smollm2")
    if path is None:
        pytest.skip("the package of SmolLM2 is not installed")
    return tokenizer_from_gguf(read_fields(path))


def preparer(tokenizer, context: int = 64, **limits) -> Preparer:
    values = {"max_sequences": 4, "vocab_size": 49152, "block_size": 16, "usable_blocks": 100, "max_stop_ids": 8}
    return Preparer(lambda: tokenizer, (2,), Limits(context, **{**values, **limits}))


@pytest.fixture(scope="module")
def tiny():
    return LLM(GOLDENS / "llama-default", max_context_tokens=64, max_sequences=4)


def test_a_prepared_request_has_all_that_an_engine_asks_of_it(tokenizer):
    made = preparer(tokenizer).prepared("One two", SamplingParams(n=2, seed=5, regex="a+", stop="x", bad_words=["cat"]))
    assert list(made.prompt_token_ids) == tokenizer.encode("One two")
    assert (made.seed, made.max_tokens, made.stops.strings) == (5, 16, ("x",))
    requests = [made.admitted.request(7 + index, index, 0.0, None) for index in range(2)]
    assert len({request.seed for request in requests}) == 2
    first, second = (request.constraint for request in requests)
    before = second.mask()
    first.accept(tokenizer.encode("a")[0])
    assert (first.mask() != before).any() and (second.mask() == before).all()
    assert preparer(tokenizer).prepared("One two", SamplingParams()).seed != made.seed


@pytest.mark.parametrize(
    "prompt, params, field",
    [
        ([], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([60000], {}, "prompt"),
        ([3] * 64, {}, "prompt"),
        ("word " * 64, {}, "prompt"),
        ("a\ud800b", {}, "prompt"),
        ("a\ud800b" * 1000, {}, "prompt"),
        ([3], {"n": 5}, "n"),
        ([3], {"n": 2**40}, "n"),
        ([3], {"stop_token_ids": [60000]}, "stop_token_ids"),
        ([3], {"logit_bias": {60000: 1}}, "logit_bias"),
        ([3], {"stop_token_ids": range(10), "min_tokens": 2}, "stop_token_ids"),
        ([3], {"regex": "a+", "min_tokens": 2}, "min_tokens"),
        ([3], {"regex": "(a"}, "regex"),
        ([3], {"beam_width": 5}, "beam_width"),
        ([3], {"beam_width": 2, "logprobs": 1}, "logprobs"),
        ([3], {"beam_width": 2, "stop": "a"}, "beam_width"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_cannot_be_served_is_told_with_its_field(tokenizer, prompt, params, field):
    params = {name: list(value) if isinstance(value, range) else value for name, value in params.items()}
    with pytest.raises(RequestError) as told:
        preparer(tokenizer).prepared(prompt, SamplingParams(**params))
    assert told.value.field == field


def test_an_answer_that_no_cache_holds_is_told_before_it_is_queued(tokenizer):
    with pytest.raises(RequestError, match="need 5 KV blocks") as told:
        preparer(tokenizer, usable_blocks=4).prepared([3], SamplingParams(max_tokens=50))
    assert told.value.field == "max_tokens"


def test_a_text_that_cannot_fit_is_not_tokenised(tokenizer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", None)
    began = time.monotonic()
    with pytest.raises(RequestError, match="of 10000000 characters has at least 123457 tokens") as told:
        preparer(tokenizer).prepared("a" * 10_000_000, PLAIN)
    assert told.value.field == "prompt" and time.monotonic() - began < 2


def test_without_a_tokenizer_what_needs_text_is_told():
    def none():
        raise TextError("the model has no tokenizer.")

    made = Preparer(none, (2,), Limits(64, 4, 100, 16, 100, 8))
    assert made.prepared([3], PLAIN).tokenizer is None
    for params, words in ((SamplingParams(stop="a"), "use stop_token_ids"), (SamplingParams(echo=True), "echo=True")):
        with pytest.raises(TextError, match=words):
            made.prepared([3], params)
    with pytest.raises(TextError, match="has no tokenizer"):
        made.prepared("a", PLAIN)


def test_a_request_is_prepared_while_a_step_is_under_way_and_queued_as_often_as_wanted(tiny):
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    with tiny._lock, ThreadPoolExecutor(1) as pool:  # as the thread that steps holds it
        prepared = pool.submit(tiny.prepare, [3, 4, 5], params).result(timeout=60)
    answers = [tiny.submit_prepared(prepared) for _ in range(2)]
    while tiny.step():
        pass
    first, second = (answer.result() for answer in answers)
    assert first.token_ids == second.token_ids and first.seed == second.seed == prepared.seed
    alone = tiny.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True, seed=prepared.seed))[0]
    assert alone.token_ids == first.token_ids


def taken(llm, answer):
    """Every piece of an answer, by index, asked for after each step."""
    pieces = {}
    while llm.step() or not answer.finished:
        for piece in answer.new_pieces():
            assert not pieces.setdefault(piece.index, []) or not pieces[piece.index][-1].finished
            pieces[piece.index].append(piece)
    for piece in answer.new_pieces():
        pieces.setdefault(piece.index, []).append(piece)
    assert answer.new_pieces() == []
    return pieces


@pytest.mark.parametrize("logprobs", [None, 2])
def test_pieces_of_n_answers_join_to_their_results(tiny, logprobs):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, logprobs=logprobs)
    answer = tiny.submit([3, 4, 5], params)
    pieces, result = taken(tiny, answer), answer.result()
    assert sorted(pieces) == [0, 1, 2]
    for index, choice in enumerate(result.choices):
        own = pieces[index]
        assert sum((piece.token_ids for piece in own), ()) == choice.token_ids
        assert sum((piece.logprobs for piece in own), ()) == choice.logprobs
        assert [piece.finished for piece in own] == [False] * (len(own) - 1) + [True]
        assert len(own) > 1
        assert own[-1].usage == choice.usage and own[0].usage.prompt_tokens == 3


def test_a_beam_search_comes_in_one_piece_an_answer(tiny):
    answer = tiny.submit([3, 4, 5], SamplingParams(n=2, beam_width=3, max_tokens=4, ignore_eos=True))
    assert answer.new_pieces() == []
    pieces, result = taken(tiny, answer), answer.result()
    assert [[piece.token_ids for piece in pieces[index]] for index in (0, 1)] == [
        [choice.token_ids] for choice in result.choices
    ]
    assert all(piece.finished for own in pieces.values() for piece in own)
    assert [pieces[index][0].usage for index in (0, 1)] == [choice.usage for choice in result.choices]


def test_a_cancelled_answer_ends_in_a_piece_of_its_own(tiny):
    answer = tiny.submit([3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True))
    tiny.step()
    answer.cancel(tiny.engine)
    ended = answer.new_pieces()
    assert [piece.finished for piece in ended] == [True] and answer.result().finish_reason == "abort"
    assert answer.new_pieces() == []


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# Each took seconds to hours, or gigabytes, before it was bounded.
TOO_MUCH = {
    "deep dict": {"json_schema": nested(10_000)},
    "deep text": {"json_schema": '{"items":' * 5_000 + "{}" + "}" * 5_000},
    "remainders": {"json_schema": {"type": "integer", "multipleOf": 99_999_989}},
    "remainders in Lark": {"grammar": 'start: %json{"type":"integer","multiple\\u004ff":99999989}'},
    "tiny remainders": {"json_schema": '{"type":"number","multipleOf":1e-300}'},
    "intersections": {"grammar": "start: A\nA: /[a-z]*a.{100}/ & /.*b.{101}/ & ~/.*c.{99}/"},
    # A token that is named must not keep it from being tried.
    "intersections beside an id": {"grammar": "start: <[300]> | A\nA: /[a-z]*a.{100}/ & /.*b.{101}/ & ~/.*c.{99}/"},
    "intersections beside a name": {
        "grammar": "start: <|im_start|> | A\nA: /[a-z]*a.{100}/ & /.*b.{101}/ & ~/.*c.{99}/"
    },
    "patterns at once": {"json_schema": {"allOf": [{"type": "string", "pattern": f"a{i}.*b{i}"} for i in range(40)]}},
    "loops": {"regex": "[^a]*" * 10_000},
    "rules": {"grammar": "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(3000)) + 'r3000 ::= "a"\nroot ::= r0'},
    "brackets": {"grammar": "root ::= " + "[" * 60_000},
    "choices": {"choice": [f"c{i}" for i in range(100_000)]},
    "bad words": {"bad_words": [[5, token] for token in range(3, 20_003)]},
    "stops": {"stop": [f"s{i}" for i in range(100_000)]},
    "a long stop": {"stop": "ab" * 1_000_000},
    "ids": {"banned_token_ids": list(range(40_000)) * 100},
    "biases": {"logit_bias": dict.fromkeys(range(1_000_000), 1)},
    "a long salt": {"cache_salt": "x" * 10_000_000},
    **{f"surrogate {name}": {name: "a\ud800"} for name in ("stop", "regex", "grammar", "json_schema", "cache_salt")},
    **{f"surrogate {name}": {name: ["a\ud800"]} for name in ("choice", "bad_words")},
    "a huge count": {"max_tokens": 10**5000},
    "no number": {"temperature": float("nan")},
    "no bool": {"top_k": True},
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_forever_is_refused_in_bounded_time_with_its_field(tokenizer, name):
    began = time.thread_time()
    with pytest.raises(RequestError) as told:
        preparer(tokenizer).prepared([3], SamplingParams(**TOO_MUCH[name]))
    assert told.value.field == next(iter(TOO_MUCH[name]))
    assert len(str(told.value)) < 2000 and time.thread_time() - began < 1


def test_a_grammar_that_is_slow_at_every_token_ends_its_answer(tokenizer):
    ticks = iter(range(1000))
    constraint = preparer(tokenizer).prepared([3], SamplingParams(regex="a+")).admitted.constraint
    slow = type(constraint)(
        constraint._matcher, "regex", constraint._text_ids, constraint._eos_ids, lambda: next(ticks)
    )
    with pytest.raises(RequestError, match="regex takes more than 20 ms a token") as told:
        slow.mask(), slow.mask()
    assert told.value.field == "regex"


def test_many_banned_tokens_are_banned_as_few_are():
    whole = full_mask(49152)
    ids = list(range(7, 40_000, 3))
    assert (without(whole, ids) == whole & ~mask_of(ids, 49152)).all()
    assert (without(without(whole, ids[:20]), ids[20:40]) == without(whole, ids[:40])).all()
