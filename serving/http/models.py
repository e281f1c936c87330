# SPDX-License-Identifier: Apache-2.0
"""/v1/models: the models there are, in OpenAI's words and in Anthropic's at once. What Anthropic's clients do wrong is
told in their form."""

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.core.events import ModelCard
from serving.http.callers import VERSION_HEADER
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer
from serving.http.errors import ANTHROPIC
from serving.http.operations import Operation
from serving.http.paging import page, page_of
from serving.http.schemas import integer, object_of, text

OWNER = "metrale-jax"
FORMS = {VERSION_HEADER: ANTHROPIC}
OPENAIS = {"id": text(), "object": text("model"), "created": integer(), "owned_by": text()}
ANTHROPICS = {"type": text("model"), "display_name": text(), "created_at": text(), "lifecycle": text("active")}
MODEL = object_of({**OPENAIS, **ANTHROPICS, "max_model_len": integer(1)}, *OPENAIS, *ANTHROPICS)
ONE = Operation("One model.", answer=MODEL)
LIST = Operation("All models.", answer=page_of(MODEL))


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        get(desk, "/v1/models", models, about=LIST, forms=FORMS),
        get(desk, "/v1/models/{model:path}", model, about=ONE, forms=FORMS),
    ]


async def models(desk: Desk, asked: Asked) -> Response:
    """All of them; none while one loads."""
    cards = desk.service.models()
    return json_answer(page(cards, lambda card: card.id, model_object, None, len(cards)))


async def model(desk: Desk, asked: Asked) -> Response:
    """One of them."""
    name = asked.path["model"]
    for card in desk.service.models():
        if card.id == name:
            return json_answer(model_object(card))
    desk.lifecycle.refuse_unless_serving()
    raise ServiceError(Kind.NOT_FOUND, f"model {shown(name)} is not served here; see /v1/models.", field="model")


def model_object(card: ModelCard) -> dict[str, Any]:
    """The model object of OpenAI and of Anthropic, and what vLLM and we say beside it."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": OWNER,
        "type": "model",
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_context_tokens,
        "max_tokens": card.max_context_tokens,
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
