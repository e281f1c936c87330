# SPDX-License-Identifier: Apache-2.0
"""GET /v1/stats: the server at one moment, for pages and scripts; Prometheus has /metrics.

{
  "object": "stats",
  "state": "serving",                     one of `lifecycle.State`
  "version": "0.1.0",
  "loading": {"stage": "load", "done": 1, "total": 2},    null unless a model is on its way; bytes or programs
  "model": {...},                         as in /v1/models; null before there is one
  What follows is null, each as a whole, before there is an engine:
  "uptime_s": 12.5,                       of the engine
  "generated_tokens": 100, "prompt_tokens": 200,          since then
  "generated_tokens_per_s": 41.5,         over the last seconds
  "prompt_tokens_per_s": 10.0,            likewise, of prompts that began; null where nobody asked in these seconds
  "requests": {                           waiting in the engine or for their turn in it
    "waiting": 0, "prefilling": 0, "running": 1, "max": 32
  },
  "kv_blocks": {"used": 3, "cached": 10, "free": 50, "total": 63},
  "snapshots": {"used": 2, "total": 8},   null without recurrent layers
  "prefix_hit_rate": 0.25,                share of prompt tokens found cached since the start; null before a prompt
  "recent_prefix_hit_rate": 0.5,          over the last seconds; null where no prompt began
  "drafts": {                             null without a drafter
    "width": 3,                           drafts of a row at present; 0: none pay
    "acceptance": 0.7, "recent_acceptance": 0.8,          shares of drafts that stood, as the two above
    "positions": [0.9, 0.6, null]         by place in a draft, since the start
  }
}
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from serving.core.lifecycle import State
from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer
from serving.http.models import MODEL, model_object
from serving.http.operations import Operation
from serving.http.schemas import array, integer, nullable, number, object_of, text

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats
    from metrale_jax.speculative.policy import DraftStats

# Rates are over at least the last of these seconds and at most all; one look in each of them is kept.
WINDOW_S = 10.0
APART_S = 0.9
SHARE = nullable(number(0, 1))
ANSWER = object_of(
    {
        "object": text("stats"),
        "state": text(*(state.value for state in State)),
        "version": text(),
        "loading": nullable(
            object_of({"stage": text(), "done": integer(0), "total": integer(0)}, "stage", "done", "total")
        ),
        "model": nullable(MODEL),
        "uptime_s": nullable(number(0)),
        "generated_tokens": nullable(integer(0)),
        "prompt_tokens": nullable(integer(0)),
        "generated_tokens_per_s": nullable(number(0)),
        "prompt_tokens_per_s": nullable(number(0)),
        "requests": nullable(object_of(dict.fromkeys(("waiting", "prefilling", "running", "max"), integer(0)))),
        "kv_blocks": nullable(object_of(dict.fromkeys(("used", "cached", "free", "total"), integer(0)))),
        "snapshots": nullable(object_of(dict.fromkeys(("used", "total"), integer(0)))),
        "prefix_hit_rate": SHARE,
        "recent_prefix_hit_rate": SHARE,
        "drafts": nullable(
            object_of({"width": integer(0), "acceptance": SHARE, "recent_acceptance": SHARE, "positions": array(SHARE)})
        ),
    }
)
ABOUT = Operation("The server at one moment.", answer=ANSWER | {"required": list(ANSWER["properties"])})
NO_ENGINE = dict.fromkeys(
    "uptime_s generated_tokens prompt_tokens generated_tokens_per_s prompt_tokens_per_s requests kv_blocks snapshots "
    "prefix_hit_rate recent_prefix_hit_rate drafts".split()
)


def routes(desk: Desk) -> list[Route]:
    """The route of this API. What was looked at before is kept with it."""
    looks = Looks()

    async def stats(desk: Desk, asked: Asked) -> Response:
        cards = desk.service.models()
        now, num_outside = desk.stats(), desk.waiting()
        seen = {
            "object": "stats",
            "state": desk.lifecycle.state.value,
            "version": desk.version,
            "loading": desk.loading(),
            "model": model_object(cards[0]) if cards else None,
        }
        max_requests = cards[0].max_sequences if cards else 0
        return json_answer(
            seen | (NO_ENGINE if now is None else figures(now, looks.before(now), max_requests, num_outside))
        )

    return [get(desk, "/v1/stats", stats, is_probe=True, about=ABOUT)]


class Looks:
    """The engine's figures as they were when they were last looked at, over `WINDOW_S`."""

    def __init__(self):
        self._kept: deque[EngineStats] = deque()

    def before(self, now: "EngineStats") -> "EngineStats | None":
        """The oldest look that is not too old, None without one; `now` is kept for later ones."""
        # Another engine's clock and counts began anew.
        while self._kept and not (
            0 <= now.uptime_s - self._kept[0].uptime_s <= WINDOW_S
            and now.prompt_tokens >= self._kept[0].prompt_tokens
            and now.generated_tokens >= self._kept[0].generated_tokens
        ):
            self._kept.popleft()
        if not self._kept or now.uptime_s - self._kept[-1].uptime_s >= APART_S:
            self._kept.append(now)
        oldest = self._kept[0]
        return oldest if oldest.uptime_s < now.uptime_s else None


def figures(
    now: "EngineStats", before: "EngineStats | None", max_requests: int, num_outside: int = 0
) -> dict[str, Any]:
    """What an engine says of itself; rates are of what came since `before`. `num_outside` calls wait for their turn in
    it."""
    passed_s = now.uptime_s - before.uptime_s if before else 0.0
    prompt_tokens = now.prompt_tokens - before.prompt_tokens if before else 0
    cached_tokens = now.cached_tokens - before.cached_tokens if before else 0
    return {
        "uptime_s": round(now.uptime_s, 3),
        "generated_tokens": now.generated_tokens,
        "prompt_tokens": now.prompt_tokens,
        "generated_tokens_per_s": round(now.recent_tokens_per_s, 3),
        "prompt_tokens_per_s": round(prompt_tokens / passed_s, 3) if before else None,
        "requests": {
            "waiting": now.num_waiting + num_outside,
            "prefilling": now.num_prefilling,
            "running": now.num_running,
            "max": max_requests,
        },
        "kv_blocks": {
            "used": now.used_blocks,
            "cached": now.cached_blocks,
            "free": now.free_blocks,
            "total": now.used_blocks + now.cached_blocks + now.free_blocks,
        },
        "snapshots": {"used": now.used_snapshots, "total": now.num_snapshots} if now.num_snapshots else None,
        "prefix_hit_rate": _share(now.cached_tokens, now.prompt_tokens),
        "recent_prefix_hit_rate": _share(cached_tokens, prompt_tokens),
        "drafts": None if now.drafts is None else _of_drafts(now.drafts, before.drafts if before else None),
    }


def _of_drafts(now: "DraftStats", before: "DraftStats | None") -> dict[str, Any]:
    proposed = now.proposed - before.proposed if before else 0
    accepted = now.accepted - before.accepted if before else 0
    return {
        "width": now.width,
        "acceptance": _share(now.accepted, now.proposed),
        "recent_acceptance": _share(accepted, proposed),
        "positions": [_share(stood, drafted) for drafted, stood in now.positions],
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole > 0 else None
