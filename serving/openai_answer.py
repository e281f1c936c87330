# SPDX-License-Identifier: Apache-2.0
"""`GenerationResult`s as OpenAI's chat.completion and text_completion objects."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_jax.results import GenerationResult, TokenLogprob

# JSON has no infinity; OpenAI writes this for a token that cannot come.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Label:
    """What an answer says of itself: `id`, `created` in seconds since 1970, `model`; and how token ids are spelt."""

    id: str
    created: int
    model: str
    token_bytes: Callable[[int], bytes]


def chat_completion(result: GenerationResult, label: Label) -> dict[str, Any]:
    """The chat.completion object of all n answers."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, label),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _whole("chat.completion", choices, result, label)


def text_completion(result: GenerationResult, label: Label) -> dict[str, Any]:
    """The text_completion object of all n answers."""
    choices = [
        {
            "index": index,
            "text": choice.text,
            "logprobs": text_logprobs(choice.logprobs, label) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _whole("text_completion", choices, result, label)


def usage(result: GenerationResult) -> dict[str, Any]:
    """The usage object: the prompt counts once, generated tokens over all n answers."""
    generated = sum(choice.usage.generated_tokens for choice in result.choices)
    return usage_of(result.usage.prompt_tokens, generated, result.usage.cached_tokens)


def usage_of(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    """The usage object of so many tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], label: Label) -> dict[str, Any] | None:
    """The logprobs object of a chat; None where there are none."""
    return {"content": [_entry(one, label) for one in logprobs]} if logprobs else None


def text_logprobs(logprobs: Sequence[TokenLogprob], label: Label, first: int | None = None) -> dict[str, list]:
    """The logprobs object of a text. `first` is a token before them that has none, as a prompt begins with."""
    columns = LogprobColumns(label)
    return columns.of(logprobs, first)


class LogprobColumns:
    """Logprobs objects of the pieces of one text: offsets go on from piece to piece."""

    def __init__(self, label: Label):
        self._label = label
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprob], first: int | None = None) -> dict[str, list]:
        """The object of the next piece."""
        led = [] if first is None else [first]
        spellings = [self._label.token_bytes(token) for token in (*led, *(one.token_id for one in logprobs))]
        return {
            "tokens": [_text(spelling) for spelling in spellings],
            "token_logprobs": [None] * len(led) + [finite(one.logprob) for one in logprobs],
            "top_logprobs": [None] * len(led) + [self._top(one) for one in logprobs],
            "text_offset": [self._after(spelling) for spelling in spellings],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        # Tokens may be spelt alike; the likelier comes first and stays. The chosen one is always there.
        found: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(_text(self._label.token_bytes(token)), finite(logprob))
        return found

    def _after(self, spelling: bytes) -> int:
        """Where the token begins: behind the characters that were whole before it."""
        offset = self._offset
        self._offset += len(self._decoder.decode(spelling))
        return offset


def finite(logprob: float) -> float:
    """The log-probability as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)


def _whole(kind: str, choices: list[dict], result: GenerationResult, label: Label) -> dict[str, Any]:
    return {
        "id": label.id,
        "object": kind,
        "created": label.created,
        "model": label.model,
        "choices": choices,
        "usage": usage(result),
    }


def _entry(one: TokenLogprob, label: Label) -> dict[str, Any]:
    top = [_spelt(token, logprob, label) for token, logprob in one.top]
    return {**_spelt(one.token_id, one.logprob, label), "top_logprobs": top}


def _spelt(token: int, logprob: float, label: Label) -> dict[str, Any]:
    spelling = label.token_bytes(token)
    return {"token": _text(spelling), "logprob": finite(logprob), "bytes": list(spelling)}


def _text(spelling: bytes) -> str:
    return spelling.decode("utf-8", "replace")
