# SPDX-License-Identifier: Apache-2.0
"""Structured output: which tokens may come next so that an answer keeps to a schema, a pattern, a list or a grammar.

`GrammarCompiler`, one for a tokenizer, turns a `GrammarSpec` into a `GrammarConstraint`, which follows one answer. The
automata are llguidance's; the bytes of the tokens and the ids that end an answer are ours. The whole answer has to
match: a constraint begins at the first generated token and lets the answer end only where it is complete.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self, final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from metrale_jax.core.errors import RequestError
from metrale_jax.text.grammar_spec import GrammarSpec, check_cost, library_grammar, named_tokens, refused
from metrale_jax.text.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 64

# The library compiles by recursion, and overflowing a thread's usual stack would end the process. The limit on the
# length of a text (`grammar_spec.MAX_TEXT`) bounds the depth; this holds it several times over. It is address space,
# not memory: only what a compilation touches is ever backed.
_COMPILE_STACK_BYTES = 256 << 20

# What one mask and one grammar may take: some 100 ms and 100 MB of the most ambiguous ones.
LIMITS = {"step_max_items": 10_000, "max_lexer_states": 100_000, "max_grammar_size": 250_000, "verbose_errors": False}
# What all masks of one answer may take: a grammar that is slow at each token would slow down everybody else's answers.
_BUDGET_S, _BUDGET_OF_TOKEN_S = 1.0, 0.02

# llguidance takes a token that begins with this byte for a special one. No UTF-8 text has it.
_SPECIAL_MARK = b"\xff"
_ANCHOR = "\x02"


@final
class GrammarConstraint:
    """What may be drawn next in one answer. Belongs to one thread at a time; `fork` for another answer.

    Special tokens are never allowed where the text of a grammar only spells them, and no id past the tokenizer is.
    Where the grammar leaves no choice of bytes, only the tokenizer's own next token of that stretch is allowed.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        field: str,
        text_ids: np.ndarray,
        eos_ids: np.ndarray,
        clock: Callable[[], float] = time.thread_time,
    ):
        self._matcher = matcher
        self._clock, self._left_s = clock, _BUDGET_S
        self._field = field
        self._text_ids = text_ids
        self._eos_ids = eos_ids
        self._num_ends = 0

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit `i % 32` of word `i // 32` says whether token i may be drawn next. Read-only.

        The ids that end an answer are set exactly where the answer may end, and alone where nothing can follow.
        Raises `RequestError` where the grammar cannot be followed further: too complex a step, or no token spells it.
        """
        if self.is_complete:
            return self._eos_ids
        began = self._clock()
        # The library's words may go on past the vocabulary.
        drawable = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._text_ids.size]
        self._spend(began)
        if self._matcher.is_error():
            raise self._stuck()
        words = drawable & self._text_ids
        if (drawable & self._eos_ids).any() and self._matcher.is_accepting():
            words |= self._eos_ids
        if not words.any():
            raise self._stuck()
        words.flags.writeable = False
        return words

    def accept(self, token: int) -> None:
        """Goes on by `token`, which `mask` allowed. After one that ends the answer only such ones are left.

        Raises `RequestError` where the place behind it is too complex to be followed.
        """
        if self._ends(token) and (self.is_complete or self._matcher.is_accepting()):
            self._num_ends += 1
            return
        began = self._clock()
        consumed = 0 if self.is_complete else self._matcher.try_consume_tokens([token])
        self._left_s += _BUDGET_OF_TOKEN_S
        self._spend(began)
        if self._matcher.is_error():
            raise self._stuck()
        assert consumed == 1, f"token {token} is not allowed by {self._field} here"

    def rollback(self, num_tokens: int) -> None:
        """Takes the last `num_tokens` accepted tokens back."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends:
            done = self._matcher.rollback(num_tokens - ends)
            assert done, f"{num_tokens} tokens of {self._field} cannot be taken back: {self._matcher.get_error()}"

    def fork(self) -> Self:
        """An independent constraint at the same place."""
        copy = type(self)(self._matcher.deep_copy(), self._field, self._text_ids, self._eos_ids, self._clock)
        copy._num_ends, copy._left_s = self._num_ends, self._left_s
        return copy

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing but its end can follow."""
        return self._num_ends > 0 or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _spend(self, began: float) -> None:
        self._left_s -= self._clock() - began
        if self._left_s < 0:
            raise RequestError(
                f"{self._field} takes more than {_BUDGET_OF_TOKEN_S * 1000:.0f} ms a token, which is too complex to be "
                "followed; write it without ambiguous recursion, or simplify it.",
                self._field,
            )

    def _ends(self, token: int) -> bool:
        return bool(self._eos_ids[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def _stuck(self) -> RequestError:
        reason = (
            self._matcher.get_error().partition("\n")[0].removesuffix("<non-verbose/>").strip()
            or "only the end could follow, which it does not allow"
        )
        return RequestError(
            f"{self._field} cannot be followed past this token ({reason}): it is too complex at this place, or no "
            "token of the vocabulary spells what it asks for; simplify it.",
            self._field,
        )


@final
class GrammarCompiler:
    """Makes constraints for one tokenizer. Any thread may use it.

    `vocab_size` is the model's, padding included, and the width of masks; `eos_token_ids` are all ids that end an
    answer. llguidance's view of the vocabulary is built at the first `compile` (a second for 262,144 tokens).
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted({int(token) for token in eos_token_ids if 0 <= token < vocab_size}))
        self._eos_ids = _bits(self._eos_token_ids, vocab_size)
        self._text_ids = np.zeros(0, np.uint32)
        self._library_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> GrammarConstraint:
        """A constraint at the start of an answer; the last `MAX_CACHED_GRAMMARS` grammars are kept compiled.

        Raises `RequestError` that names the field, the library's reason and the way out.
        """
        if not self._eos_token_ids:
            raise RequestError(
                f"{spec.kind} needs a token that ends the answer, and the model has none; name one as eos_token_id in "
                "its generation_config.json.",
                spec.kind,
            )
        with self._lock:
            matcher = self._compiled.get(spec)
            if matcher is not None:
                self._compiled.move_to_end(spec)
        if matcher is None:
            matcher = self._made(spec)
            with self._lock:
                self._compiled[spec] = matcher
                while len(self._compiled) > MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy(), spec.kind, self._text_ids, self._eos_ids)

    def _made(self, spec: GrammarSpec) -> LLMatcher:
        """The matcher of `spec` with its first mask worked out, which is the dearest, made on a deep stack."""
        grammar, made = library_grammar(spec), []
        check_cost(spec, grammar, LIMITS, named_tokens(spec, self._special_ids, self._vocab_size))

        def make() -> None:
            made.append(LLMatcher(self._library_tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS)))
            made[0].compute_bitmask()

        thread = threading.Thread(target=make, name="grammar")
        with self._lock:
            if self._library_tokenizer is None:
                self._build_tokenizer()
            # A thread has the stack size that is set when it starts.
            usual = threading.stack_size(_COMPILE_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)
        thread.join()
        assert made, "llguidance did not come back"
        if made[0].is_error():
            raise refused(spec, made[0].get_error().partition("<state>")[0])
        return made[0]

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        ids = self._tokenizer.special_token_ids | set(self._eos_token_ids)
        return {str(self._tokenizer.id_to_token(token)): token for token in ids if token < self._vocab_size}

    def _build_tokenizer(self) -> None:
        table = _TokenTable(self._tokenizer, self._vocab_size, self._eos_token_ids)
        # Ids with no bytes are padding and holes; the ends of an answer are added where it may end.
        spelt = [token for token, spelling in enumerate(table.tokens) if spelling]
        self._text_ids = _bits(spelt, self._vocab_size) & ~self._eos_ids
        self._library_tokenizer = LLTokenizer(table, eos_token=list(self._eos_token_ids))


