# SPDX-License-Identifier: Apache-2.0
"""`serve`: the server put together from its settings, from its first line in the log to its last."""

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from metrale_jax.core.errors import MetraleError
from metrale_jax.llm_config import checked_limits
from metrale_jax.progress import Progress
from serving.core.catalog import Wanted
from serving.core.errors import Kind
from serving.core.front import AbstractFront
from serving.core.gate import Gate
from serving.core.journal import Journal, write_all
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.mappings import room_for_as_many
from serving.core.records import CallRecord, ChangeRecord
from serving.core.service import Parts, Service
from serving.core.tracing import Tracing, open_tracing
from serving.derived_settings import (
    catalog,
    exposed,
    grpc_settings,
    http_settings,
    service_settings,
    store_settings,
)
from serving.fronts import Fronts
from serving.grpc.server import make_server
from serving.http.batch_work import BatchWork
from serving.http.desk import Desk
from serving.http.server import make_http_server
from serving.metrics import CONTENT_TYPE, EngineCollector, RequestHistograms, exposition
from serving.service_metrics import CallMetrics, ServiceCollector
from serving.settings_sources import Resolved
from serving.side_port import SidePort
from serving.store.store import Store

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

STDERR = 2
DEAD = 70
# After the grace: what the last statuses take to leave, and the engine to put away what it keeps.
FAREWELL_S, ENGINE_S, JOURNAL_S = 2.0, 10.0, 2.0
# Where the engine cannot be waited for: a load, a step that hangs, a second signal.
NO_WAIT_S = 0.2


@dataclass(frozen=True)
class Ending:
    """The exit status, and whether the engine's thread has ended."""

    status: int
    clean: bool


def serve(resolved: Resolved, exporter: str, protocol: str) -> Ending:
    """How it ended. Raises `MetraleError` for mistakes, those in loading the model included. `exporter` and `protocol`
    are for traces, as `open_tracing` has them."""
    checked_limits(resolved.llm)
    config = resolved.serve
    with ExitStack() as stack:
        journal = Journal(partial(write_all, STDERR), config.log_format, config.log_prompts, time.time)
        stack.callback(journal.close, JOURNAL_S)
        stack.enter_context(_logging_to(journal))
        tracing = open_tracing(exporter, protocol) if config.tracing else Tracing()
        stack.callback(tracing.close)
        return asyncio.run(_Server(resolved, journal, tracing).run())


