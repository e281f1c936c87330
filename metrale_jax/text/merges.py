# SPDX-License-Identifier: Apache-2.0
"""Recovers BPE merges from a SentencePiece vocabulary, which has scores instead."""

from collections.abc import Sequence
from typing import final

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15
_SCRAMBLE = np.uint64(0xC2B2AE3D27D4EB4F)
_SLOT_BITS = 22


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that joins to a token: best score first, and for one score the longest left part first.

    A large vocabulary has millions of cuts, so all are looked up at once by 64-bit hashes of their parts, in a
    fraction of the time of a loop over strings.
    """
    token_ids, left_lens, right_lens = _cuts_between_tokens(tokens)
    order = np.lexsort((-right_lens, -left_lens, -np.asarray(scores, np.float64)[token_ids]))
    cuts = zip(token_ids[order].tolist(), left_lens[order].tolist(), strict=True)
    return [((token := tokens[token_id])[:left_len], token[left_len:]) for token_id, left_len in cuts]


def _cuts_between_tokens(tokens: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token id, left length and right length of every cut of a token into two tokens."""
    lens = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lens)
    starts = ends - lens
    hashes = _SubstringHashes("".join(tokens))
    known = _HashSet(hashes.of(starts, ends))
    num_cuts = np.maximum(lens - 1, 0)
    token_ids = np.repeat(np.arange(len(tokens)), num_cuts)
    firsts = np.cumsum(num_cuts) - num_cuts
    middles = np.arange(len(token_ids)) + np.repeat(starts + 1 - firsts, num_cuts)
    kept = known.has(hashes.of(np.repeat(starts, num_cuts), middles))
    token_ids, middles = token_ids[kept], middles[kept]
    kept = known.has(hashes.of(middles, ends[token_ids]))
    token_ids, middles = token_ids[kept], middles[kept]
    return token_ids, middles - starts[token_ids], ends[token_ids] - middles


@final
class _HashSet:
    """A set of 64-bit hashes, asked for many members at once.

    A table has one hash in a slot, found by its top bits; the few that shared a slot with a later one are searched.
    """

    def __init__(self, members: np.ndarray):
        self._table = np.zeros(1 << _SLOT_BITS, np.uint64)
        self._table[_slots(members)] = members
        self._crowded_out = np.sort(members[self._table[_slots(members)] != members])

    def has(self, hashes: np.ndarray) -> np.ndarray:
        """The positions in `hashes` of those that are members, in order."""
        held = self._table[_slots(hashes)]
        found = held == hashes
        if len(self._crowded_out):
            doubtful = np.flatnonzero((held != 0) & ~found)
            places = np.searchsorted(self._crowded_out, hashes[doubtful])
            nearest = self._crowded_out[np.minimum(places, len(self._crowded_out) - 1)]
            found[doubtful] = nearest == hashes[doubtful]
        return np.flatnonzero(found)


def _slots(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


@final
class _SubstringHashes:
    """Hashes of any substrings of one text: polynomials modulo 2**64, from running sums, all at once."""

    def __init__(self, text: str):
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        codes = (codes + np.uint64(1)) * _SCRAMBLE
        codes ^= codes >> np.uint64(29)
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * _powers(_MULTIPLIER, len(codes)), out=self._sums[1:])
        self._inverses = _powers(pow(_MULTIPLIER, -1, 1 << 64), len(codes) + 1)

    def of(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The hash of the substring from each start to its end."""
        return (self._sums[ends] - self._sums[starts]) * self._inverses[starts]


def _powers(base: int, count: int) -> np.ndarray:
    """`base**0 … base**(count - 1)` modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.multiply.accumulate(factors)
