# SPDX-License-Identifier: Apache-2.0
"""`GenerationResult`s as OpenAI's chat.completion and text_completion objects."""

from collections.abc import Callable
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
            "logprobs": {"content": [_entry(one, label) for one in choice.logprobs]} if choice.logprobs else None,
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
            "logprobs": _columns(choice.logprobs, label) if choice.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(result.choices)
    ]
    return _whole("text_completion", choices, result, label)


def usage(result: GenerationResult) -> dict[str, Any]:
    """The usage object: the prompt counts once, generated tokens over all n answers."""
    prompt, generated = result.usage.prompt_tokens, sum(choice.usage.generated_tokens for choice in result.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": result.usage.cached_tokens},
    }


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


def _columns(logprobs: tuple[TokenLogprob, ...], label: Label) -> dict[str, list]:
    tokens = [_text(label.token_bytes(one.token_id)) for one in logprobs]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [
            {_text(label.token_bytes(token)): finite(logprob) for token, logprob in one.top} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _text(spelling: bytes) -> str:
    return spelling.decode("utf-8", "replace")
