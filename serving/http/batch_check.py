# SPDX-License-Identifier: Apache-2.0
"""`checked`: a batch's file looked through before the first of its lines is answered."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from serving.batch.done import DoneLines, SeenIds
from serving.batch.jsonl import JsonlSource
from serving.batch.lines import Line, undone_lines
from serving.batch.requests import BadLine
from serving.http.batch_lines import LineCheck
from serving.store.store import Store

# Lines that are worked on at a time, and how many faults are listed.
PIECE, MAX_FAULTS = 64, 100
# How OpenAI names what is wrong with a line.
CODES = {"invalid_json": "invalid_json_line", "duplicate_id": "duplicate_custom_id"}


class BatchFault(Exception):
    """Why a batch as a whole fails: its `faults`, as it lists them."""

    def __init__(self, *faults: dict[str, Any]):
        super().__init__(faults)
        self.faults = faults


async def checked(store: Store, content: Path, url: str, max_lines: int, served: Sequence[str]) -> tuple[int, str]:
    """How many requests the file holds, all for `url`, and the model that they name. Raises `BatchFault` for a line
    that is none, for too many or none at all, for a model that is none of those `served`."""
    check, num_lines, faults = LineCheck(url), 0, []
    ids = await store.on_disk(SeenIds)
    try:
        lines = undone_lines(await store.on_disk(JsonlSource, content), DoneLines(), ids, check)
        async for piece in pieces(store, lines):
            num_lines += sum(line.job is not None or line.fault is not None for line in piece)
            faults += [_of_line(line.fault) for line in piece if line.fault is not None]
            if len(faults) >= MAX_FAULTS or num_lines > max_lines:
                break
    finally:
        await store.on_disk(ids.close)
    faults = faults[:MAX_FAULTS]
    if num_lines > max_lines:
        message = f"the file has more than {max_lines} lines, which is the limit here; make several batches of it."
        faults.append(without_line("too_many_requests", message))
    elif not num_lines:
        faults.append(without_line("empty_file", "the file has no lines; write one request on each line."))
    elif not faults and check.model and served and check.model not in served:
        message = f"model {check.model[:200]!r} is not served here; ask for {served[0]!r}."
        faults.append(without_line("model_not_found", message))
    if faults:
        raise BatchFault(*faults)
    return num_lines, check.model


async def pieces(store: Store, lines: Iterator[Line]) -> AsyncIterator[list[Line]]:
    """The lines, so many at a time. What else there is to do, here and in other threads, gets as long as each took."""
    while True:
        began_s = time.monotonic()
        piece = await store.on_disk(_some, lines)
        if not piece:
            return
        yield piece
        await asyncio.sleep(time.monotonic() - began_s)


def without_line(code: str, message: str) -> dict[str, Any]:
    """A fault of the whole batch."""
    return {"code": code, "line": None, "message": message, "param": None}


def _of_line(bad: BadLine) -> dict[str, Any]:
    return {"code": CODES.get(bad.code, bad.code), "line": bad.origin.line, "message": str(bad), "param": None}


def _some(lines: Iterator[Line]) -> list[Line]:
    return list(islice(lines, PIECE))
