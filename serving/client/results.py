# SPDX-License-Identifier: Apache-2.0
"""What a caller of the client gets back: frozen, plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Token counts: `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds on the server since the request was queued, its speed past the first token, and how often it had to make
    room for others."""

    queued_s: float
    first_token_s: float
    finished_s: float
    decode_tokens_per_s: float
    num_preemptions: int


@dataclass(frozen=True)
class TopLogprob:
    """One of the likeliest tokens of a place: its id, log-probability and bytes."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True)
class TokenLogprob:
    """A token's id, its log-probability before temperature and all that follows it, its bytes, and the likeliest ones
    of its place where they were asked for."""

    token_id: int
    logprob: float
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True)
class Generation:
    """One answer.

    `text` leaves out the stop that ended it; `token_ids` hold every drawn token. `finish_reason` is "stop", "length",
    "abort" or "error". `seed` draws the same answer again, whatever else the server does then. `logprobs` has one entry
    a token where they were asked for, `prompt_logprobs` one for each of `prompt_token_ids` but the first; `score` is a
    beam search's. `index` is its place among n answers, or its branch; the first answer holds the `others`, and
    `choices` lists all. `model` is known of whole answers only, not of streamed ones.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    score: float | None = None
    index: int = 0
    request_id: str = ""
    model: str = ""
    others: tuple["Generation", ...] = ()

    @property
    def choices(self) -> tuple["Generation", ...]:
        """All answers, this one first."""
        return (self, *self.others)

    @property
    def total_usage(self) -> Usage:
        """The prompt once, and the generated tokens of all answers."""
        generated = sum(one.usage.generated_tokens for one in self.choices)
        return Usage(self.usage.prompt_tokens, self.usage.cached_tokens, generated)


class Piece(str):
    """A piece of streamed text: a `str` that also carries the `index` of its answer, newly drawn `token_ids`, their
    `logprobs` where asked for, and on the last of an answer, which has no text, its `result`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    result: Generation | None

    def __new__(
        cls,
        text: str,
        index: int = 0,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        result: Generation | None = None,
    ):
        piece = super().__new__(cls, text)
        piece.index, piece.token_ids, piece.logprobs, piece.result = index, token_ids, logprobs, result
        return piece

    @property
    def text(self) -> str:
        """The piece as a plain string."""
        return str(self)


@dataclass(frozen=True)
class Score:
    """A continuation's token ids, the log-probability of each and their sum, or a prompt's own."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    total_logprob: float
    usage: Usage


@dataclass(frozen=True)
class Embedding:
    """One input's vector and how many tokens it was."""

    vector: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True)
class Tokens:
    """Token ids and the bytes of each."""

    token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...]


@dataclass(frozen=True)
class Model:
    """What is known of a served model; `created` is in seconds since 1970."""

    id: str
    architecture: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    max_sequences: int
    embedding_width: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    created: int
