# SPDX-License-Identifier: Apache-2.0
"""Tokenizers built from GGUF metadata against transformers' ids, and the fields that must be there."""

import random
from typing import Any

import pytest

from metrale_jax.core.errors import TextError
from metrale_jax.text.gguf_pre_tokenizers import WORD_SPLITS
from metrale_jax.text.gguf_tokenizer import tokenizer_from_gguf
from metrale_jax.text.merges import merges_from_scores

REAL = pytest.mark.parametrize("name", ["smollm2", "gemma3"])


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a tiny byte-level vocabulary; `changes` replace fields of `tokenizer.ggml`."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "Ġ", "ab", "<s>", "<e>", "1", "11", "aba"],
        "token_type": [1, 1, 1, 1, 3, 3, 1, 1, 1],
        "merges": ["a b", "1 1"],
        "bos_token_id": 4,
        "eos_token_id": 5,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


@REAL
def test_ids_of_real_files_equal_those_of_transformers(name, request, goldens):
    tokenizer = request.getfixturevalue(name)
    for entry in goldens[name]["texts"]:
        assert tokenizer.encode(entry["text"]) == entry["ids"], repr(entry["text"])
        assert tokenizer.encode(entry["text"], add_special_tokens=False) == entry["plain"], repr(entry["text"])


@REAL
def test_texts_of_real_files_equal_those_of_transformers(name, request, goldens):
    tokenizer = request.getfixturevalue(name)
    for entry in goldens[name]["decoded"]:
        assert tokenizer.decode(entry["ids"]) == entry["skipped"], entry["ids"]
        assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["full"], entry["ids"]


@REAL
def test_special_ids_of_real_files_equal_those_of_transformers(name, request, goldens):
    tokenizer, golden = request.getfixturevalue(name), goldens[name]
    assert tokenizer.bos_token_id == golden["bos"]
    assert tokenizer.eos_token_ids == (golden["eos"],)
    assert tokenizer.pad_token_id == golden["pad"]
    assert tokenizer.vocab_size == golden["size"]


@REAL
def test_bytes_of_tokens_make_up_the_text(name, request, goldens):
    tokenizer = request.getfixturevalue(name)
    for entry in goldens[name]["texts"]:
        text = tokenizer.decode(entry["plain"], skip_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, entry["plain"])) == text.encode(), repr(entry["text"])


def test_a_space_is_put_before_a_text_once_and_taken_off_again(llama):
    ids = llama.encode("hello")
    assert [llama.id_to_token(i) for i in ids] == ["<s>", "\u2581hello"]
    assert llama.decode(ids) == "hello"
    assert llama.decode(llama.encode(" hello")) == "hello"
    assert [llama.id_to_token(i) for i in llama.encode("<tool>hello")][1:] == ["<tool>", "hello"]


def test_unknown_characters_fall_back_to_bytes(llama):
    ids = llama.encode("hé", add_special_tokens=False)
    assert [llama.id_to_token(i) for i in ids] == ["\u2581h", "<0xC3>", "<0xA9>"]
    assert llama.decode(ids) == "hé"
    assert llama.token_bytes(ids[1]) == b"\xc3"
    assert llama.token_bytes(ids[0]) == b" h"


def test_add_space_prefix_false_leaves_the_start_alone(llama_fields):
    tokenizer = tokenizer_from_gguf(llama_fields | {"tokenizer.ggml.add_space_prefix": False})
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("hello")] == ["<s>", "hello"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_phi3_puts_a_space_even_before_a_space(llama_fields):
    tokenizer = tokenizer_from_gguf(llama_fields | {"general.architecture": "phi3"})
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode(" hello")] == ["<s>", "\u2581", "\u2581hello"]


def test_bos_and_eos_are_added_as_the_file_says(llama_fields):
    changed = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    tokenizer = tokenizer_from_gguf(llama_fields | changed)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("hello")] == ["\u2581hello", "</s>"]
    byte_level = tokenizer_from_gguf(byte_level_fields(add_bos_token=True, add_eos_token=True))
    assert byte_level.encode("ab") == [4, 3, 5]
    assert byte_level.encode("ab", add_special_tokens=False) == [3]


