# SPDX-License-Identifier: Apache-2.0
"""An HTTP call as plain data, to be answered by an application in another process: `Asked` goes there, and of
`answered` a `Head` comes back and then the body, piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]
App = Callable[[MutableMapping[str, Any], Callable, Callable], Awaitable[None]]

# Pieces that lie ready for a caller that is slow to take them.
MAX_PIECES = 8
# How long an application has to end by itself once its caller has gone.
LEAVE_S = 2.0
# What concerns one connection and not the call (RFC 9110, 7.6.1).
OF_CONNECTION = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}


@dataclass(frozen=True)
class Asked:
    """A call with all of its body. `client` is the caller's address and port; `headers` have lower-case names."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None


@dataclass(frozen=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Headers


async def answered(app: App, asked: Asked) -> AsyncIterator[Head | bytes]:
    """The head of the app's answer, then its body as it comes. What the app raises is raised here; when this is closed,
    the app is told that its caller has gone, and ended."""
    pieces: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(MAX_PIECES)
    gone = asyncio.Event()
    bodies = [asked.body]

    async def receive() -> dict[str, Any]:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    app_task = asyncio.create_task(app(_scope(asked), receive, pieces.put))
    try:
        while (message := await _next(pieces, app_task)) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], passed_on(tuple(message.get("headers", ()))))
            elif message.get("body"):
                yield message["body"]
    finally:
        gone.set()
        await asyncio.wait((app_task,), timeout=LEAVE_S if pieces.empty() else 0)
        app_task.cancel()
        await asyncio.wait((app_task,))
        if not app_task.cancelled():
            app_task.exception()  # was raised above, or nobody is there any more to hear of it


def passed_on(headers: Headers) -> Headers:
    """Those that go with the call from one connection to the next."""
    return tuple((name, value) for name, value in headers if name.lower() not in OF_CONNECTION)


async def _next(
    pieces: "asyncio.Queue[MutableMapping[str, Any]]", app_task: asyncio.Task
) -> MutableMapping[str, Any] | None:
    """The next message, None after the last. Raises what the app raised, after what it sent before."""
    if pieces.empty() and not app_task.done():
        taking = asyncio.create_task(pieces.get())
        try:
            await asyncio.wait((taking, app_task), return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
        finally:
            taking.cancel()
    if not pieces.empty():
        return pieces.get_nowait()
    app_task.result()
    return None


def _scope(asked: Asked) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": asked.client,
        "server": None,
    }
