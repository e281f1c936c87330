# SPDX-License-Identifier: Apache-2.0
"""`Operation`: what a method of an API says of itself in /openapi.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.http.schemas import Schema

JSON, EVENTS, FORM = "application/json", "text/event-stream", "multipart/form-data"
REASONS: Mapping[int, str] = {
    400: "The call is wrong; param names the field.",
    401: "No key, or an unknown one.",
    403: "The key may not do this.",
    404: "There is no such model or page.",
    409: "It is in use, or has ended.",
    408: "The time that the call had is over.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    421: "The server has no such name.",
    429: "A limit is reached; Retry-After says when to come again.",
    500: "The server failed.",
    503: "The server loads, drains or is full; Retry-After says when to come again.",
}


@dataclass(frozen=True)
class Operation:
    """`body` and `answer` are schemas; what is not JSON has the type `media`. With `is_streamed` an answer may be
    events. `more` statuses have an answer of the same kind, `errors` are some beside those of every call. `form` is a
    body that is no JSON; `query` names what may come behind the path."""

    summary: str = ""
    body: Schema = field(default_factory=dict)
    answer: Schema = field(default_factory=dict)
    media: str = JSON
    is_streamed: bool = False
    more: tuple[int, ...] = ()
    errors: tuple[int, ...] = ()
    form: Schema = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)


def described(about: Operation, path: str, error: Schema, has_body: bool, is_open: bool) -> dict[str, Any]:
    """The operation object of OpenAPI 3.1; `error` is the schema of error objects."""
    content = {about.media: {"schema": dict(about.answer)}}
    if about.is_streamed:
        content[EVENTS] = {"schema": {"type": "string"}}
    answers = {"200": {"description": "The answer.", "content": content}}
    for status in sorted({*_statuses(path, has_body or bool(about.form), is_open), *about.errors}):
        answers[str(status)] = {"description": REASONS[status], "content": {JSON: {"schema": error}}}
    for status in about.more:
        answers[str(status)] = {"description": REASONS[status], "content": content}
    made: dict[str, Any] = {"summary": about.summary, "responses": answers}
    if has_body:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": dict(about.body)}}}
    if about.form:
        made["requestBody"] = {"required": True, "content": {FORM: {"schema": dict(about.form)}}}
    names = [part[1:].split(":")[0].rstrip("}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": dict(schema)} for name, schema in about.query.items()]
    if parameters:
        made["parameters"] = parameters
    return made | ({"security": []} if is_open else {})


def _statuses(path: str, has_body: bool, is_open: bool) -> tuple[int, ...]:
    """Those that end a call by an error object."""
    found = {400, 421, 500, 503} | (set() if is_open else {401, 403, 429})
    if has_body:
        found |= {404, 408, 413, 415}
    if "{" in path:
        found.add(404)
    return tuple(sorted(found))
