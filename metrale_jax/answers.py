# SPDX-License-Identifier: Apache-2.0
"""`Answer`: one prompt's requests in the engine and the text that comes of them."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine.admission import Ask
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.request import Request, RequestMetrics
from metrale_jax.results import GenerationResult, Usage
from metrale_jax.sampling.constraints import Constraint
from metrale_jax.sampling.params import SamplingParams, seed_bits
from metrale_jax.text.answer import AnswerText
from metrale_jax.text.tokenizer import Tokenizer


def fresh_seed(params: SamplingParams) -> int:
    """The request's own seed, or one drawn now."""
    return secrets.randbits(32) if params.seed is None else params.seed


def checked_prompts(prompts) -> list:
    """A list of prompts from one text, one list of ids, or a list of either. Raises `RequestError` for other things."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        listed = list(prompts)
    except TypeError:
        raise RequestError(f"prompts={prompts!r} is no text, list of token ids or list of these; give one.") from None
    if listed and all(not isinstance(item, str) and not hasattr(item, "__len__") for item in listed):
        return [listed]
    for item in listed:
        if not isinstance(item, str) and not hasattr(item, "__len__"):
            raise RequestError(f"prompt {item!r} is neither a text nor a list of token ids; give one of these.")
    return listed


class Answer:
    """The `params.n` answers to one prompt, their text cut at stop strings."""

    def __init__(self, params: SamplingParams, seed: int, tokenizer: Tokenizer | None):
        self.params, self.seed = params, seed
        self._texts = [AnswerText(tokenizer, params) if tokenizer else None for _ in range(params.n)]
        self._requests: list[Request] = []
        self._error: MetraleError | None = None
        self.num_taken = 0

    def submit(
        self,
        engine: Engine,
        prompt: Sequence[int],
        eos_token_ids: tuple[int, ...],
        bad_words: Sequence[Sequence[int]] = (),
        structure: Constraint | None = None,
    ) -> None:
        """Queues the requests; all or none. `bad_words` are token ids, `structure` what a structured form allows."""
        self._requests = engine.submit(
            Ask(
                prompt=prompt,
                params=self.params,
                seeds=[seed_bits(self.seed, sample) for sample in range(self.params.n)],
                eos_token_ids=eos_token_ids,
                watches=[text.push if text else None for text in self._texts],
                bad_words=bad_words,
                structure=structure,
            )
        )

    def refuse(self, error: MetraleError) -> None:
        """Ends the answer before it began."""
        self._error = error

    def cancel(self, engine: Engine) -> None:
        """Gives back whatever still runs."""
        for request in self._requests:
            engine.cancel(request)

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self._error is not None or all(request.finished for request in self._requests)

    @property
    def max_tokens(self) -> int:
        """Most tokens that can come."""
        return sum(request.max_tokens for request in self._requests)

    @property
    def num_generated(self) -> int:
        """Tokens so far."""
        return sum(len(request.output) for request in self._requests)

    def take(self) -> tuple[str, tuple[int, ...]]:
        """Text and token ids of the first answer that are new since the last call."""
        request, text = self._requests[0], self._texts[0]
        if request.finished and text:
            text.close()
        tokens = tuple(request.output[self.num_taken :])
        self.num_taken = len(request.output)
        return text.take() if text else "", tokens

    def result(self) -> GenerationResult:
        """The finished answer. Call once all is `finished`."""
        if self._error is not None:
            empty = RequestMetrics(0.0, 0.0, 0.0, 0)
            return GenerationResult("", (), (), "error", Usage(0, 0, 0), empty, self.seed, self._error)
        first, *others = (self._result(i) for i in range(self.params.n))
        return replace(first, others=tuple(others)) if others else first

    def _result(self, index: int) -> GenerationResult:
        request, text = self._requests[index], self._texts[index]
        if text:
            text.close()
        return GenerationResult(
            text=text.whole if text else "",
            token_ids=tuple(request.output),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            usage=Usage(len(request.prompt), request.cached_tokens, len(request.output)),
            metrics=request.metrics(),
            seed=request.seed,
            error=request.error,
        )
