# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that operations are described with. As in bodies, null is what was not set."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from metrale_jax.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT,
    MAX_TEMPERATURE,
)
from serving.openai_body import ALIASES, MAX_ANSWERS, STRUCTURES
from serving.passed_over import OPENAI_HINTS, OPENAI_REFUSED, described

Schema = Mapping[str, Any]
ANYTHING: Schema = MappingProxyType({})


def _range(least: float | None, most: float | None) -> dict[str, Any]:
    return {name: value for name, value in (("minimum", least), ("maximum", most)) if value is not None}


def integer(least: int | None = None, most: int | None = None) -> dict[str, Any]:
    """An integer in a range."""
    return {"type": "integer"} | _range(least, most)


def number(least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """A number in a range."""
    return {"type": "number"} | _range(least, most)


def text(*choices: str) -> dict[str, Any]:
    """A text, one of the choices where there are any."""
    return {"type": "string"} | ({"enum": list(choices)} if choices else {})


def array(items: Schema, least: int | None = None, most: int | None = None) -> dict[str, Any]:
    """A list."""
    lens = (("minItems", least), ("maxItems", most))
    return {"type": "array", "items": dict(items)} | {name: value for name, value in lens if value is not None}


def any_of(*schemas: Schema) -> dict[str, Any]:
    """One of these."""
    return {"anyOf": [dict(one) for one in schemas]}


def nullable(schema: Schema) -> dict[str, Any]:
    """This, or null."""
    return any_of(schema, {"type": "null"})


def object_of(properties: Mapping[str, Schema], *required: str, closed: bool = False) -> dict[str, Any]:
    """An object with these, of which some have to be there; `closed` to all others."""
    made = {"type": "object", "properties": {name: dict(one) for name, one in properties.items()}}
    return (
        made | ({"required": list(required)} if required else {}) | ({"additionalProperties": False} if closed else {})
    )


def body_of(properties: Mapping[str, Schema], *required: str) -> dict[str, Any]:
    """The body of a call: what is not required may be null, and nothing else is known."""
    own = {name: one if name in required else nullable(one) for name, one in properties.items()}
    return object_of(own, *required, closed=True)


BOOLEAN = MappingProxyType({"type": "boolean"})
TOKEN = MappingProxyType({"type": "integer", "minimum": 0})
TOKENS = array(TOKEN)
MODEL = text()
# What a body can say of how an answer is drawn, under our names.
PARAMS: Mapping[str, Schema] = MappingProxyType(
    {
        "n": integer(1, MAX_ANSWERS),
        "temperature": number(0, MAX_TEMPERATURE),
        "top_n_sigma": number(0),
        "top_k": integer(-1),
        "top_p": number(0, 1),
        "min_p": number(0, 1),
        "typical_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": {
            "type": "object",
            "additionalProperties": number(-100, 100),
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        "allowed_token_ids": array(TOKEN, 1),
        "banned_token_ids": TOKENS,
        "bad_words": array(any_of({"type": "string", "pattern": "\\S"}, array(TOKEN, 1))),
        "seed": integer(-(2**63), 2**64 - 1),
        "max_tokens": integer(1),
        "min_tokens": integer(0),
        "stop": any_of({"type": "string", "minLength": 1}, array({"type": "string", "minLength": 1})),
        "stop_token_ids": TOKENS,
        "ignore_eos": BOOLEAN,
        "include_stop_str_in_output": BOOLEAN,
        "skip_special_tokens": BOOLEAN,
        "logprobs": integer(0, MAX_LOGPROBS),
        "prompt_logprobs": integer(0, MAX_LOGPROBS),
        "echo": BOOLEAN,
        "json_schema": any_of({"type": "object"}, text()),
        "regex": {"type": "string", "minLength": 1},
        "choice": array({"type": "string", "minLength": 1}, 1),
        "grammar": {"type": "string", "minLength": 1},
        "beam_width": integer(0),
        "length_penalty": number(-100, 100),
        "early_stopping": {"enum": [True, False, "never"]},
        "priority": integer(-(2**31), 2**31 - 1),
        "deadline_s": {"type": "number", "exclusiveMinimum": 0},
        "cache_salt": {"type": "string", "maxLength": MAX_SALT},
    }
)
PART = object_of({"type": text("text"), "text": text()}, "type", "text")
MESSAGE = object_of(
    {"role": text(), "content": any_of(text(), array(PART)), "name": nullable(text())}, "role", "content", closed=True
)
MESSAGES = array(MESSAGE, 1)
STREAM_OPTIONS = {"type": "object", "properties": {"include_usage": nullable(BOOLEAN)}}
GIVEN_SCHEMA = object_of({"schema": {"type": "object"}}, "schema")
FORMAT = any_of(
    object_of({"type": text("text", "json_object")}, "type"),
    object_of({"type": text("json_schema"), "json_schema": GIVEN_SCHEMA}, "type", "json_schema"),
)
# What both kinds of generation take beside their prompts.
GENERATION: Mapping[str, Schema] = MappingProxyType(
    {
        **described(OPENAI_HINTS, OPENAI_REFUSED),
        **PARAMS,
        **{alias: PARAMS[name] for alias, name in ALIASES.items()},
        "structured_outputs": object_of({name: nullable(PARAMS[own]) for name, own in STRUCTURES.items()}, closed=True),
        "response_format": FORMAT,
        "model": MODEL,
        "stream": BOOLEAN,
        "stream_options": STREAM_OPTIONS,
        "return_token_ids": BOOLEAN,
    }
)
USAGE = object_of(
    {name: integer(0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    "prompt_tokens",
    "total_tokens",
)
OPENAI_ERROR = object_of(
    {
        "error": object_of(
            {"message": text(), "type": text(), "param": nullable(text()), "code": nullable(text())},
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
ANTHROPIC_ERROR = object_of(
    {
        "type": text("error"),
        "error": object_of({"type": text(), "message": text()}, "type", "message"),
        "request_id": text(),
    },
    "type",
    "error",
    "request_id",
)
