# SPDX-License-Identifier: Apache-2.0
"""/v1/stats: how the server stands, in one JSON object for a page that looks every second."""

from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from serving.http.desk import Desk
from serving.http.endpoint import Asked, get, json_answer
from serving.http.models import model_object

if TYPE_CHECKING:
    from metrale_jax.engine.stats import EngineStats


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [get(desk, "/v1/stats", stats)]


async def stats(desk: Desk, asked: Asked) -> Response:
    """The figures of this moment; `engine` is null before there is a model."""
    now = desk.stats()
    cards = desk.service.models()
    return json_answer(
        {
            "object": "stats",
            "version": desk.version,
            "state": desk.lifecycle.state.value,
            "num_calls": len(desk.calls),
            "model": model_object(cards[0]) if cards else None,
            "engine": None if now is None else _engine(now),
        }
    )


def _engine(now: "EngineStats") -> dict[str, Any]:
    """`_total`s only grow; rates of what has none of its own are their differences over `uptime_s`."""
    return {
        "uptime_s": now.uptime_s,
        "generated_tokens_per_s": now.recent_tokens_per_s,
        "generated_tokens_total": now.generated_tokens,
        "prompt_tokens_total": now.prompt_tokens,
        "cached_prompt_tokens_total": now.cached_tokens,
        "prefix_hit_rate": now.hit_rate,
        "requests": {"waiting": now.num_waiting, "prefilling": now.num_prefilling, "running": now.num_running},
        "finished_total": dict(now.finished),
        "preemptions_total": now.num_preemptions,
        "steps_total": now.num_steps,
        "programs_compiled_total": now.num_compiles,
        "kv_blocks": {
            "used": now.used_blocks,
            "cached": now.cached_blocks,
            "free": now.free_blocks,
            "total": now.used_blocks + now.cached_blocks + now.free_blocks,
        },
        "snapshots": {"used": now.used_snapshots, "total": now.num_snapshots, "hits_total": now.snapshot_hits},
        "drafts": None if now.drafts is None else _drafts(now.drafts.width, now.drafts.positions),
    }


def _drafts(width: int, positions: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    places = [
        {"proposed": proposed, "accepted": accepted, "acceptance": accepted / proposed if proposed else None}
        for proposed, accepted in positions
    ]
    return {"width": width, "by_place": places}
