# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings: a vector for each text or list of token ids."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.responses import Response
from starlette.routing import Route

from metrale_jax.core.errors import RequestError, shown
from serving.core.calls import EmbedCall, Prompt
from serving.core.intake import MAX_INPUTS
from serving.http.answers import body_faults, known_only, label_of, switch
from serving.http.bodies import text_field
from serving.http.desk import Desk
from serving.http.endpoint import Asked, json_answer, post
from serving.http.errors import with_fields
from serving.http.operations import Operation
from serving.http.schemas import (
    ANYTHING,
    BOOLEAN,
    MODEL,
    TOKENS,
    USAGE,
    any_of,
    array,
    body_of,
    integer,
    number,
    object_of,
    text,
)
from serving.openai_body import checked_prompt

FORMATS, POOLINGS = ("float", "base64"), ("mean", "last")
FIELDS = {
    "input": any_of(text(), TOKENS, array(any_of(text(), TOKENS), 1, MAX_INPUTS)),
    "model": MODEL,
    "encoding_format": text(*FORMATS),
    "dimensions": integer(1),
    "user": ANYTHING,
    "pooling": text(*POOLINGS),
    "normalize": BOOLEAN,
    "add_special_tokens": BOOLEAN,
}
VECTOR = object_of(
    {"object": text("embedding"), "index": integer(0), "embedding": any_of(array(number()), text())},
    "object",
    "index",
    "embedding",
)
ANSWER = {"object": text("list"), "data": array(VECTOR), "model": text(), "usage": USAGE}
ABOUT = Operation(
    "A vector for each input.",
    body_of(FIELDS, "input"),
    object_of(
        {"object": text("list"), "data": array(VECTOR), "model": text(), "usage": USAGE}, "data", "model", "usage"
    ),
)
FORM = with_fields({"inputs": "input"})


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [post(desk, "/v1/embeddings", embed, form=FORM, about=ABOUT)]


async def embed(desk: Desk, asked: Asked) -> Response:
    """The vectors, float32; with `dimensions` their first so many numbers, at length one again."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        known_only(body, FIELDS)
        encoding, pooling = _one_of(body, "encoding_format", FORMATS), _one_of(body, "pooling", POOLINGS)
        normalize = switch(body, "normalize", True)
        inputs = _inputs(body.get("input"), switch(body, "add_special_tokens", True))
        dimensions = _dimensions(body, min((card.embedding_width for card in desk.model.models()), default=0))
    call = EmbedCall(inputs, pooling, normalize, asked.info(model))
    found = await desk.model.embed(call, asked.caller)
    data = []
    for index, one in enumerate(found):
        vector = np.asarray(one.vector, np.float32)[:dimensions]
        if dimensions is not None and normalize:
            vector = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)
        data.append({"object": "embedding", "index": index, "embedding": _spelt(vector, encoding)})
    num_tokens = sum(one.num_tokens for one in found)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_answer({"object": "list", "data": data, "model": label_of(desk, "", model).model, "usage": usage})


def _spelt(vector: np.ndarray, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


def _inputs(given: Any, add_special_tokens: bool) -> tuple[Prompt, ...]:
    several = isinstance(given, list) and any(isinstance(one, str | list) for one in given)
    found = []
    for one in given if several else [given]:
        try:
            text = checked_prompt(one)
        except RequestError as error:
            raise RequestError(str(error).replace("prompt", "input", 1), "input") from error
        of_text = isinstance(text, str)
        found.append(
            Prompt(text=text, add_special_tokens=add_special_tokens) if of_text else Prompt(token_ids=tuple(text))
        )
    return tuple(found)


def _dimensions(body: Mapping[str, Any], width: int) -> int | None:
    value = body.get("dimensions")
    if value is None:
        return None
    # While a model loads its width is not known, and the call is refused for that.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (width and value > width):
        raise RequestError(
            f"dimensions={shown(value, 80)} is not an integer from 1 to {width or 'the width of the model'}; "
            "give one, or leave it out.",
            "dimensions",
        )
    return value


def _one_of(body: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> Any:
    value = body.get(name)
    if value is None:
        return choices[0]
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"{name}={shown(value, 80)} is not one of {', '.join(choices)}; give one.", name)
    return value
