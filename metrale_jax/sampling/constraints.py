# SPDX-License-Identifier: Apache-2.0
"""What may be drawn next, decided on the host from the answer so far: numpy only.

A mask is uint32 `[ceil(V / 32)]`: bit `i % 32` of word `i // 32` set lets token `i` be drawn. Masks are read-only.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Protocol

import numpy as np

from metrale_jax.sampling.params import SamplingParams

# So many bits are faster cleared one by one.
_FEW = 32


class Constraint(Protocol):
    """The rule of one answer, which moves with its tokens."""

    def mask(self) -> np.ndarray:
        """The words of the tokens that may come next; the caller does not write to them."""

    def accept(self, token: int) -> None:
        """Moves past `token`, which the last mask allowed."""

    def fork(self) -> "Constraint":
        """A copy that moves on its own."""


def full_mask(vocab_size: int) -> np.ndarray:
    """All tokens; bits past the vocabulary are set too."""
    return _read_only(np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32))


def mask_of(allowed: Iterable[int], vocab_size: int) -> np.ndarray:
    """The words in which just the ids `allowed` are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[np.fromiter(allowed, np.int64)] = True
    return _read_only(np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32))


def without(mask: np.ndarray, banned: Iterable[int]) -> np.ndarray:
    """`mask` with the bits of the ids `banned` cleared."""
    banned = list(banned)
    if len(banned) > _FEW:
        return _read_only(mask & ~mask_of(banned, mask.size * 32))
    words = mask.copy()
    for token in banned:
        words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return _read_only(words)


class FixedMask:
    """Always the same tokens."""

    def __init__(self, mask: np.ndarray):
        self._mask = mask

    def mask(self) -> np.ndarray:
        """The words that it was made of."""
        return self._mask

    def accept(self, token: int) -> None:
        """Nothing changes."""

    def fork(self) -> Constraint:
        """Itself: it has no state."""
        return self


class BadWords:
    """Bans the last token of a sequence while the answer ends in the tokens before it, as vLLM does.

    `words` are token ids; the prompt's tokens do not count. A step costs as much as there are words that continue the
    answer's last token.
    """

    def __init__(self, words: Iterable[Sequence[int]], vocab_size: int):
        words = [tuple(word) for word in words]
        self._always = without(full_mask(vocab_size), [word[0] for word in words if len(word) == 1])
        longer = [word for word in words if len(word) > 1]
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in longer:
            self._after.setdefault(word[-2], []).append(word)
        self._longest = max([len(word) - 1 for word in longer], default=0)
        self._tail: tuple[int, ...] = ()

    def mask(self) -> np.ndarray:
        """All tokens but those that would complete a word."""
        words = self._after.get(self._tail[-1], ()) if self._tail else ()
        banned = [word[-1] for word in words if self._tail[1 - len(word) :] == word[:-1]]
        return without(self._always, banned) if banned else self._always

    def accept(self, token: int) -> None:
        """Moves past `token`."""
        if self._longest:
            self._tail = (*self._tail, token)[-self._longest :]

    def fork(self) -> Constraint:
        """A copy that moves on its own; the words are shared."""
        other = object.__new__(BadWords)
        other.__dict__.update(self.__dict__)
        return other


class _All:
    def __init__(self, parts: Sequence[Constraint]):
        self._parts = tuple(parts)

    def mask(self) -> np.ndarray:
        return reduce(np.bitwise_and, [part.mask() for part in self._parts])

    def accept(self, token: int) -> None:
        for part in self._parts:
            part.accept(token)

    def fork(self) -> Constraint:
        return _All([part.fork() for part in self._parts])


def all_of(constraints: Sequence[Constraint]) -> Constraint:
    """What every one of `constraints`, at least one, allows."""
    return constraints[0] if len(constraints) == 1 else _All(constraints)


def bad_word_ids(words: Iterable[str | tuple[int, ...]], encode: Callable[[str], Sequence[int]]) -> list[tuple]:
    """Token ids of bad words: each text as the start of a text and, where that is other tokens, behind a space.

    `encode` gives a text's tokens without special ones. As in vLLM, the spaced spelling counts where it has as many
    tokens as the other and begins with another one.
    """
    found = []
    for word in words:
        if isinstance(word, tuple):
            found.append(word)
            continue
        plain, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        found.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found.append(spaced)
    return [word for word in found if word]


def fixed_mask(params: SamplingParams, vocab_size: int, bad_words: Sequence[Sequence[int]] = ()) -> np.ndarray | None:
    """The words of all that does not move: allowed ids, banned ids and bad words of one token; None if there is none.

    `bad_words` are those of `params` as token ids.
    """
    banned = [*params.banned_token_ids, *(word[0] for word in bad_words if len(word) == 1)]
    if params.allowed_token_ids is None and not banned:
        return None
    allowed = params.allowed_token_ids
    return without(full_mask(vocab_size) if allowed is None else mask_of(allowed, vocab_size), banned)


def constraint_of(
    params: SamplingParams,
    vocab_size: int,
    bad_words: Sequence[Sequence[int]] = (),
    structure: Constraint | None = None,
) -> Constraint | None:
    """All that moves with the answer's tokens, and `fixed_mask` with it, or None where nothing moves.

    `structure` is what the answer's structured form allows.
    """
    moving = [] if structure is None else [structure]
    longer = [word for word in bad_words if len(word) > 1]
    if longer:
        moving.append(BadWords(longer, vocab_size))
    fixed = fixed_mask(params, vocab_size, bad_words)
    if fixed is not None and moving:
        moving.append(FixedMask(fixed))
    return all_of(moving) if moving else None


def _read_only(words: np.ndarray) -> np.ndarray:
    words.flags.writeable = False
    return words