@final
class _TokenTable:
    """What llguidance asks of a tokenizer, under the names it looks for."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.bos_token_id = None
        self.eos_token_id = eos_token_ids[0]
        # An id that ends the answer does so wherever it stands, whatever the vocabulary says of it.
        self._special = tokenizer.special_token_ids | set(eos_token_ids)
        self.special_token_ids = sorted(self._special)
        spellings = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.tokens = [b"" if spelling.startswith(_SPECIAL_MARK) else spelling for spelling in spellings]
        for token in eos_token_ids:
            self.tokens[token] = self.tokens[token] or f"<eos {token}>".encode()
        self._anchor_ids = tokenizer.encode(_ANCHOR, add_special_tokens=False)

    def __call__(self, text: str) -> list[int]:
        """Ids that spell exactly `text`, which the grammar leaves no choice about: the tokenizer's own where they do.

        Not so are special tokens that the text spells out, and the space that some tokenizers put before a text;
        behind an anchor they put none.
        """
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        if self._spells(plain, text):
            return plain
        anchored = self._tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        start = len(self._anchor_ids)
        if anchored[:start] == self._anchor_ids and self._spells(anchored[start:], text):
            return anchored[start:]
        return self._longest_matches(text.encode())

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        if any(token >= len(self.tokens) or token in self._special for token in ids):
            return False
        return b"".join(self.tokens[token] for token in ids) == text.encode()

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        spelt = ((spelling, token) for token, spelling in enumerate(self.tokens) if spelling)
        return {spelling: token for spelling, token in spelt if token not in self._special}

    def _longest_matches(self, text: bytes) -> list[int]:
        """The longest token at each place; a byte that none begins with gives an end, which no mask then allows."""
        by_bytes = self._ids_by_bytes
        longest = max(map(len, by_bytes), default=0)
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + longest), start, -1)
            end = next((end for end in ends if text[start:end] in by_bytes), None)
            ids.append(self.eos_token_id if end is None else by_bytes[text[start:end]])
            start = end or start + 1
        return ids


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """A read-only mask with the bits of `token_ids` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    words = np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
    words.flags.writeable = False
    return words
