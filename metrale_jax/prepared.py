# SPDX-License-Identifier: Apache-2.0
"""`Prepared`: a request that is ready to be queued, and `Preparer`, which makes one without the engine.

All that takes time is done here, in whatever thread asks: tokens, compiled structures, stop strings, checks.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metrale_jax.core.errors import ContextLengthError, RequestError, TextError, shown
from metrale_jax.engine.admission import Admitted, Ask, Limits, admitted, check_params, check_room
from metrale_jax.rules import RuleCompiler
from metrale_jax.sampling.params import SamplingParams, seed_bits
from metrale_jax.text.stops import StopPatterns
from metrale_jax.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A request that can be queued as it is, as often as wanted: the same `seed` gives the same answers.

    `tokenizer` makes text of them, None where the model has none.
    """

    admitted: Admitted
    seed: int
    stops: StopPatterns
    tokenizer: Tokenizer | None

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.admitted.ask.params

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self.admitted.prompt

    @property
    def max_tokens(self) -> int:
        """Most tokens that each answer can get."""
        return self.admitted.max_tokens


def fresh_seed(params: SamplingParams) -> int:
    """The request's own seed, or one drawn now."""
    return secrets.randbits(32) if params.seed is None else params.seed


class Preparer:
    """Makes `Prepared` for engines of given `limits`. Any thread may use it. `tokenizer()` gives the model's or raises
    `TextError`."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], eos_token_ids: tuple[int, ...], limits: Limits):
        self._tokenizer, self._eos_token_ids, self._limits = tokenizer, eos_token_ids, limits
        self._rules = RuleCompiler(tokenizer, limits.vocab_size, eos_token_ids)

    def tokens(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `RequestError` for one that cannot fit, told before it is tokenised where its
        length alone shows it."""
        tokenizer = self._tokenizer()
        if not isinstance(text, str):
            raise RequestError(f"text={shown(text)} is not a text; give one.", "prompt")
        # No token is shorter than a byte.
        if len(text.encode(errors="replace")) >= self._limits.max_context_tokens:
            least = tokenizer.least_tokens(text)
            if least >= self._limits.max_context_tokens:
                raise ContextLengthError(
                    f"prompt of {len(text)} characters has at least {least} tokens, the context has room for "
                    f"{self._limits.max_context_tokens}; shorten it, or raise max_context_tokens.",
                    "prompt",
                )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def prepared(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """The request, ready to be queued. Raises `RequestError` where it can never be served, `TextError` where it
        needs a tokenizer that is not there."""
        check_params(params, self._limits)
        tokenizer = self._tokenizer_for(params)
        tokens = self.tokens(prompt) if isinstance(prompt, str) else prompt
        if isinstance(prompt, Sequence):
            check_room(len(tokens), self._limits)  # before anything is made for every token of a long list
        rules, seed = self._rules.rules(params), fresh_seed(params)
        ask = Ask(
            prompt=tokens,
            params=params,
            seeds=[seed_bits(seed, sample) for sample in range(params.n)],
            eos_token_ids=self._eos_token_ids,
            bad_words=rules.bad_words,
            structure=rules.structure,
        )
        return Prepared(admitted(ask, self._limits), seed, StopPatterns.of(params.stop), tokenizer)

    def _tokenizer_for(self, params: SamplingParams) -> Tokenizer | None:
        try:
            return self._tokenizer()
        except TextError:
            if params.stop:
                raise TextError(
                    f"stop={shown(params.stop)} needs a tokenizer, and the model has none; use stop_token_ids."
                ) from None
            if params.echo:
                raise TextError(
                    "echo=True needs a tokenizer, and the model has none; join the token ids instead."
                ) from None
            return None
