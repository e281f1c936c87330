# SPDX-License-Identifier: Apache-2.0
"""Output lines. Each carries the number of its input line, which is how a batch knows what is done."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metrale_jax.results import GenerationResult
from serving.openai_answer import Label, chat_completion, finite, text_completion


@dataclass(frozen=True)
class Origin:
    """Where a request came from: `line` counts from 1, `key` is its id under the name `key_name`, or None."""

    line: int
    openai: bool = True
    key_name: str = "custom_id"
    key: str | int | None = None

    @property
    def spelling(self) -> str:
        """The id as JSON, which tells 1 from "1"."""
        return json.dumps(self.key)

    @property
    def answer_id(self) -> str:
        """The name of this line's answer, the same in every run."""
        return f"batch_req_{self.line:012d}"


@dataclass(frozen=True)
class Told:
    """What all answers of a batch say of themselves: the model, when the batch was begun, and how tokens are spelt."""

    model: str
    created: int
    token_bytes: Callable[[int], bytes]

    def label(self, name: str) -> Label:
        """The label of one answer."""
        return Label(name, self.created, self.model, self.token_bytes)


def chat_record(origin: Origin, result: GenerationResult, told: Told) -> dict[str, Any]:
    """The output line of a chat completion."""
    body = chat_completion(result, told.label(f"chatcmpl-{origin.line:012d}"))
    return response_record(origin, 200, body, origin.answer_id)


def completion_record(origin: Origin, result: GenerationResult, told: Told) -> dict[str, Any]:
    """The output line of a text completion."""
    body = text_completion(result, told.label(f"cmpl-{origin.line:012d}"))
    return response_record(origin, 200, body, origin.answer_id)


def plain_record(origin: Origin, result: GenerationResult, told: Told) -> dict[str, Any]:
    """The output line of a plain prompt; `choices` lists all answers where more than one was asked for."""
    record = {"line": origin.line, **_identity(origin), **_choice(result)}
    if result.others:
        record["choices"] = [_choice(choice) for choice in result.choices]
    record["usage"] = {
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "generated_tokens": sum(choice.usage.generated_tokens for choice in result.choices),
    }
    return {**record, "error": None}


def response_record(origin: Origin, status: int, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """The output line of a request in OpenAI's form: what HTTP would have answered."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {**_head(origin), "response": response, "error": None, "line": origin.line}


def error_record(origin: Origin, code: str, message: str) -> dict[str, Any]:
    """The output line of a request that was not answered, in the form of its input line."""
    error = {"code": code, "message": message}
    if origin.openai:
        return {**_head(origin), "response": None, "error": error, "line": origin.line}
    return {"line": origin.line, **_identity(origin), "error": error}


def spelt(record: dict[str, Any]) -> bytes:
    """A record as a line of JSON, its end included."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _head(origin: Origin) -> dict[str, Any]:
    return {"id": origin.answer_id, "custom_id": origin.key}


def _identity(origin: Origin) -> dict[str, Any]:
    return {} if origin.key is None else {origin.key_name: origin.key}


def _choice(result: GenerationResult) -> dict[str, Any]:
    choice = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
    }
    if result.score is not None:
        choice["score"] = finite(result.score)
    if result.logprobs:
        choice["logprobs"] = [
            {"token_id": one.token_id, "logprob": finite(one.logprob), "top": [[t, finite(p)] for t, p in one.top]}
            for one in result.logprobs
        ]
    return choice