def test_ends_of_turn_count_as_eos():
    assert tokenizer_from_gguf(byte_level_fields(eot_token_id=4, eom_token_id=5)).eos_token_ids == (5, 4)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["11", "Ġ", "ab", "a"]),
        ("smollm", ["1", "1", "Ġ", "ab", "a"]),
        ("qwen2", ["1", "1", "Ġ", "ab", "a"]),
        ("llama-bpe", ["<s>", "11", "Ġ", "ab", "a"]),
    ],
)
def test_words_are_cut_as_the_named_split_says(pre, expected):
    tokenizer = tokenizer_from_gguf(byte_level_fields(pre=pre))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("11 aba")] == expected


def test_llama3_looks_a_whole_word_up_before_it_merges():
    texts = {pre: tokenizer_from_gguf(byte_level_fields(pre=pre)).encode("aba")[-1] for pre in ("gpt-2", "llama-bpe")}
    assert texts == {"gpt-2": 0, "llama-bpe": 8}


@pytest.mark.parametrize("pre", sorted(WORD_SPLITS))
def test_every_word_split_keeps_all_characters(pre):
    backend_text = "ab a1 b11  a\n\nb"
    alphabet = ["a", "b", "1", "Ġ", "Ċ", "<s>", "<e>"]
    fields = byte_level_fields(pre=pre, tokens=alphabet, token_type=None, merges=[], bos_token_id=5, eos_token_id=6)
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer.decode(tokenizer.encode(backend_text, add_special_tokens=False)) == backend_text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'.*gpt2.*llama"),
        ({}, "tokenizer.ggml.model=None"),
        (byte_level_fields(pre="nonesuch"), "tokenizer.ggml.pre='nonesuch'.*llama-bpe.*smollm"),
        (byte_level_fields(merges=None), "tokenizer.ggml.merges is missing"),
        (byte_level_fields(tokens=[]), "tokenizer.ggml.tokens is missing"),
        (byte_level_fields(bos_token_id=9), "bos_token_id=9 is outside the vocabulary of 9 tokens"),
        (byte_level_fields(merges=["a z"]), "tokenizer.ggml.merges has 'a z'"),
        (byte_level_fields(merges=["b a"]), "tokenizer.ggml.merges has 'b a'"),
        (byte_level_fields(merges=["ab"]), "tokenizer.ggml.merges has 'ab'"),
        (byte_level_fields(model="llama"), "tokenizer.ggml.scores has 0 entries for 9 tokens"),
    ],
)
def test_unusable_metadata_is_named(fields, part):
    with pytest.raises(TextError, match=part):
        tokenizer_from_gguf(fields)


def merges_by_loop(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """What `merges_from_scores` must give, for tokens that differ in score or length."""
    known = set(tokens)
    pairs = [
        (-scores[which], -cut, cut - len(token), (token[:cut], token[cut:]))
        for which, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return [pair for *_, pair in sorted(pairs)]


def test_merges_are_every_cut_into_two_tokens_best_score_first():
    tokens = ["a", "b", "ab", "ba", "aba", "c", "", "bc", "abc", "xy"]
    scores = [0, 0, -5, -4, -6, 0, 0, -7, -7, -1]
    assert merges_from_scores(tokens, scores) == merges_by_loop(tokens, scores)
    assert merges_from_scores(tokens, scores)[:2] == [("b", "a"), ("a", "b")]


def test_merges_of_a_large_vocabulary_miss_none():
    source = random.Random(3)
    words = {"".join(source.choices("abcdeü漢", k=source.randint(1, 7))) for _ in range(40_000)}
    tokens = sorted(words)
    scores = [-float(rank) for rank in range(len(tokens))]
    assert merges_from_scores(tokens, scores) == merges_by_loop(tokens, scores)
