# SPDX-License-Identifier: Apache-2.0
"""From a request's words to tokens: bad words and the structure of an answer, for one model's tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from metrale_jax.core.errors import TextError
from metrale_jax.sampling.constraints import Constraint, bad_word_ids
from metrale_jax.sampling.params import STRUCTURES, SamplingParams
from metrale_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rules:
    """`bad_words` as token ids, and what the `structure` of an answer allows, if it has one."""

    bad_words: Sequence[Sequence[int]] = ()
    structure: Constraint | None = None


class RuleCompiler:
    """Makes `Rules` of `SamplingParams`. `tokenizer()` gives the model's or raises `TextError`."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids

    def rules(self, params: SamplingParams) -> Rules:
        """The rules of one request. Raises `RequestError` for a structure that cannot be held, `TextError` where texts
        need a tokenizer that is not there."""
        words = bad_word_ids(params.bad_words, self._encode) if params.bad_words else ()
        if not params.structured:
            return Rules(words)
        from metrale_jax.text.grammar_spec import GrammarSpec

        kind = next(name for name in STRUCTURES if getattr(params, name) is not None)
        return Rules(words, self._grammars.compile(GrammarSpec.of(kind, getattr(params, kind))))

    @cached_property
    def _grammars(self):
        # Only requests with a structure pay for the library and its view of the vocabulary.
        from metrale_jax.text.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer(), self._vocab_size, self._eos_token_ids)

    @cached_property
    def _encode(self) -> Callable[[str], Sequence[int]]:
        try:
            return partial(self._tokenizer().encode, add_special_tokens=False)
        except TextError:
            return _no_tokenizer


def _no_tokenizer(word: str) -> Sequence[int]:
    raise TextError(f"bad_words={word!r} needs a tokenizer, and the model has none; give its token ids.")
