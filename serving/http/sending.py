# SPDX-License-Identifier: Apache-2.0
"""`Outgoing`: the way back to a client, which knows how far its answer has come."""

import asyncio
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from serving.core.errors import Kind, ServiceError
from serving.http.callers import REQUEST_ID_HEADER
from serving.http.errors import ErrorForm, headers_of, spelt, status_of

JSON = "application/json"
EVENTS = "text/event-stream"
# Answers are one caller's, and no page's but those that it was made for.
OWN_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Outgoing:
    """An ASGI `send` that adds the headers of every answer and gives up a client that takes nothing for `write_s`."""

    def __init__(self, send: Send, write_s: float):
        self._send, self._write_s = send, write_s
        self.request_id = ""
        self.begun = self.complete = False
        self._is_stream = self._is_stuck = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in OWN_HEADERS.items():
                headers.setdefault(name, value)
            if self.request_id:
                headers[REQUEST_ID_HEADER] = self.request_id
            self.begun, self._is_stream = True, headers.get("content-type", "").startswith(EVENTS)
        elif not message.get("more_body", False):
            self.complete = True
        try:
            async with asyncio.timeout(self._write_s):
                await self._send(message)
        except TimeoutError:
            self._is_stuck = True
            message = f"The client took nothing of its answer for {self._write_s:.3g} s; read it as it comes."
            raise ServiceError(Kind.TOO_LATE, message) from None

    async def fail(self, scope: Scope, form: ErrorForm, error: ServiceError, more: Mapping[str, str]) -> None:
        """Tells of the error: as the whole answer, or as the last event of a stream that has begun. `more` are headers
        beside those of the error."""
        if error.kind is Kind.CANCELLED or self.complete or self._is_stuck:
            return
        body = form.body(error, self.request_id)
        if not self.begun:
            headers = {**headers_of(error), **more}
            await Response(spelt(body), status_of(error), headers, JSON)(scope, _nothing, self)
        elif self._is_stream:
            await self({"type": "http.response.body", "body": form.event(body), "more_body": False})


async def _nothing() -> Message:
    raise AssertionError("an answer that is there reads nothing")
