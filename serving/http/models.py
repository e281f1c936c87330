# SPDX-License-Identifier: Apache-2.0
"""/v1/models: the models there are."""

from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.core.events import ModelCard
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer
from serving.http.operations import Operation
from serving.http.schemas import array, integer, object_of, text

OWNER = "metrale-jax"
MODEL = object_of(
    {"id": text(), "object": text("model"), "created": integer(), "owned_by": text(), "max_model_len": integer(1)},
    "id",
    "object",
    "created",
    "owned_by",
)
ONE = Operation("One model.", answer=MODEL)
LIST = Operation("All models.", answer=object_of({"object": text("list"), "data": array(MODEL)}, "object", "data"))


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [get(desk, "/v1/models", models, about=LIST), get(desk, "/v1/models/{model:path}", model, about=ONE)]


async def models(desk: Desk, asked: Asked) -> Response:
    """All of them; none while one loads."""
    return json_answer({"object": "list", "data": [model_object(card) for card in desk.service.models()]})


async def model(desk: Desk, asked: Asked) -> Response:
    """One of them."""
    name = asked.path["model"]
    for card in desk.service.models():
        if card.id == name:
            return json_answer(model_object(card))
    desk.lifecycle.refuse_unless_serving()
    raise ServiceError(Kind.NOT_FOUND, f"model {shown(name)} is not served here; see /v1/models.", field="model")


def model_object(card: ModelCard) -> dict[str, Any]:
    """The model object of OpenAI, and what vLLM and we say beside it."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": OWNER,
        "max_model_len": card.max_context_tokens,
        "architecture": card.architecture,
        "dtype": card.dtype,
        "vocab_size": card.vocab_size,
        "max_sequences": card.max_sequences,
        "embedding_width": card.embedding_width,
        "has_chat_template": card.has_chat_template,
        "eos_token_ids": list(card.eos_token_ids),
        "fingerprint": card.fingerprint,
    }
