# SPDX-License-Identifier: Apache-2.0
"""/v1/files: what callers leave here for batches, and what batches leave for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.http.answers import known_only
from serving.http.batch_work import BatchWork
from serving.http.bodies import IncomingBody, too_large
from serving.http.desk import Desk
from serving.http.endpoint import Asked, delete, get, json_answer, post
from serving.http.errors import HttpFault
from serving.http.forms import MAX_FRAME_BYTES, Form
from serving.http.operations import Operation
from serving.http.paging import known_query, one_of, page, page_of, whole_number
from serving.http.schemas import integer, object_of, text
from serving.store.records import BATCH_INPUT, BATCH_OUTPUT, StoredFile
from serving.store.upload import Upload

FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
MAX_PAGE, ORDERS = 10_000, ("desc", "asc")
# Contents go to the disk in pieces of about this size, and come at least at this rate.
PIECE_BYTES, LEAST_BYTES_PER_S = 1 << 20, 64 << 10
LEAST_KEEP_S = 3600
OCTETS = "application/octet-stream"


FILE = object_of(
    {
        "id": text(),
        "object": text("file"),
        "bytes": integer(0),
        "created_at": integer(),
        "expires_at": integer(),
        "filename": text(),
        "purpose": text(BATCH_INPUT, BATCH_OUTPUT),
        "status": text("processed"),
    },
    "id",
    "bytes",
    "purpose",
)
SENT = object_of(
    {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": text(BATCH_INPUT),
        "expires_after[anchor]": text("created_at"),
        "expires_after[seconds]": integer(LEAST_KEEP_S),
    },
    "file",
    "purpose",
    closed=True,
)
DELETED = object_of({"id": text(), "object": text("file"), "deleted": {"type": "boolean"}}, "id", "deleted")
QUERY = {"after": text(), "limit": integer(1, MAX_PAGE), "order": text(*ORDERS), "purpose": text()}
CREATE = Operation("Leaves a file here.", answer=FILE, form=SENT)
LIST = Operation("The files of this key.", answer=page_of(FILE), query=QUERY, errors=(404,))
ONE = Operation("One of them.", answer=FILE)
REMOVE = Operation("Deletes one of them.", answer=DELETED, errors=(409,))
CONTENT = Operation("The content of one of them.", answer={"type": "string"}, media=OCTETS)


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [
        post(desk, "/v1/files", create, has_body=False, read=read_form, about=CREATE),
        get(desk, "/v1/files", listed, about=LIST),
        get(desk, "/v1/files/{file_id}", file, about=ONE),
        delete(desk, "/v1/files/{file_id}", remove, about=REMOVE),
        get(desk, "/v1/files/{file_id}/content", content, about=CONTENT),
    ]


@dataclass(frozen=True)
class _Sent:
    """A file that has come: its content, and what it is called."""

    upload: Upload
    name: str


async def read_form(desk: Desk, caller: Caller, headers: Headers, body: IncomingBody) -> Mapping[str, Any]:
    """The fields of the form, and as `file` what was sent, its content on disk."""
    store = work_of(desk).store
    form = Form(headers)
    max_bytes = store.settings.max_file_bytes
    seconds = desk.settings.body_s + max_bytes / LEAST_BYTES_PER_S
    upload = Upload(store, store.owner(caller.key_id))
    try:
        async for chunk in body.chunks(max_bytes + MAX_FRAME_BYTES, seconds):
            form.feed(chunk)
            if form.num_file_bytes > max_bytes:
                raise too_large(max_bytes)
            if len(form.data) >= PIECE_BYTES:
                await upload.write(form.taken())
        form.check_whole()
        await upload.write(form.taken())
    except BaseException:
        await upload.drop()
        raise
    return {**form.fields, "file": _Sent(upload, form.file_name)}


async def create(desk: Desk, asked: Asked) -> Response:
    """The file that was sent."""
    sent, settings = asked.body["file"], work_of(desk).store.settings
    try:
        known_only(asked.body, FIELDS)
        one_of("purpose", asked.body.get("purpose"), (BATCH_INPUT,))
        keep_s = kept_for(
            asked.body.get("expires_after[anchor]"), asked.body.get("expires_after[seconds]"), settings.keep_s
        )
        made = await sent.upload.keep(sent.name, BATCH_INPUT, keep_s)
    finally:
        await sent.upload.drop()
    return json_answer(file_object(made))


async def listed(desk: Desk, asked: Asked) -> Response:
    """The files of this key, the newest first where nothing else is asked for."""
    owner, query = work_of(desk).store.owner(asked.caller.key_id), asked.query
    known_query(query, ("after", "limit", "order", "purpose"))
    limit = whole_number("limit", query.get("limit", MAX_PAGE), 1, MAX_PAGE)
    found = [one for one in owner.files.values() if one.purpose == query.get("purpose", one.purpose)]
    if one_of("order", query.get("order", ORDERS[0]), ORDERS) == ORDERS[0]:
        found.reverse()
    return json_answer(page(found, lambda one: one.id, file_object, query.get("after"), limit))


async def file(desk: Desk, asked: Asked) -> Response:
    """One of them."""
    return json_answer(file_object(_file(desk, asked)))


async def remove(desk: Desk, asked: Asked) -> Response:
    """That one of them is gone. One that a batch reads stays."""
    store = work_of(desk).store
    owner, wanted = store.owner(asked.caller.key_id), _file(desk, asked)
    user = owner.user_of(wanted.id)
    if user is not None:
        message = f"file {wanted.id} is read by {user.id}, which is {user.status}; cancel that first, or wait for it."
        raise HttpFault(HTTPStatus.CONFLICT, message, "file_id")
    await store.drop(owner, wanted)
    return json_answer({"id": wanted.id, "object": "file", "deleted": True})


async def content(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """The content of one of them."""
    wanted, owner = _file(desk, asked), work_of(desk).store.owner(asked.caller.key_id)
    return FileResponse(owner.content(wanted.id), media_type=OCTETS, filename=wanted.name)


def file_object(stored: StoredFile) -> dict[str, Any]:
    """The file object of OpenAI."""
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": stored.created,
        "expires_at": stored.expires,
        "filename": stored.name,
        "purpose": stored.purpose,
        "status": "processed",
    }


def kept_for(anchor: Any, seconds: Any, most_s: int) -> int:
    """Seconds for which a file is kept, as its sender asks. Raises `ServiceError` for what cannot be."""
    if anchor is None and seconds is None:
        return most_s
    one_of("expires_after.anchor", anchor, ("created_at",))
    return whole_number("expires_after.seconds", seconds, min(LEAST_KEEP_S, most_s), most_s)


def work_of(desk: Desk) -> BatchWork:
    """The batches and their files. Raises `ServiceError` where the server keeps none."""
    if desk.batches is None:
        message = "files and batches are not kept on this server; whoever runs it can start it with --data-dir."
        raise ServiceError(Kind.NOT_FOUND, message)
    return desk.batches


def _file(desk: Desk, asked: Asked) -> StoredFile:
    return work_of(desk).store.owner(asked.caller.key_id).file(asked.path["file_id"])
