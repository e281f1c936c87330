# SPDX-License-Identifier: Apache-2.0
"""One line of the input as a `Job`, or the reason why it is none."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from metrale_jax.core.errors import MetraleError, RequestError, shown
from metrale_jax.sampling.params import SamplingParams
from serving.batch.backend import Prompt
from serving.batch.files import MAX_LINE_BYTES
from serving.batch.records import Origin, chat_record, completion_record, plain_record
from serving.openai_body import chat_request, checked_prompt, completion_request, sampling_params

# More answers than this to one prompt are one request too large to hold.
MAX_ANSWERS = 128
OPENAI_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class Endpoint:
    """How a url's body is read and its answer written."""

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[Prompt, SamplingParams]]
    write: Callable


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(chat_request, chat_record),
    "/v1/completions": Endpoint(completion_request, completion_record),
}


@dataclass(frozen=True)
class Job:
    """A request that can run: where it came from, what to ask of the model, and how to write the answer."""

    origin: Origin
    prompt: Prompt
    params: SamplingParams
    write: Callable
    num_bytes: int

    @property
    def sort_key(self) -> tuple:
        """Prompts of one kind compare as they begin; equal ones as they came."""
        if isinstance(self.prompt, str):
            return 0, self.prompt, self.origin.line
        if isinstance(self.prompt[0], int):
            return 1, self.prompt, self.origin.line
        return 2, "".join(f"{said['role']}\0{said['content']}\0" for said in self.prompt), self.origin.line


class BadLine(MetraleError):
    """A line that cannot become a job. `code` names the kind of fault, `origin` what is known of the line."""

    def __init__(self, code: str, message: str, origin: Origin):
        super().__init__(message)
        self.code, self.origin = code, origin


def decoded(line: int, raw: bytes) -> dict[str, Any]:
    """The object that a line holds. Raises `BadLine`."""
    origin = Origin(line)
    if len(raw) > MAX_LINE_BYTES:
        message = f"the line is longer than {MAX_LINE_BYTES} bytes; write one request on each line."
        raise BadLine("invalid_json", message, origin)
    try:
        record = json.loads(raw.decode("utf-8"))
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadLine("invalid_json", f"byte {error.start} is no UTF-8; save the file as UTF-8.", origin) from None
    except UnicodeEncodeError:
        remedy = "write the character itself or both halves"
        raise BadLine("invalid_json", f"the line holds half of a surrogate pair; {remedy}.", origin) from None
    except (ValueError, RecursionError) as error:
        message = f"the line is no JSON ({error}); write one object on each line."
        raise BadLine("invalid_json", message, origin) from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise BadLine("invalid_json", f"the line holds a {kind}, no object; write one object on each line.", origin)
    return record


def origin_of(line: int, record: Mapping[str, Any]) -> Origin:
    """Where a record came from. Raises `BadLine` for an id that is no id."""
    openai = not OPENAI_FIELDS.isdisjoint(record) and "prompt" not in record
    names = [name for name in ("custom_id", "id") if record.get(name) is not None]
    origin = Origin(line, openai, names[0] if names else "id", None)
    if len(names) > 1:
        raise BadLine("invalid_request", "the line has both id and custom_id; give one of them.", origin)
    value = record[names[0]] if names else None
    if openai and (not isinstance(value, str) or not value):
        message = f"custom_id={shown(value)} is not a text of at least one character; give each line its own."
        raise BadLine("invalid_request", message, origin)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
        message = f"{names[0]}={shown(value)} is neither a text nor an integer; give one of these."
        raise BadLine("invalid_request", message, origin)
    return replace(origin, key=value)


def job_of(origin: Origin, record: Mapping[str, Any], defaults: Mapping[str, Any], num_bytes: int) -> Job:
    """The job that a record asks for; sampling `defaults` hold where it says nothing. Raises `BadLine`."""
    try:
        if origin.openai:
            prompt, params, write = _openai(record, defaults)
        else:
            prompt, params, write = _plain(record, defaults)
        if not prompt:
            raise RequestError("prompt of length 0 is empty; give some text or token ids.")
        if params.n > MAX_ANSWERS:
            raise RequestError(f"n={params.n} is above {MAX_ANSWERS}; ask for fewer, or write the prompt again.")
    except MetraleError as error:
        raise BadLine("invalid_request", str(error), origin) from None
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        # No check foresaw it: it is this line's fault all the same, and no reason to leave the others unanswered.
        message = f"the line is no request that can be read ({type(error).__name__}: {error}); correct its fields."
        raise BadLine("invalid_request", message, origin) from None
    if params.seed is None:
        params = replace(params, seed=seed_of(origin))
    return Job(origin, prompt, params, write, num_bytes)


def seed_of(origin: Origin) -> int:
    """The seed of a request that names none: 32 bits from its id, or from its line number where it has no id."""
    named = origin.line if origin.key is None else origin.spelling
    return int.from_bytes(blake2b(str(named).encode(), digest_size=4).digest())


def openai_body(record: Mapping[str, Any], urls: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The url and the body of a line in OpenAI's form. Raises `RequestError` for one that is none."""
    for name in record:
        if name not in OPENAI_FIELDS:
            raise RequestError(f"{name} is no field of a batch line; put it into body or leave it out.")
    method, url, body = record.get("method", "POST"), record.get("url"), record.get("body")
    if method != "POST":
        raise RequestError(f"method={shown(method)} is not served; use POST.")
    if not isinstance(url, str) or url not in urls:
        use = f"one of {', '.join(urls)}" if len(urls) > 1 else "".join(urls)
        raise RequestError(f"url={shown(url)} is not served; use {use}.")
    if not isinstance(body, dict):
        raise RequestError(f"body of type {type(body).__name__} is no object; give the request's fields.")
    if body.get("stream"):
        raise RequestError("stream=true has no meaning in a batch; leave it out.")
    return url, body


def _openai(record: Mapping[str, Any], defaults: Mapping[str, Any]):
    url, body = openai_body(record, ENDPOINTS)
    return *ENDPOINTS[url].read(body, defaults), ENDPOINTS[url].write


def _plain(record: Mapping[str, Any], defaults: Mapping[str, Any]):
    if "prompt" not in record:
        raise RequestError("the line has neither a prompt nor custom_id, url and body; give one or the other.")
    asked = {name: value for name, value in record.items() if name not in ("prompt", "id", "custom_id")}
    return checked_prompt(record["prompt"]), sampling_params(asked, defaults), plain_record
