# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies as prompts and `SamplingParams`. What is unknown or not served is an error that names it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import SamplingParams

Messages = list[dict[str, str]]

# They concern billing, routing or transport; the answer does not depend on them.
WITHOUT_EFFECT = frozenset(
    "model user metadata store service_tier stream stream_options safety_identifier prompt_cache_key "
    "parallel_tool_calls".split()
)
NOT_SERVED = {
    "tools": "describe the tools in a message",
    "tool_choice": "describe the tools in a message",
    "functions": "describe the functions in a message",
    "function_call": "describe the functions in a message",
    "suffix": "put it into the prompt",
    "best_of": "ask for n answers and choose",
    "audio": "ask for text",
    "modalities": "ask for text",
    "prediction": "leave it out",
}


def chat_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Messages, SamplingParams]:
    """Messages and parameters of a /v1/chat/completions body. `defaults` hold where the body says nothing.

    An answer without a limit runs to the context's end, as with OpenAI. Raises `RequestError`.
    """
    asked = _present(body)
    messages = _messages(asked.pop("messages", None))
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    wanted, top = asked.pop("logprobs", False), asked.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RequestError(
            f"logprobs={_short(wanted)} is neither true nor false; give one, and a count in top_logprobs."
        )
    if top is not None and not wanted:
        raise RequestError(f"top_logprobs={_short(top)} needs logprobs; set logprobs to true.")
    if wanted:
        asked["logprobs"] = top or 0
    return messages, _params(asked, {"max_tokens": None, **defaults})


def completion_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str | list[int], SamplingParams]:
    """Prompt (text or token ids) and parameters of a /v1/completions body. Raises `RequestError`."""
    asked = _present(body)
    prompt = asked.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return checked_prompt(prompt), _params(asked, defaults)


def sampling_params(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from fields by name, over `defaults`. Raises `RequestError` for a name that is no field."""
    known = {field.name for field in fields(SamplingParams)}
    for name in asked:
        if name not in known:
            raise RequestError(f"{name} is no known field of a request; leave it out, or use one of {_listing(known)}.")
    return SamplingParams(**{**defaults, **asked})


def checked_prompt(prompt: Any) -> str | list[int]:
    """The prompt itself, a text or a list of token ids. Raises `RequestError` for anything else."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise RequestError(f"prompt={_short(prompt)} is neither a text nor a list of token ids; give one of these.")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(f"prompt holds {_short(token)}, which is no token id; give one prompt for each request.")
    return prompt


def _present(body: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI's own clients write null for what was not set.
    return {name: value for name, value in body.items() if value is not None}


def _params(asked: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    for name, remedy in NOT_SERVED.items():
        if name in asked:
            raise RequestError(f"{name} is not served here; leave it out and {remedy}.")
    sampling = {name: value for name, value in asked.items() if name not in WITHOUT_EFFECT}
    if "response_format" in sampling:
        sampling.update(_format_fields(sampling.pop("response_format")))
    if "logit_bias" in sampling:
        _check_bias(sampling["logit_bias"])
    return sampling_params(sampling, defaults)


def _format_fields(wanted: Any) -> dict[str, Any]:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    given = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = given.get("schema") if isinstance(given, dict) else None
    choices = {
        "text": {},
        "json_object": {"json_schema": {"type": "object"}},
        "json_schema": {"json_schema": schema},
    }
    chosen = choices.get(kind) if isinstance(kind, str) else None
    if chosen is None or chosen.get("json_schema", schema or {}) is None:
        raise RequestError(
            f"response_format={_short(wanted)} is not one of text, json_object and json_schema with its schema; "
            "give one of these."
        )
    return chosen


def _check_bias(given: Any) -> None:
    if not isinstance(given, dict):
        raise RequestError(f"logit_bias={_short(given)} is no map from token ids to numbers; give one.")


def _messages(given: Any) -> Messages:
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages={_short(given)} is no list of at least one message; give one.")
    return [_message(message) for message in given]


def _message(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestError(f"message {_short(given)} has no role; give an object with role and content.")
    for name, value in given.items():
        if name not in ("role", "content", "name") and value is not None:
            raise RequestError(f"message field {name} is not served here; give role, content and name only.")
    message = {"role": given["role"], "content": _content(given.get("content"))}
    if given.get("name") is not None:
        message["name"] = str(given["name"])
    return message


def _content(given: Any) -> str:
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [given]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"content {_short(part)} is no text; give a text, or parts of type text.")
    return "".join(part["text"] for part in parts)


def _listing(names) -> str:
    return ", ".join(sorted(names))


def _short(value: Any) -> str:
    return shown(value, 80)
