# SPDX-License-Identifier: Apache-2.0
"""What a caller gets back."""

from dataclasses import dataclass

from metrale_jax.core.errors import MetraleError
from metrale_jax.engine.request import RequestMetrics, TokenLogprob

__all__ = ["GenerationResult", "NewPiece", "RequestMetrics", "StreamPiece", "TokenLogprob", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Token counts: `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class GenerationResult:
    """One prompt's answer.

    `text` leaves out the stop that ended it and special tokens; `token_ids` hold every drawn token, an ending stop id
    included. `logprobs` has one entry a token where they were asked for, else it is empty; `prompt_logprobs` one for
    each of `prompt_token_ids` after the first. With `echo` the prompt's text comes first in `text`. `finish_reason` is
    "stop", "length", "abort" or "error"; `error` says why the last came, and that a deadline ended an answer. `seed`
    reproduces the answer, `score` is what a beam search ranked it by. With n > 1 the other answers are in `others`;
    `choices` lists all.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    usage: Usage
    metrics: RequestMetrics
    seed: int
    error: MetraleError | None = None
    others: tuple["GenerationResult", ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None

    @property
    def choices(self) -> tuple["GenerationResult", ...]:
        """All n answers, this one first."""
        return (self, *self.others)


@dataclass(frozen=True)
class NewPiece:
    """What is new of answer `index` of one prompt: text that stands, tokens, and their log-probabilities where those
    were asked for. Text may lag behind its tokens, so one may come without the other. Of a `finished` answer nothing
    comes any more. `usage` counts the answer up to here."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finished: bool
    usage: Usage


class StreamPiece(str):
    """A piece of streamed text: a `str` that also carries `token_ids` newly drawn and, on the last piece, `result`."""

    token_ids: tuple[int, ...]
    result: GenerationResult | None

    def __new__(cls, text: str, token_ids: tuple[int, ...] = (), result: GenerationResult | None = None):
        piece = super().__new__(cls, text)
        piece.token_ids, piece.result = token_ids, result
        return piece

    @property
    def text(self) -> str:
        """The piece as a plain string."""
        return str(self)

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, on the last piece; empty before."""
        return self.result.finish_reason if self.result else ""
