# SPDX-License-Identifier: Apache-2.0
"""How much text a token can stand for at most, so that a text which cannot fit is refused without being tokenised.

A vocabulary alone bounds that only where nothing of a text is lost on the way to it. Normalisers that compose
characters lose a bounded part; those that collapse or strip, pre-tokenisers that drop what they split at, and unknown
words lose any amount.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from metrale_jax.text.decoder_stages import byte_alphabet

# Bytes of a text for one byte of its tokens, at most. Unicode composes up to three characters into one, and its
# compatibility forms make one byte of up to four.
_KEEPS, _COMPOSES = 1, 12
# Where a tokenizer may lose any amount of a text, one that has so much more than fits is still no prompt.
_GENEROUS = 64
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_ALL_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class TextBound:
    """`text_bytes` of a text come to one token at most, those that are `dropped` left out."""

    text_bytes: int
    dropped: bytes = b""

    def least_tokens(self, text: bytes) -> int:
        """So many tokens a text has at least."""
        return -(-len(text.translate(None, self.dropped)) // self.text_bytes)


def text_bound(backend: Backend, spellings: Iterable[bytes]) -> TextBound:
    """The bound of a tokenizer whose tokens stand for the bytes `spellings`; a generous one where there is none."""
    longest = max(map(len, spellings), default=1)
    factor = _lost_factor(backend)
    byte_level = any(part["type"] == "ByteLevel" for part in _stages(backend))
    missing = [byte for byte, spelt in byte_alphabet().items() if backend.token_to_id(spelt) is None]
    # A byte that a byte-level vocabulary has not is dropped, or one of a run that is unknown.
    return TextBound(max(1, longest) * factor, bytes(missing) if byte_level else b"")


def _lost_factor(backend: Backend) -> int:
    """How many bytes of a text may come to one byte of its tokens."""
    factor = _KEEPS
    for part in _parts(backend.normalizer, "normalizers"):
        if part["type"] in _UNICODE_FORMS:
            factor = _COMPOSES
        elif not _grows(part):
            return _GENEROUS
    swallows = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    if swallows or not all(map(_splits_only, splits)) or not _spells_all(backend):
        return _GENEROUS
    return factor


def _stages(backend: Backend) -> Iterator[Mapping[str, Any]]:
    yield from _parts(backend.normalizer, "normalizers")
    yield from _parts(backend.pre_tokenizer, "pretokenizers")


def _parts(stage: Any, members: str) -> Iterator[Mapping[str, Any]]:
    if stage is not None:
        state = json.loads(stage.__getstate__())
        yield from state[members] if state["type"] == "Sequence" else [state]


def _grows(part: Mapping[str, Any]) -> bool:
    """Whether a normaliser leaves at least as many bytes as it is given."""
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
    return part["type"] in ("Prepend", "ByteLevel")


def _splits_only(part: Mapping[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return part["behavior"] != "Removed"
    return part["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def _spells_all(backend: Backend) -> bool:
    """Whether every byte of a text that is not dropped ends up in a token."""
    if any(part["type"] == "ByteLevel" for part in _stages(backend)):
        return True
    fallback = getattr(backend.model, "byte_fallback", False)
    return fallback and all(backend.token_to_id(token) is not None for token in _ALL_BYTES)
