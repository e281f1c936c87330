# SPDX-License-Identifier: Apache-2.0
"""/v1/batches: files of requests that are answered beside live calls, whenever there is room."""

import re
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.http.answers import known_only
from serving.http.batch_lines import endpoints
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer, post
from serving.http.errors import HttpFault
from serving.http.files import kept_for, work_of
from serving.http.metadata import METADATA, metadata_of
from serving.http.operations import Operation
from serving.http.paging import known_query, one_of, page, page_of, whole_number
from serving.http.schemas import array, integer, nullable, object_of, text
from serving.store.owner import Owner
from serving.store.records import BATCH_INPUT, FINISHED, UNFINISHED, StoredBatch, new_id
from serving.store.store import Store

FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
WINDOW = re.compile(r"([1-9]\d{0,3})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * SECONDS["d"]
MAX_PAGE, PAGE = 100, 20
MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
KEEPING = object_of({"anchor": text("created_at"), "seconds": integer(1)}, "anchor", "seconds")
FAULT = object_of({"code": text(), "line": nullable(integer(1)), "message": text(), "param": nullable(text())})
ASKED = object_of(
    {
        "input_file_id": text(),
        "endpoint": text(),
        "completion_window": {"type": "string", "pattern": f"^{WINDOW.pattern}$"},
        "metadata": METADATA,
        "output_expires_after": nullable(KEEPING),
    },
    "input_file_id",
    "endpoint",
    "completion_window",
    closed=True,
)
BATCH = object_of(
    {
        "id": text(),
        "object": text("batch"),
        "endpoint": text(),
        "model": nullable(text()),
        "errors": nullable(object_of({"object": text("list"), "data": array(FAULT)})),
        "input_file_id": text(),
        "completion_window": text(),
        "status": text(*UNFINISHED, *FINISHED),
        "output_file_id": nullable(text()),
        "error_file_id": nullable(text()),
        "created_at": integer(),
        "expires_at": integer(),
        **{f"{moment}_at": nullable(integer()) for moment in MOMENTS},
        "request_counts": object_of({name: integer(0) for name in ("total", "completed", "failed")}),
        "metadata": nullable({"type": "object"}),
    },
    "id",
    "status",
    "request_counts",
)
QUERY = {"after": text(), "limit": integer(1, MAX_PAGE)}
CREATE = Operation("Begins a batch: requests of a file, answered when there is room.", ASKED, BATCH)
LIST = Operation("The batches of this key.", answer=page_of(BATCH), query=QUERY, errors=(404,))
ONE = Operation("One of them.", answer=BATCH)
CANCEL = Operation("Ends one of them; what was answered is kept.", answer=BATCH, errors=(409,))


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        post(desk, "/v1/batches", create, about=CREATE),
        get(desk, "/v1/batches", listed, about=LIST),
        get(desk, "/v1/batches/{batch_id}", batch, about=ONE),
        post(desk, "/v1/batches/{batch_id}/cancel", cancel, has_body=False, about=CANCEL),
    ]


async def create(desk: Desk, asked: Asked) -> Response:
    """A batch that has begun."""
    work, body = work_of(desk), asked.body
    store = work.store
    owner = store.owner(asked.caller.key_id)
    known_only(body, FIELDS)
    endpoint = one_of("endpoint", body.get("endpoint"), tuple(endpoints(desk)))
    window_s = _window_s(body.get("completion_window"))
    metadata, keep_s = metadata_of(body), _keep_s(body.get("output_expires_after"), store)
    given = body.get("input_file_id")
    if not isinstance(given, str):
        message = f"input_file_id={shown(given, 80)} is no text; give the id of a file."
        raise ServiceError(Kind.INVALID, message, field="input_file_id")
    source = owner.file(given, "input_file_id")
    if source.purpose != BATCH_INPUT:
        message = f"file {given} has purpose {source.purpose}; give one whose purpose is {BATCH_INPUT}."
        raise ServiceError(Kind.INVALID, message, field="input_file_id")
    await _make_room(store, owner)
    made = StoredBatch(
        id=new_id("batch_"),
        key_id=asked.caller.key_id,
        endpoint=endpoint,
        input_file_id=source.id,
        window=body["completion_window"],
        created=store.now,
        expires=store.now + window_s,
        keep_s=keep_s,
        metadata=metadata,
    )
    try:
        await store.put(owner, made)
    except ServiceError:
        owner.batches.pop(made.id, None)
        raise
    work.begin(owner, made)
    return json_answer(batch_object(made))


