# SPDX-License-Identifier: Apache-2.0
"""`Journal`: the server's log. A line for each thing that happened and for each call that ended, as JSON or as text.

Nothing that was said is in it, and of an error that may quote its call only kind and field, unless prompts are asked
for. Whatever a caller sends, a line stays one line: all but printable ASCII is escaped.
"""

import json
import logging
import os
import re
import select
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from threading import Condition, Thread
from typing import Any, Literal

from serving.core.errors import Kind
from serving.core.records import CallRecord

MAX_PENDING_BYTES = 4 << 20
MAX_FIELD_CHARS = 512
MAX_PROMPT_CHARS = 32768
MAX_FRAMES = 40
# Their messages say something of the server or of the key, and nothing of what the caller wrote.
OWN_WORDS = {
    kind.value
    for kind in (
        Kind.TOO_LONG,
        Kind.UNAUTHENTICATED,
        Kind.FORBIDDEN,
        Kind.CONFLICT,
        Kind.EXHAUSTED,
        Kind.TOO_LATE,
        Kind.CANCELLED,
        Kind.UNAVAILABLE,
    )
}
PLAIN = re.compile(r"[A-Za-z0-9._:/@+-]+")


def write_all(descriptor: int, data: bytes) -> None:
    """Nothing, when all is written; waits for as long as a pipe is full. Raises `OSError` for one that is closed.

    It goes past Python's own stream, whose lock a thread that hangs here would hold to the end of the process.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class Journal:
    """Lines go to `write` from a thread of their own, so that whoever logs never waits. Of lines that wait for a reader
    there are `max_pending_bytes`; further ones are dropped, and the next that gets through is preceded by their count.

    `clock` gives seconds since 1970. Called with a `CallRecord` it is the service's `Observer`.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        form: Literal["json", "text"],
        log_prompts: bool,
        clock: Callable[[], float],
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ):
        self._write, self._clock, self._max_pending_bytes = write, clock, max_pending_bytes
        self._spelt = _json if form == "json" else _text
        self._log_prompts = log_prompts
        self._pending: deque[bytes] = deque()
        self._pending_bytes = self._num_dropped = 0
        self._changed = Condition()
        self._closing = False
        self._thread = Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    @property
    def log_prompts(self) -> bool:
        """Whether prompts are to be put into records."""
        return self._log_prompts

    def event(self, event: str, level: str = "info", **fields: Any) -> None:
        """Nothing; logs a line: texts, numbers and lists of them. Long texts are cut."""
        self._put(event, level, {name: _cut(value, MAX_FIELD_CHARS) for name, value in fields.items()})

    def __call__(self, record: CallRecord) -> None:
        """Logs the line of a call that ended."""
        fields = {name: _cut(value, MAX_FIELD_CHARS) for name, value in self._told(record).items()}
        if self._log_prompts and record.prompt_text:
            fields["prompt"] = _cut(record.prompt_text, MAX_PROMPT_CHARS)
        self._put("call", "error" if record.outcome == Kind.INTERNAL.value else "info", fields)

    def handler(self) -> logging.Handler:
        """A handler for `logging`, so that warnings of libraries are lines too."""
        return _Handler(self)

    def close(self, timeout_s: float) -> bool:
        """Whether all lines were written within `timeout_s`; later ones are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _told(self, record: CallRecord) -> dict[str, Any]:
        told = {
            "method": record.method,
            "request_id": record.request_id,
            "key": record.key_id,
            "peer": record.peer,
            "model": record.model,
            "outcome": record.outcome,
        }
        if record.field:
            told["field"] = record.field
        if record.detail and (self._log_prompts or record.outcome in OWN_WORDS):
            told["detail"] = record.detail
        return told | {
            "finish_reasons": list(record.finish_reasons),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "generated_tokens": record.generated_tokens,
            "admitted_s": round(record.admitted_s, 6),
            "queued_s": round(record.queued_s, 6),
            "first_token_s": round(record.first_token_s, 6),
            "finished_s": round(record.finished_s, 6),
        }

    def _put(self, event: str, level: str, fields: dict[str, Any]) -> None:
        now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = self._spelt({"time": now, "level": level, "event": event} | fields).encode()
        with self._changed:
            if self._closing or self._pending_bytes + len(line) > self._max_pending_bytes:
                self._num_dropped += 1
                return
            self._pending.append(line)
            self._pending_bytes += len(line)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
                line, num_dropped = self._pending.popleft(), self._num_dropped
                self._num_dropped = 0
            try:
                if num_dropped:
                    now = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
                    told = {"time": now, "level": "warning", "event": "lines_dropped", "count": num_dropped}
                    self._write(self._spelt(told).encode())
                    num_dropped = 0
                self._write(line)
                written = True
            except OSError:
                written = False
            with self._changed:
                self._pending_bytes -= len(line)
                self._num_dropped += num_dropped + (not written)


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":")) + "\n"


def _text(fields: dict[str, Any]) -> str:
    first = [str(fields[name]) for name in ("time", "level", "event")]
    return " ".join([*first, *(f"{name}={_word(value)}" for name, value in list(fields.items())[3:])]) + "\n"


def _word(value: Any) -> str:
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=True)


def _cut(value: Any, max_chars: int) -> Any:
    if isinstance(value, str) and len(value) > max_chars:
        return value[: max_chars - 3] + "..."
    return value


class _Handler(logging.Handler):
    """Of an exception it tells the type and the frames; the message only where prompts are logged."""

    def __init__(self, journal: Journal):
        super().__init__(logging.INFO)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
            fields["exception"] = type(error).__name__
            fields["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            if self._journal.log_prompts:
                fields["exception_message"] = str(error)
        self._journal.event("log", record.levelname.lower(), **fields)
