# SPDX-License-Identifier: Apache-2.0
"""OpenAI request bodies as prompts and `SamplingParams`. What is unknown or not served is an error that names it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from serving.passed_over import OPENAI_HINTS, OPENAI_REFUSED, as_meant, refuse

Messages = list[dict[str, str]]

# Names that vLLM has, or had, for what structures an answer.
ALIASES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
STRUCTURES = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
FORMAT_SCHEMA = "response_format.json_schema.schema"
MAX_PROMPTS, MAX_ANSWERS = 256, 128


@dataclass(frozen=True)
class Completions:
    """A /v1/completions body: all its prompts, the `params` of each, and of their answers how many are kept, the
    likeliest. `logprobs` is what was asked for, whatever choosing needs. With `only_prompt` nothing is drawn."""

    prompts: tuple[str | list[int], ...]
    params: SamplingParams
    num_kept: int
    logprobs: int | None
    only_prompt: bool


def chat_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[Messages, SamplingParams]:
    """Messages and parameters of a /v1/chat/completions body. `defaults` hold where the body says nothing.

    An answer without a limit runs to the context's end, as with OpenAI. Raises `RequestError`.
    """
    others = {name: value for name, value in body.items() if name != "messages"}
    return chat_messages(body.get("messages")), chat_params(others, defaults)


def chat_params(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The parameters of such a body without its messages."""
    asked = _present(body)
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    wanted, top = asked.pop("logprobs", False), asked.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RequestError(
            f"logprobs={_short(wanted)} is neither true nor false; give one, and a count in top_logprobs.", "logprobs"
        )
    if top not in (None, 0) and not wanted:
        raise RequestError(f"top_logprobs={_short(top)} needs logprobs; set logprobs to true.", "top_logprobs")
    if isinstance(top, bool) or not isinstance(top, int | None) or not 0 <= (top or 0) <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs={_short(top)} is not an integer from 0 to {MAX_LOGPROBS}; ask for so many.", "top_logprobs"
        )
    if wanted:
        asked["logprobs"] = top or 0
    return _params(asked, {"max_tokens": None, **defaults})


def chat_messages(given: Any) -> Messages:
    """The messages of a chat, of text only. Raises `RequestError`."""
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages={_short(given)} is no list of at least one message; give one.", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def completion_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str | list[int], SamplingParams]:
    """Prompt (text or token ids) and parameters of a /v1/completions body. Raises `RequestError`."""
    asked = _present(body)
    prompt = asked.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return checked_prompt(prompt), _params(asked, defaults)


def completions_request(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Completions:
    """All that a /v1/completions body asks for. Raises `RequestError`."""
    asked = _present(body)
    given = asked.pop("prompt", None)
    several = isinstance(given, list) and not {str, list}.isdisjoint(map(type, given))
    prompts = tuple(map(checked_prompt, given)) if several else (checked_prompt(given),)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} prompts are over the limit of {MAX_PROMPTS}; send fewer.", "prompt")
    best_of = asked.pop("best_of", None)
    only_prompt = asked.get("max_tokens") == 0 and not isinstance(asked["max_tokens"], bool)
    if only_prompt:
        if asked.get("echo") is not True:
            raise RequestError("max_tokens=0 asks for nothing; set echo, or ask for a token.", "max_tokens")
        asked["max_tokens"] = 1
    params = _params(asked, defaults)
    kept, logprobs = checked_answers("n", params.n), params.logprobs
    if params.echo and logprobs is not None:
        params = replace(params, prompt_logprobs=logprobs)
    if best_of is not None and checked_answers("best_of", best_of) != kept:
        if best_of < kept:
            raise RequestError(f"best_of={best_of} is below n={kept}; draw as many, or keep fewer.", "best_of")
        # They are compared by their log-probabilities.
        params = replace(params, n=best_of, logprobs=logprobs or 0)
    return Completions(prompts, params, kept, logprobs, only_prompt)


def names_of(body: Mapping[str, Any]) -> dict[str, str]:
    """What a body calls those fields of `SamplingParams` that it gives under another name, and under one only."""
    found = [(ours, name) for name, ours in ALIASES.items() if body.get(name) is not None]
    structures, form = body.get("structured_outputs"), body.get("response_format")
    if isinstance(structures, dict):
        found += [(STRUCTURES[name], f"structured_outputs.{name}") for name in structures if name in STRUCTURES]
    if isinstance(form, dict) and form.get("type") == "json_schema":
        found.append(("json_schema", "response_format.json_schema.schema"))
    given = [ours for ours, _ in found] + [name for name, value in body.items() if value is not None]
    names = {ours: theirs for ours, theirs in found if given.count(ours) == 1}
    # The newer name holds where both are given.
    return names | ({} if body.get("max_completion_tokens") is None else {"max_tokens": "max_completion_tokens"})


