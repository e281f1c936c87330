# SPDX-License-Identifier: Apache-2.0
"""Texts laid out in rows of one length, and the draft vocabulary that covers what they say."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flax import struct

from metrale_jax.training.answers import Answered

COUNT_ROWS = 256


@struct.dataclass
class Packed:
    """Rows `[R, L]` of several texts each: int32 `tokens`; `places`, where a token's rows of features are; `positions`
    in the own text; `owners`, which text of its row a token belongs to, 0 for padding. `asked` is true where the next
    token is one of the answer, which is what a head is to guess."""

    tokens: np.ndarray
    places: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    asked: np.ndarray

    def rows(self, which: np.ndarray) -> "Packed":
        """The rows at `which`."""
        return Packed(*(array[which] for array in (self.tokens, self.places, self.positions, self.owners, self.asked)))


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its answer, from which token the answer begins, and at which place its rows begin."""

    tokens: tuple[int, ...]
    answer_start: int
    place: int


def texts_of(answers: Sequence[Answered]) -> list[Text]:
    """The texts of answers whose rows lie end to end."""
    found, place = [], 0
    for one in answers:
        found.append(Text(one.prompt + one.answer, len(one.prompt), place))
        place += len(found[-1].tokens)
    return found


def pack(texts: Sequence[Text], length: int) -> Packed:
    """The texts in as few rows of `length` as the first that fits gives, the longest first. One that is longer than a
    row is cut: what is past the cut is not learnt from."""
    rows: list[list[Text]] = []
    room: list[int] = []
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        size = min(len(text.tokens), length)
        row = next((row for row, free in enumerate(room) if free >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(length)
        rows[row].append(text)
        room[row] -= size
    made = Packed(*(np.zeros((len(rows), length), kind) for kind in (np.int32,) * 4 + (bool,)))
    for row, inside in enumerate(rows):
        for start, owner, text in _starts(inside, length):
            size = min(len(text.tokens), length - start)
            span = slice(start, start + size)
            made.tokens[row, span] = text.tokens[:size]
            made.places[row, span] = text.place + np.arange(size)
            made.positions[row, span] = np.arange(size)
            made.owners[row, span] = owner
            made.asked[row, span] = np.arange(1, size + 1) >= text.answer_start
            made.asked[row, start + size - 1] = False
    return made


def _starts(texts: Sequence[Text], length: int) -> Iterator[tuple[int, int, Text]]:
    start = 0
    for owner, text in enumerate(texts, start=1):
        yield start, owner, text
        start += min(len(text.tokens), length)


def draft_vocabulary(counts: np.ndarray, size: int, always: Sequence[int]) -> np.ndarray:
    """`size` token ids in rising order: `always`, then those of the highest `counts [V]`, of equals the lowest, which
    in merged vocabularies are the commonest."""
    counts = np.asarray(counts, np.float64).copy()
    counts[list(always)] = np.inf
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(answers: Sequence[Answered], ids: np.ndarray, vocab_size: int) -> float:
    """The share of the answers' tokens that are among `ids`."""
    counts = token_counts(answers, vocab_size)
    return float(counts[ids].sum() / max(1, counts.sum()))


def token_counts(answers: Sequence[Answered], vocab_size: int) -> np.ndarray:
    """How often each token id stands in the answers."""
    tokens = np.concatenate([np.asarray(one.answer, np.int64) for one in answers])
    return np.bincount(tokens, minlength=vocab_size)


def expected_counts(hidden: np.ndarray, logits: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """How often each token id would stand after the rows `hidden [T, D]`, were each drawn again and again: a sum of
    probabilities. `logits(rows)` are the target's. It counts what few texts happen not to say."""
    total = 0.0
    for start in range(0, len(hidden), COUNT_ROWS):
        scores = np.asarray(logits(hidden[start : start + COUNT_ROWS].astype(np.float32)), np.float32)
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = total + (chances / chances.sum(axis=1, keepdims=True)).sum(axis=0, dtype=np.float64)
    return total
