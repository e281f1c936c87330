# SPDX-License-Identifier: Apache-2.0
"""A light client of HTTP/1.1 and server-sent events, whose own cost does not show in figures; and what goes wrong with
it can be asked for: connections end in all the ways that connections do."""

import asyncio
import json
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

READ_BYTES = 64 << 10
HEAD_END, LINE_END, EVENT_END = b"\r\n\r\n", b"\r\n", b"\n\n"
DATA, DONE = b"data: ", b"[DONE]"
# Servers close connections that rest; who sends then gets no answer.
REST_S = 30.0


class HttpError(Exception):
    """An answer that is an error: its `status` (200 for one within a stream), and `code` and `param` of its object."""

    def __init__(self, status: int, error: Mapping[str, Any]):
        self.status, self.param = status, error.get("param")
        self.code = str(error.get("code") or status)
        super().__init__(f"{status} {self.code} {self.param}: {error.get('message')}")


class Cut(Exception):
    """The connection ended before the answer did, or could not be made."""

    code = "cut"


@dataclass(frozen=True)
class Head:
    """The head of an answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


def request(target: str, path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a POST; a body of bytes goes as it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"host": target, "content-type": "application/json", "content-length": str(len(raw)), **(headers or {})}
    lines = (f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", "")
    return "\r\n".join(lines).encode() + raw


class Connection:
    """One connection. Whatever breaks off raises `Cut`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._buffer = bytearray()
        self._rested_since_s, self._is_last = time.monotonic(), False

    @classmethod
    async def open(cls, target: str) -> "Connection":
        """A new connection."""
        host, _, port = target.rpartition(":")
        try:
            return cls(*await asyncio.open_connection(host.strip("[]"), int(port)))
        except OSError as error:
            raise Cut(f"no connection: {error}") from error

    @property
    def is_fresh(self) -> bool:
        """Whether it can take another request."""
        rested_s = time.monotonic() - self._rested_since_s
        ended = self._is_last or self._reader.at_eof() or self._writer.is_closing()
        return not ended and rested_s < REST_S

    def send(self, raw: bytes) -> None:
        """Sends, without waiting."""
        self._writer.write(raw)

    def close(self) -> None:
        """Ends it as clients do that are done."""
        self._writer.close()

    def reset(self) -> None:
        """Ends it as a machine does that has lost it: by RST."""
        one = self._writer.get_extra_info("socket")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def head(self) -> Head:
        """The head of the next answer."""
        first, *lines = (await self._until(HEAD_END)).decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in pairs}
        self._rested_since_s = time.monotonic()
        self._is_last = headers.get("connection") == "close"
        return Head(int(first.split(" ", 2)[1]), headers)

    async def body(self, head: Head) -> bytes:
        """All of an answer's body."""
        if "content-length" in head.headers:
            return await self._exactly(int(head.headers["content-length"]))
        return b"".join([part async for part in self._parts()])

    async def answer(self) -> Any:
        """The value of the next answer. Raises `HttpError` for one that is an error."""
        head = await self.head()
        value = json.loads(await self.body(head))
        if head.status != 200:
            raise HttpError(head.status, value["error"])
        return value

    async def events(self) -> AsyncIterator[Any]:
        """The values of the next answer's events, to its end. Raises `HttpError` for an error before or among them."""
        head, gathered, last = await self.head(), b"", None
        if head.status != 200:
            raise HttpError(head.status, json.loads(await self.body(head))["error"])
        async for part in self._parts():
            *events, gathered = (gathered + part).split(EVENT_END)
            for event in events:
                if last is not None:
                    raise Cut(f"something came after the last event: {event[:200]!r}")
                if event == DATA + DONE:
                    last = {}
                elif event.startswith(DATA):
                    value = json.loads(event[len(DATA) :])
                    last = value.get("error")
                    if last is None:
                        yield value
        if last is None:
            raise Cut("the stream ended without its last event")
        if last:
            raise HttpError(200, last)

    async def _parts(self) -> AsyncIterator[bytes]:
        """The parts of a chunked body as they come."""
        while size := int(await self._until(LINE_END), 16):
            yield await self._exactly(size)
            await self._until(LINE_END)
        await self._until(LINE_END)

    async def _until(self, end: bytes) -> bytes:
        while (place := self._buffer.find(end)) < 0:
            await self._more()
        found = bytes(self._buffer[:place])
        del self._buffer[: place + len(end)]
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    async def _more(self) -> None:
        try:
            more = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise Cut(f"the connection broke: {error}") from error
        if not more:
            raise Cut("the connection ended")
        self._buffer += more


class Connections:
    """Connections to one server that are kept for the next who needs one."""

    def __init__(self, target: str):
        self.target = target
        self._kept: deque[Connection] = deque()

    async def take(self) -> Connection:
        """One that is open; nobody else has it."""
        while self._kept:
            # The last that was used has rested least.
            kept = self._kept.pop()
            if kept.is_fresh:
                return kept
            kept.close()
        return await Connection.open(self.target)

    def keep(self, connection: Connection) -> None:
        """Gives back one whose answer was read to its end."""
        self._kept.append(connection)

    def close(self) -> None:
        """Ends those that nobody has."""
        while self._kept:
            self._kept.pop().close()
