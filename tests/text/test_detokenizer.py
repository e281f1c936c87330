# SPDX-License-Identifier: Apache-2.0
"""The stream of text against the decoding of all tokens at once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Backend

from metrale_jax.text.detokenizer import Detokenizer
from metrale_jax.text.special_tokens import SpecialTokens
from metrale_jax.text.tokenizer import Tokenizer

SPACE = "\u2581"
BROKEN = "\N{REPLACEMENT CHARACTER}"
DECODERS = {
    "none": None,
    "byte-level": decoders.ByteLevel(),
    "llama": decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "strip-each": decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace-plain": decoders.Metaspace(prepend_scheme="never"),
    "metaspace-in-sequence": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
    "unstreamed-regex": decoders.Replace(Regex("a+"), "b"),
    "unstreamed-fused-replace": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    "unstreamed-wordpiece": decoders.WordPiece(),
}
TOKENS = (
    [" ", *"a b ##a 漢 Ġ Ġa Ã © ð Ł ĺ Ģ <s>".split(), SPACE, f"{SPACE}a", SPACE * 3, f"b{SPACE}"]
    + [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
    + ["<0x+A>", "<0xZZ>", "<0x4>"]
)


def tiny(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer over TOKENS, `<s>` special, with the given decoder."""
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(TOKENS)}))
    backend.add_special_tokens(["<s>"])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, SpecialTokens())


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    """`ids` in pieces, cut at `places`, which may repeat."""
    ends = sorted(place % (len(ids) + 1) for place in places)
    return [ids[begin:end] for begin, end in zip([0, *ends], [*ends, len(ids)], strict=True)]


def check_stream(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool) -> None:
    """All pieces joined are the decoding of all ids, and each piece agrees with it as far as it goes."""
    whole = tokenizer.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        assert whole.startswith(text)
    assert text + stream.finish() == whole


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(TOKENS) + 1), max_size=12),
    places=st.lists(st.integers(0, 99), max_size=6),
    skip=st.booleans(),
)
def test_any_pieces_joined_are_the_whole_decoded_for_every_decoder(kind, ids, places, skip):
    check_stream(tiny(DECODERS[kind]), cut(ids, places), skip)


@pytest.mark.parametrize(("name", "low"), [("smollm2", 500), ("gemma3", 600)])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_any_pieces_joined_are_the_whole_decoded_for_real_vocabularies(name, low, request, data, skip):
    tokenizer = request.getfixturevalue(name)
    token_id = st.integers(0, low) | st.integers(0, tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(token_id, max_size=20))
    check_stream(tokenizer, cut(ids, data.draw(st.lists(st.integers(0, 99), max_size=20))), skip)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=24))
def test_a_text_comes_back_token_by_token_without_a_broken_character(name, request, text):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push([token_id]) for token_id in ids]
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + stream.finish() == whole
    assert BROKEN in whole or not any(BROKEN in piece for piece in pieces)


def test_text_is_given_as_soon_as_it_is_settled(llama):
    stream = Detokenizer(llama)
    ids = llama.encode("hello é hello", add_special_tokens=False)
    assert [llama.id_to_token(i) for i in ids][1:4] == [SPACE, "<0xC3>", "<0xA9>"]
    assert [stream.push([i]) for i in ids] == ["hello", " ", "", "", "é hello"]
    assert stream.finish() == ""


def test_an_unfinished_character_comes_out_broken_only_at_the_end(smollm2):
    first, *others = smollm2.encode("𐍈", add_special_tokens=False)
    assert others
    stream = Detokenizer(smollm2)
    assert stream.push([first]) == ""
    assert stream.finish() == BROKEN


def test_the_space_before_a_text_is_dropped_once_only(llama):
    word = llama.token_to_id(f"{SPACE}hello")
    stream = Detokenizer(llama)
    assert [stream.push([llama.bos_token_id]), stream.push([word]), stream.push([word])] == ["", "hello", " hello"]


def test_a_stream_decodes_no_token_twice(llama, monkeypatch):
    asked = []
    spelling = Tokenizer.id_to_token
    monkeypatch.setattr(Tokenizer, "id_to_token", lambda self, i: (asked.append(i), spelling(self, i))[1])
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("the whole text was decoded"))
    stream = Detokenizer(llama)
    for _ in range(1000):
        stream.push([260])
    stream.finish()
    assert asked == [260] * 1000
