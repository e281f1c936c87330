# SPDX-License-Identifier: Apache-2.0
"""One line of JSON for each request that ended: when what happened and how much there was, never what was said."""

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.request import Request


class RequestLog:
    """Appends lines to the file at `path`, or to stderr for "-". Raises `ConfigError` for one that cannot be written.

    The file is opened for each line, so that it may be moved away meanwhile. `clock` gives seconds since 1970.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time):
        self._path, self._clock = None if str(path) == "-" else Path(path), clock
        try:
            self._append("")
        except OSError as error:
            raise ConfigError(
                f"request_log={str(path)!r} cannot be written ({error.strerror}); name a file in a writable directory, "
                "or - for stderr."
            ) from None

    def __call__(self, request: Request) -> None:
        """Writes the line of a request. Raises `OSError` where the file is full or gone."""
        self._append(json.dumps(line_of(request, self._clock())) + "\n")

    def _append(self, text: str) -> None:
        if self._path is None:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def line_of(request: Request, now: float) -> dict[str, object]:
    """What the log says of a request that ended at `now`: no prompt, no answer, and of an error its class alone.

    `queued_at` is a UTC time; `started_s` (its prompt began to run), `first_token_s` (its prompt was done) and
    `finished_s` are seconds after it, null where that was not reached.
    """
    times = request.metrics()
    queued_at = datetime.fromtimestamp(now - times.finished_s, UTC)
    return {
        "request_id": request.request_id,
        "queued_at": queued_at.isoformat(timespec="milliseconds"),
        "started_s": round(times.queued_s, 6) if request.started_at else None,
        "first_token_s": round(times.first_token_s, 6) if request.first_token_at else None,
        "finished_s": round(times.finished_s, 6),
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached_tokens,
        "generated_tokens": len(request.output),
        "finish_reason": request.finish_reason,
        "num_preemptions": request.num_preemptions,
        "seed": request.seed,
        "error": None if request.error is None else type(request.error).__name__,
    }