class _Server:
    """Its parts, and what befell it: the signals that came, why the engine failed, what was wrong with the model."""

    def __init__(self, resolved: Resolved, journal: Journal, tracing: Tracing):
        self._config, self._catalog, self._journal = resolved.serve, catalog(resolved), journal
        config = self._config
        self._keys = KeyRing.open(config.key_file) if config.key_file else KeyRing.anonymous(config.anonymous_limits)
        self._lifecycle, self._registry = Lifecycle(), CollectorRegistry()
        meter = Meter(self._keys.limits_of, time.monotonic)
        gate = Gate(config.max_waiting_requests, config.max_waiting_tokens, time.monotonic)
        self._count = CallMetrics(self._registry)
        self._registry.register(ServiceCollector(self._lifecycle, meter, gate))
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._histograms, figures = RequestHistograms(self._registry), EngineCollector()
        self._registry.register(figures)
        self._parts = Parts(
            self._keys,
            meter,
            gate,
            self._lifecycle,
            self._observe,
            tracing,
            changed=self._changed,
            figures=figures,
            room_for_two=room_for_as_many,
        )
        self._signals: list[signal.Signals] = []
        self._has_served = self._failed = False
        self._mistake: MetraleError | None = None
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()

    async def run(self) -> Ending:
        """How it ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        service = Service(self._load, service_settings(self._config), self._parts, self._catalog)
        desk = self._desk(service)
        fronts = self._fronts(service, desk)
        self._lifecycle.listen(partial(self._moved, loop, fronts))
        with ExitStack() as stack:
            side_port = self._open_side_port(stack)
            self._tell_where(await fronts.start(), side_port)
            try:
                service.start()
                if desk.batches is not None:
                    desk.batches.start()
                await self._stop.wait()
                if desk.batches is not None:
                    await desk.batches.stop()
                await (fronts.drain(FAREWELL_S) if self._failed else self._drain(service, fronts))
            finally:
                if desk.batches is not None:
                    await desk.batches.stop()
                await fronts.stop()
                if desk.batches is not None:
                    await desk.batches.store.close()
                in_hand = self._has_served and not self._failed and not self._at_once.is_set()
                clean = await service.stop(ENGINE_S if in_hand else NO_WAIT_S)
        if self._mistake is not None:
            raise self._mistake
        status = DEAD if self._failed else 128 + self._signals[-1] if self._at_once.is_set() else 0
        self._journal.event("stopped", status=status)
        return Ending(status, clean)

    def _desk(self, service: Service) -> Desk:
        """Raises `ConfigError` for a directory of files that cannot be used."""
        config = self._config
        metrics, stats = self._metrics, lambda: None if service.llm is None else service.llm.stats()
        own_version, loading, waiting = version("metrale-jax"), partial(_stage, service), lambda: service.num_waiting
        desk = Desk(service, self._lifecycle, http_settings(config), own_version, metrics, stats, waiting, loading)
        settings = store_settings(config)
        if settings is None:
            return desk
        store = Store(settings, time.time)
        store.open()
        work = BatchWork(desk, store, self._keys.caller, config.batch_in_flight, config.max_batch_lines)
        return replace(desk, batches=work)

    def _fronts(self, service: Service, desk: Desk) -> Fronts:
        config, own_version = self._config, version("metrale-jax")
        fronts: dict[str, AbstractFront] = {}
        if config.grpc_port is not None:
            fronts["grpc"] = make_server(service, grpc_settings(config, own_version))
        if config.http_port is not None:
            fronts["http"] = make_http_server(desk)
        return Fronts(fronts)

    def _metrics(self) -> tuple[bytes, str]:
        return exposition(self._registry), CONTENT_TYPE

    async def _drain(self, service: Service, fronts: Fronts) -> None:
        """Returns when all calls have ended or were ended, or at a second signal."""
        grace_s = self._config.grace_s
        draining = asyncio.gather(service.drain(grace_s), fronts.drain(grace_s + FAREWELL_S))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait((draining, at_once), return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            self._journal.event("drained", calls_ended=draining.result()[0])
        draining.cancel()
        at_once.cancel()
        await asyncio.gather(draining, at_once, return_exceptions=True)

    def _load(self, wanted: Wanted, progress: Progress) -> "LLM":
        """A model, in its engine's thread."""
        from metrale_jax.llm import LLM

        options = {field.name: getattr(wanted.config, field.name) for field in fields(wanted.config)}
        try:
            return LLM(wanted.source, progress=progress, on_finish=self._histograms, **options)
        except MetraleError as error:
            if not self._has_served:
                self._mistake = error
            raise

    def _observe(self, record: CallRecord) -> None:
        self._count(record)
        self._journal(record)

    def _changed(self, record: ChangeRecord) -> None:
        self._count.change(record)
        fault = record.outcome == Kind.INTERNAL.value or not record.freed
        level = "error" if fault else "info" if record.outcome == "ok" else "warning"
        retired = {"calls_ended": record.calls_ended, "freed": record.freed} if record.action == "retire" else {}
        self._journal.event(
            "model",
            level,
            action=record.action,
            model=record.model,
            key=record.key_id,
            peer=record.peer,
            outcome=record.outcome,
            detail=record.detail,
            seconds=round(record.seconds, 3),
            **retired,
        )

    def _moved(self, loop: asyncio.AbstractEventLoop, fronts: Fronts, state: State, reason: str) -> None:
        """Any thread may come here."""
        level = "error" if state is State.FAILED else "info"
        self._journal.event("state", level, state=state.value, **({"reason": reason} if reason else {}))
        loop.call_soon_threadsafe(fronts.set_serving, state is State.SERVING)
        self._has_served |= state is State.SERVING
        if state is State.FAILED:
            self._failed = True
            loop.call_soon_threadsafe(self._stop.set)

    def _hear(self, number: signal.Signals) -> None:
        self._journal.event("signal", name=number.name)
        if self._signals:
            self._at_once.set()
        self._signals.append(number)
        self._stop.set()

    def _reload(self) -> None:
        try:
            self._journal.event("keys_read", count=self._keys.reloaded())
        except MetraleError as error:
            self._journal.event("keys_kept", "error", reason=str(error))

    def _open_side_port(self, stack: ExitStack) -> int:
        """The port it listens on; 0 without one."""
        if not self._config.side_port:
            return 0
        side = SidePort(self._config.side_host, self._config.side_port, self._lifecycle, self._metrics)
        stack.callback(side.stop)
        return side.start()

    def _tell_where(self, ports: Mapping[str, int], side_port: int) -> None:
        config = self._config
        self._journal.event(
            "listening",
            **{name: _address(config.host, ports[name]) if name in ports else "" for name in ("grpc", "http")},
            side=_address(config.side_host, side_port) if side_port else "",
            model=config.name,
            tls=config.tls_certificate is not None,
            keys=len(self._keys.ids),
        )
        if exposed(config):
            self._journal.event("exposed", "warning", about=exposed(config))


@contextmanager
def _logging_to(journal: Journal) -> Iterator[None]:
    """A context in which what libraries log are lines of the journal."""
    handler, root = journal.handler(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _stage(service: Service) -> dict[str, Any] | None:
    stage = service.stage
    return None if stage is None else {"stage": stage.name, "done": stage.done, "total": stage.total}


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
