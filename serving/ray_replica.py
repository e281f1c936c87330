# SPDX-License-Identifier: Apache-2.0
"""`Replica`: one model and the whole HTTP application over it, as an actor of Ray Serve."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from metrale_jax.core.errors import MetraleError
from metrale_jax.llm_config import LLMConfig
from metrale_jax.progress import Progress
from serving.asgi_tunnel import Asked, Head, answered
from serving.config import ServeConfig
from serving.core.catalog import Wanted
from serving.core.gate import Gate
from serving.core.journal import Journal, write_all
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.records import CallRecord
from serving.core.service import Parts, Service
from serving.core.tracing import Tracing
from serving.derived_settings import http_settings, service_settings
from serving.http.app import make_app
from serving.http.desk import Desk
from serving.metrics import CONTENT_TYPE, EngineCollector, RequestHistograms, exposition
from serving.serve_command import SWITCH_S
from serving.service_metrics import CallMetrics, ServiceCollector

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

STDERR = 2
# After the grace: what the engine takes to put away what it keeps, and the journal to leave.
ENGINE_S, JOURNAL_S = 10.0, 2.0
ENDING_S = ENGINE_S + JOURNAL_S + 3.0


class Replica:
    """Made once its model is loaded and warm; Serve sends no call before."""

    async def __init__(self, config: ServeConfig, llm_config: LLMConfig):
        sys.setswitchinterval(SWITCH_S)
        self._config, self._llm_config = config, llm_config
        self._journal = Journal(partial(write_all, STDERR), config.log_format, config.log_prompts, time.time)
        self._registry, self._lifecycle = CollectorRegistry(), Lifecycle()
        self._mistake: MetraleError | None = None
        keys = KeyRing.open(config.key_file) if config.key_file else KeyRing.anonymous(config.anonymous_limits)
        meter = Meter(keys.limits_of, time.monotonic)
        gate = Gate(config.max_waiting_requests, config.max_waiting_tokens, time.monotonic)
        self._count = CallMetrics(self._registry)
        self._registry.register(ServiceCollector(self._lifecycle, meter, gate))
        parts = Parts(keys, meter, gate, self._lifecycle, self._observe, Tracing())
        self._service = Service(self._load, service_settings(config), parts)
        self._app = make_app(
            Desk(
                service=self._service,
                lifecycle=self._lifecycle,
                settings=http_settings(config),
                version=version("metrale-jax"),
                metrics=lambda: (exposition(self._registry), CONTENT_TYPE),
                stats=lambda: self._service.llm and self._service.llm.stats(),
                waiting=lambda: self._service.num_waiting,
            )
        )
        await self._started()

    async def answer(self, asked: Asked, **_: Any) -> AsyncIterator[Head | bytes]:
        """The answer's head and its body, piece by piece."""
        pieces = answered(self._app, asked)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    def check_health(self) -> None:
        """Nothing; raises where another replica has to take this one's place."""
        state, reason = self._lifecycle.snapshot()
        if state is State.FAILED:
            raise RuntimeError(f"the engine has failed: {reason}")

    async def __del__(self) -> None:
        # Serve calls it after the last call, or when the grace is over.
        await self._service.drain(0.0)
        await self._service.stop(ENGINE_S)
        self._journal.close(JOURNAL_S)

    async def _started(self) -> None:
        loop, moved = asyncio.get_running_loop(), asyncio.Event()

        def hear(state: State, reason: str) -> None:
            self._journal.event("state", state=state.value, **({"reason": reason} if reason else {}))
            if state in (State.SERVING, State.FAILED):
                loop.call_soon_threadsafe(moved.set)

        self._lifecycle.listen(hear)
        self._service.start()
        await moved.wait()
        if self._mistake is not None:
            raise self._mistake
        self.check_health()

    def _load(self, wanted: Wanted, progress: Progress) -> "LLM":
        """The model, in the engine's thread."""
        from metrale_jax.llm import LLM

        options = {field.name: getattr(self._llm_config, field.name) for field in fields(self._llm_config)}
        try:
            llm = LLM(self._config.model, progress=progress, on_finish=RequestHistograms(self._registry), **options)
        except MetraleError as error:
            self._mistake = error
            raise
        self._registry.register(EngineCollector(llm.stats))
        return llm

    def _observe(self, record: CallRecord) -> None:
        self._count(record)
        self._journal(record)