async def listed(desk: Desk, asked: Asked) -> Response:
    """The batches of this key, the newest first."""
    owner, query = work_of(desk).store.owner(asked.caller.key_id), asked.query
    known_query(query, ("after", "limit"))
    limit = whole_number("limit", query.get("limit", PAGE), 1, MAX_PAGE)
    found = list(owner.batches.values())[::-1]
    return json_answer(page(found, lambda one: one.id, batch_object, query.get("after"), limit))


async def batch(desk: Desk, asked: Asked) -> Response:
    """One of them."""
    return json_answer(batch_object(_batch(desk, asked)))


async def cancel(desk: Desk, asked: Asked) -> Response:
    """One that ends soon; it may have ended meanwhile, or be about to be whole."""
    work, wanted = work_of(desk), _batch(desk, asked)
    if wanted.is_finished and wanted.status != "cancelled":
        message = f"batch {wanted.id} is {wanted.status}, and cannot be cancelled any more; see its files."
        raise HttpFault(HTTPStatus.CONFLICT, message, "batch_id")
    return json_answer(batch_object(await work.cancel(work.store.owner(asked.caller.key_id), wanted)))


def batch_object(stored: StoredBatch) -> dict[str, Any]:
    """The batch object of OpenAI."""
    errors = {"object": "list", "data": list(stored.errors)} if stored.errors else None
    return {
        "id": stored.id,
        "object": "batch",
        "endpoint": stored.endpoint,
        "model": stored.model or None,
        "errors": errors,
        "input_file_id": stored.input_file_id,
        "completion_window": stored.window,
        "status": stored.status,
        "output_file_id": stored.output_file_id,
        "error_file_id": stored.error_file_id,
        "created_at": stored.created,
        "expires_at": stored.expires,
        **{f"{moment}_at": stored.moments.get(moment) for moment in MOMENTS},
        "request_counts": {"total": stored.total, "completed": stored.completed, "failed": stored.failed},
        "metadata": stored.metadata,
    }


async def _make_room(store: Store, owner: Owner) -> None:
    """Drops the oldest batch that is finished where there are as many as can be kept."""
    settings = store.settings
    if len(owner.unfinished) >= settings.max_unfinished:
        raise ServiceError(
            Kind.EXHAUSTED,
            f"{settings.max_unfinished} batches of this key are under way, which is the limit; wait for one.",
            retry_after_s=60.0,
        )
    if len(owner.batches) >= settings.max_batches:
        await store.drop(owner, next(one for one in owner.batches.values() if one.is_finished))


def _window_s(given: Any) -> int:
    found = WINDOW.fullmatch(given) if isinstance(given, str) else None
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        message = f"completion_window={shown(given, 80)} is no time up to 30d; give 24h, or the like."
        raise ServiceError(Kind.INVALID, message, field="completion_window")
    return seconds


def _keep_s(given: Any, store: Store) -> int:
    if given is None:
        return store.settings.keep_s
    if not isinstance(given, dict):
        message = f"output_expires_after={shown(given, 80)} is no object; give anchor and seconds."
        raise ServiceError(Kind.INVALID, message, field="output_expires_after")
    return kept_for(given.get("anchor"), given.get("seconds"), store.settings.keep_s)


def _batch(desk: Desk, asked: Asked) -> StoredBatch:
    return work_of(desk).store.owner(asked.caller.key_id).batch(asked.path["batch_id"])
