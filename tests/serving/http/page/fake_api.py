# SPDX-License-Identifier: Apache-2.0
"""`FakeServer`: the page, and an API that answers what a test wrote down. It tells what it was asked, and who left."""

import asyncio
import json
import random
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serving.http import page
from serving.http.settings import HttpSettings

MODEL = {"id": "fake-1b", "object": "model", "max_model_len": 4096, "max_sequences": 8, "fingerprint": "c0ffee"}
WORDS = "the a light house sea keeps its lamp so that ships by night see where rocks are and turn away".split()
STATS = {
    "object": "stats",
    "state": "serving",
    "version": "0.0.0",
    "loading": None,
    "model": MODEL,
    "uptime_s": 100.0,
    "generated_tokens": 1000,
    "prompt_tokens": 400,
    "generated_tokens_per_s": 41.5,
    "prompt_tokens_per_s": 120.0,
    "requests": {"waiting": 2, "prefilling": 0, "running": 3, "max": 8},
    "kv_blocks": {"used": 20, "cached": 30, "free": 50, "total": 100},
    "snapshots": {"used": 2, "total": 8},
    "prefix_hit_rate": 0.25,
    "recent_prefix_hit_rate": 0.5,
    "drafts": {"width": 3, "acceptance": 0.7, "recent_acceptance": 0.8, "positions": [0.9, 0.6, 0.3]},
}


@dataclass
class Say:
    """An answer: `pieces` are tokens, texts or bytes. After `pause_after` of them it goes on once `go` is set, and
    `gap_s` lies between any two. It ends by `finish`, or breaks off by `error` or without a word (`breaks`)."""

    pieces: list[str | bytes]
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"
    error: str = ""
    breaks: bool = False
    pause_after: int | None = None
    gap_s: float = 0.0
    go: threading.Event = field(default_factory=threading.Event)


@dataclass
class Refuse:
    """An error in the place of an answer."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


def drawn(body: dict[str, Any], salt: int = 0) -> Say:
    """What is answered without a script: words drawn by the seed."""
    draw = random.Random(f"{body['messages']} {body['seed']} {salt}")
    return Say([f"{' ' if at else ''}{draw.choice(WORDS)}" for at in range(12)])


class FakeServer:
    """Listens on a free port of 127.0.0.1, in a thread of its own. `script` is answered first; `key` is asked for
    where it is set, and without `logprobs_sent` none are. `is_fickle` breaks the promise that a seed makes."""

    def __init__(self):
        self.script: deque[Say | Refuse] = deque()
        self.stats: dict[str, Any] = dict(STATS)
        self.models: list[dict[str, Any]] = [MODEL]
        self.key = ""
        self.is_fickle = False
        self.logprobs_sent = True
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_left = 0
        desk = SimpleNamespace(settings=HttpSettings())
        own = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/stats", self._stats),
            Route("/health", self._health),
        ]
        app = Starlette(routes=[*page.routes(desk), *own])
        config = uvicorn.Config(app, port=0, log_config=None, log_level="error", ws="none", lifespan="off")
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.install_signal_handlers = lambda: None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake server")

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *raised: object) -> None:
        for answer in self.script:
            if isinstance(answer, Say):
                answer.go.set()
        self._uvicorn.force_exit = True
        self._uvicorn.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._uvicorn.serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await serving

    def _refusal(self, request: Request) -> Response | None:
        self.authorizations.append(request.headers.get("authorization"))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return refused(Refuse(401, "The key is not known here; send one that is."))
        return None

    async def _stats(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self.stats)

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": self.models})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"state": self.stats["state"]})

    async def _chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        salt = len(self.bodies) if self.is_fickle else 0
        answer = self.script.popleft() if self.script else drawn(body, salt)
        if isinstance(answer, Refuse):
            return refused(answer)
        return StreamingResponse(self._streamed(answer, body), media_type="text/event-stream")

    async def _streamed(self, answer: Say, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            for text in answer.reasoning:
                yield event(body, {"reasoning_content": text}, entries=self._entries(text, body))
            async for text, entries in self._pieces(answer, body):
                yield event(body, {"content": text}, entries=entries)
            for call in answer.calls:
                yield event(body, {"tool_calls": [call]})
        except asyncio.CancelledError:
            self.num_left += 1
            raise
        if answer.breaks:
            return
        if answer.error:
            yield f"data: {json.dumps({'error': {'message': answer.error}})}\n\n".encode()
            return
        yield event(body, {}, finish=answer.finish)
        usage = {"prompt_tokens": 40, "completion_tokens": len(answer.reasoning + answer.pieces), "total_tokens": 0}
        yield f"data: {json.dumps({'model': MODEL['id'], 'choices': [], 'usage': usage})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def _pieces(self, answer: Say, body: dict[str, Any]) -> AsyncIterator[tuple[str, list]]:
        held = b""
        for at, piece in enumerate(answer.pieces):
            while at == answer.pause_after and not answer.go.is_set():
                await asyncio.sleep(0.005)
            await asyncio.sleep(answer.gap_s)
            held += piece.encode() if isinstance(piece, str) else piece
            try:
                text, held = held.decode(), b""
            except UnicodeDecodeError:
                text = ""
            yield text, self._entries(piece, body)

    def _entries(self, piece: str | bytes, body: dict[str, Any]) -> list[dict[str, Any]]:
        if not body.get("logprobs") or not self.logprobs_sent:
            return []
        tops = [piece, " other", "\n", b"\xf0\x9f", "‮"][: body["top_logprobs"]]
        likely = [-0.5 - place * 1.2 - len(piece) % 4 * 0.6 for place in range(len(tops))]
        own = [spelt(one, logprob) for one, logprob in zip(tops, likely, strict=True)]
        return [{**own[0], "top_logprobs": own}]


def spelt(piece: str | bytes, logprob: float) -> dict[str, Any]:
    """A token as OpenAI writes it."""
    raw = piece.encode() if isinstance(piece, str) else piece
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def event(body: dict[str, Any], delta: dict[str, Any], *, entries: list | None = None, finish: str | None = None):
    """A chunk of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    if entries:
        choice["logprobs"] = {"content": entries}
    return f"data: {json.dumps({'model': body.get('model', ''), 'choices': [choice]})}\n\n".encode()


def refused(refusal: Refuse) -> Response:
    """The error object of OpenAI."""
    body = {"error": {"message": refusal.message, "type": "some_error", "param": None, "code": None}}
    return JSONResponse(body, refusal.status, refusal.headers)
