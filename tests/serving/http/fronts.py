# SPDX-License-Identifier: Apache-2.0
"""An HTTP front over a scripted service, with a client on the same loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx

from serving.core.lifecycle import Lifecycle, State
from serving.http.desk import Desk
from serving.http.server import HttpFront, make_http_server
from serving.http.settings import HttpSettings
from tests.serving.scripted import ScriptedService

TIMEOUT_S = 20


@dataclass(frozen=True)
class World:
    """What a test needs of a running front."""

    service: ScriptedService
    front: HttpFront
    desk: Desk
    client: httpx.AsyncClient

    @property
    def base_url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.front.port}"

    async def raw(self, sent: bytes) -> bytes:
        """All that comes back for these bytes, up to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.front.port)
        writer.write(sent)
        await writer.drain()
        back = await reader.read()
        writer.close()
        return back


def run(test: Coroutine, timeout_s: float = TIMEOUT_S) -> None:
    """Runs a test, which hangs no longer than `timeout_s`."""

    async def bounded():
        async with asyncio.timeout(timeout_s):
            await test

    asyncio.run(bounded())


def serving() -> Lifecycle:
    """A lifecycle that serves."""
    lifecycle = Lifecycle()
    lifecycle.move(State.SERVING)
    return lifecycle


@asynccontextmanager
async def fronted(
    service: ScriptedService, lifecycle: Lifecycle | None = None, desk: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[World]:
    """A started front, and a client of it. `desk` are further fields of the desk."""
    whole = Desk(service, lifecycle or serving(), HttpSettings(port=0, **settings), **(desk or {}))
    front = make_http_server(whole)
    await front.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}", timeout=TIMEOUT_S) as client:
            yield World(service, front, whole, client)
    finally:
        await front.stop()


def events_of(text: str) -> list[Any]:
    """The values of a stream of events; its end is "[DONE]"."""
    datas = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    """All of them as one list."""
    return list(chain.from_iterable(lists))


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error that an answer of this status tells."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"} and "Traceback" not in answer.text
    return answer.json()["error"]