def checked_answers(name: str, value: Any) -> int:
    """The number of answers. Raises `RequestError` for what is none, or too many to hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ANSWERS:
        raise RequestError(f"{name}={_short(value)} is not an integer from 1 to {MAX_ANSWERS}; ask for so many.", name)
    return value


def sampling_params(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from fields by name, over `defaults`. Raises `RequestError` for a name that is no field."""
    known = {field.name for field in fields(SamplingParams)}
    for name in asked:
        if name not in known:
            raise RequestError(
                f"{_name(name)} is no known field of a request; leave it out, or use one of {_listing(known)}.",
                _name(name),
            )
    return SamplingParams(**{**defaults, **asked})


def checked_prompt(prompt: Any) -> str | list[int]:
    """The prompt itself, a text or a list of token ids. Raises `RequestError` for anything else."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt={_short(prompt)} is neither a text nor a list of token ids; give one of these.", "prompt"
        )
    # There may be millions of ids: not a step of Python for each.
    if set(map(type, prompt)) - {int}:
        wrong = next(token for token in prompt if type(token) is not int)
        raise RequestError(
            f"prompt holds {_short(wrong)}, which is no token id; give integers alone, or a text.", "prompt"
        )
    return prompt


def _present(body: Mapping[str, Any]) -> dict[str, Any]:
    # OpenAI's own clients write null for what was not set.
    return {name: value for name, value in body.items() if value is not None}


def _params(asked: dict[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    refuse(asked, OPENAI_REFUSED)
    sampling = {name: value for name, value in asked.items() if name not in OPENAI_HINTS | OPENAI_REFUSED.keys()}
    _put(sampling, _structures(sampling))
    if "response_format" in sampling:
        _put(sampling, _format_fields(sampling.pop("response_format")))
    if "logit_bias" in sampling:
        _check_bias(sampling["logit_bias"])
    return sampling_params(as_meant(sampling), defaults)


def _structures(sampling: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's names say of the structure; they are taken out."""
    found = {ALIASES[name]: sampling.pop(name) for name in tuple(sampling) if name in ALIASES}
    given = sampling.pop("structured_outputs", None)
    if given is not None and not isinstance(given, dict):
        raise RequestError(f"structured_outputs={_short(given)} is no object; give one.", "structured_outputs")
    for name, value in (given or {}).items():
        if name not in STRUCTURES and value is not None:
            raise RequestError(
                f"structured_outputs has {_name(name)}, which is not served; use one of {_listing(STRUCTURES)}.",
                "structured_outputs",
            )
        if value is not None:
            _put(found, {STRUCTURES[name]: value})
    return found


def _put(sampling: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name in sampling:
            raise RequestError(f"{name} is given under two names; leave one of them out.", name)
        sampling[name] = value


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
            "give one of these.",
            "response_format",
        )
    return chosen


def _check_bias(given: Any) -> None:
    if not isinstance(given, dict):
        raise RequestError(f"logit_bias={_short(given)} is no map from token ids to numbers; give one.", "logit_bias")


def _message(given: Any, place: str) -> dict[str, str]:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise RequestError(f"message {_short(given)} has no role; give an object with role and content.", place)
    for name, value in given.items():
        if name not in ("role", "content", "name") and value is not None:
            raise RequestError(
                f"message field {_name(name)} is not served here; give role, content and name only.", place
            )
    message = {"role": given["role"], "content": _content(given.get("content"), place)}
    if given.get("name") is not None:
        message["name"] = str(given["name"])
    return message


def _content(given: Any, place: str) -> str:
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [given]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"content {_short(part)} is no text; give a text, or parts of type text.", f"{place}.content"
            )
    return "".join(part["text"] for part in parts)


def _listing(names) -> str:
    return ", ".join(sorted(names))


def _name(given: str) -> str:
    """A field's name that is the caller's, of any length."""
    return given if len(given) <= 80 else given[:77] + "..."


def _short(value: Any) -> str:
    return shown(value, 80)
