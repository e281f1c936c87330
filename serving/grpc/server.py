# SPDX-License-Identifier: Apache-2.0
"""`make_server`: the gRPC front over a service, from its port to its last call."""

import asyncio
import contextlib
import socket

import grpc
from grpc_reflection.v1alpha import reflection

from metrale_jax.core.errors import ConfigError
from serving.core.api import AbstractService
from serving.core.front import AbstractFront
from serving.core.tls import TlsSettings
from serving.grpc import generation, health, kserve
from serving.grpc.methods import CallsInFlight, service_handler, unserved_handler
from serving.grpc.settings import GrpcSettings

# After the last call: what its status takes to leave.
LINGER_S = 0.2
# What a cancelled call may take to give back what it holds.
STOP_S = 5.0
SERVICES = (generation.SERVICE.full_name, kserve.SERVICE.full_name)


class GrpcFront(AbstractFront):
    """A gRPC server on the event loop that starts it. `port` is the one it listens on once started."""

    def __init__(self, service: AbstractService, settings: GrpcSettings):
        self._service, self._settings = service, settings
        self._calls, self._draining = CallsInFlight(service.refused), asyncio.Event()
        self._health = health.HealthMethods(SERVICES)
        self._server: grpc.aio.Server | None = None
        self.port = settings.port

    async def start(self) -> int:
        server = grpc.aio.server(options=_options(self._settings), compression=_compression(self._settings))
        server.add_generic_rpc_handlers(self._handlers())
        if self._settings.reflection:
            names = (*SERVICES, health.SERVICE.full_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self.port = _bound(server, self._settings)
        await server.start()
        self._server = server
        return self.port

    def set_serving(self, serving: bool) -> None:
        # Until then health says NOT_SERVING.
        self._health.set_serving(serving)

    async def drain(self, grace_s: float) -> None:
        self._health.close()
        self._draining.set()
        if self._server is None:
            return
        stopping = asyncio.create_task(self._server.stop(grace_s))
        await self._idle(grace_s)
        # What is left are others' calls, such as an open reflection.
        await self._server.stop(LINGER_S)
        await stopping
        await self._idle(STOP_S)

    async def stop(self) -> None:
        self._health.close()
        self._draining.set()
        if self._server is not None:
            await self._server.stop(None)
            await self._idle(STOP_S)

    async def _idle(self, most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._calls.idle.wait()

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        most = self._settings.max_requests_per_stream
        own = generation.GenerateMethods(self._service, most, self._draining)
        open_inference = kserve.KserveMethods(
            self._service, most, self._draining, lambda: self._health.serving, self._settings.version
        )
        return (
            service_handler(generation.SERVICE, own.by_name(), self._calls),
            service_handler(kserve.SERVICE, open_inference.by_name(), self._calls),
            unserved_handler(kserve.SERVICE.full_name, kserve.UNSERVED),
            # Watching keeps no server from ending.
            service_handler(health.SERVICE, self._health.by_name(), CallsInFlight()),
        )


def make_server(service: AbstractService, settings: GrpcSettings) -> GrpcFront:
    """The front, not started."""
    return GrpcFront(service, settings)


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    ping_interval_ms = round(settings.min_ping_interval_s * 1000)
    return [
        # Without it two servers share a port and nobody is told.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_receive_message_bytes),
        ("grpc.max_send_message_length", settings.max_send_message_bytes),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # A call may long have nothing to say.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", ping_interval_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ping_interval_ms),
    ]


def _compression(settings: GrpcSettings) -> grpc.Compression:
    return grpc.Compression.Gzip if settings.compression else grpc.Compression.NoCompression


def _bound(server: grpc.aio.Server, settings: GrpcSettings) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    try:
        if settings.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(settings.tls))
    except RuntimeError as error:
        fault = _bind_fault(settings)
        if settings.tls is not None and not fault:
            raise ConfigError(
                "the TLS certificate, key or client CA cannot be used; give PEM texts, and the key that belongs to the "
                "certificate."
            ) from error
        raise ConfigError(
            f"port={settings.port} on host {settings.host} cannot be listened on ({fault or error}); "
            "use another port or host, or end what holds it."
        ) from error


def _credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)],
        root_certificates=tls.client_ca,
        require_client_auth=tls.client_ca is not None,
    )


def _bind_fault(settings: GrpcSettings) -> str:
    # gRPC keeps the reason to itself.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""
