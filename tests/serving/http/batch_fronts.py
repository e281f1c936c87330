# SPDX-License-Identifier: Apache-2.0
"""A front that keeps files and batches, and OpenAI's own client of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from serving.core.calls import Caller
from serving.core.lifecycle import Lifecycle
from serving.http.batch_work import BatchWork
from serving.http.desk import Desk
from serving.http.settings import HttpSettings
from serving.store.settings import StoreSettings
from serving.store.store import Store
from tests.serving.http.fronts import World, fronted, serving
from tests.serving.scripted import ScriptedService

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDS = ("completed", "failed", "expired", "cancelled")


class Clock:
    """The time of day, which a test may push on."""

    def __init__(self):
        self.ahead_s = 0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@dataclass(frozen=True)
class Kept:
    """The front, what it keeps, and a client."""

    world: World
    work: BatchWork
    openai: openai.AsyncOpenAI

    async def upload(self, lines: list[Any] | bytes, name: str = "in.jsonl") -> Any:
        """The file of those lines."""
        return await self.openai.files.create(
            file=(name, lines if isinstance(lines, bytes) else jsonl(lines)), purpose="batch"
        )

    async def begun(self, lines: list[Any] | bytes, endpoint: str = CHAT, window: str = "24h") -> Any:
        """A batch of those lines."""
        file = await self.upload(lines)
        return await self.openai.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"of": "a test"}
        )

    async def ended(self, batch: Any) -> Any:
        """The batch, once nothing more comes of it."""
        while batch.status not in ENDS:
            await asyncio.sleep(0.01)
            batch = await self.openai.batches.retrieve(batch.id)
        return batch

    async def records(self, file_id: str | None) -> dict[str, Any]:
        """The lines of a file by their ids; every one is whole and comes once."""
        if file_id is None:
            return {}
        found = [json.loads(line) for line in (await self.openai.files.content(file_id)).text.splitlines()]
        by_id = {one["custom_id"]: one for one in found}
        assert len(by_id) == len(found)
        return by_id


def jsonl(lines: list[Any]) -> bytes:
    """Objects, or raw bytes, as JSON lines."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """A line that asks for a chat's answer."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def text(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    """A line that asks for a text's."""
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": {"prompt": prompt, **body}}


@asynccontextmanager
async def keeping(
    directory,
    service: ScriptedService,
    lifecycle: Lifecycle | None = None,
    clock: Clock | None = None,
    token: str = "-",
    max_lines: int = 100_000,
    **settings: Any,
) -> AsyncIterator[Kept]:
    """A front whose files and batches are in `directory`; `settings` are the store's."""
    lifecycle = lifecycle or serving()
    store = Store(StoreSettings(directory, **settings), clock or Clock())
    store.open()
    callers = {caller.key_id: caller for caller in (service.keys or {"": Caller()}).values()}
    work = BatchWork(Desk(service, lifecycle, HttpSettings()), store, callers.__getitem__, 8, max_lines)
    work.start()
    try:
        async with (
            fronted(service, lifecycle, desk={"batches": work}) as world,
            openai.AsyncOpenAI(base_url=f"{world.base_url}/v1", api_key=token, max_retries=0) as client,
        ):
            yield Kept(world, work, client)
    finally:
        await work.stop()
        await store.close()
