# SPDX-License-Identifier: Apache-2.0
"""What comes back from the service: frozen, plain data."""

from dataclasses import dataclass, field

from metrale_jax.results import GenerationResult, TokenLogprob, Usage


@dataclass(frozen=True)
class Delta:
    """What is new of answer `index`: text that stands, its token ids, and their log-probabilities where asked for.

    A reader that falls behind gets what it missed in one piece, so a delta has any number of tokens. Text may lag
    behind its tokens (half a character, the beginning of a stop string), so one may have either without the other.
    `usage` counts the answer up to here, where that is known.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    # It says what was counted, not what is new.
    usage: Usage | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Ended:
    """Answer `index` is complete: its whole result, the text and tokens of the deltas before included."""

    index: int
    result: GenerationResult


Event = Delta | Ended


@dataclass(frozen=True)
class Scored:
    """One continuation's token ids and a `TokenLogprob` of each (the first token of a whole prompt has none);
    `cached_tokens` of its prompt were not computed again."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    cached_tokens: int

    @property
    def total_logprob(self) -> float:
        """Their sum."""
        return sum(one.logprob for one in self.logprobs)


@dataclass(frozen=True)
class Embedded:
    """One input's vector, float32 as Python floats, and its token count."""

    vector: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True)
class ModelCard:
    """What a client may know of a model."""

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
