# SPDX-License-Identifier: Apache-2.0
"""`HealthMethods`: grpc.health.v1, whose watchers a draining server lets go."""

import asyncio
from collections.abc import Mapping, Sequence

from grpc_health.v1 import health_pb2

from serving.core.errors import Kind, ServiceError
from serving.grpc.methods import Context, Method

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_Status = health_pb2.HealthCheckResponse


class HealthMethods:
    """All of `services` and the server ("") serve, or none does; none until told."""

    def __init__(self, services: Sequence[str]):
        self._services = ("", *services)
        self._closed = False
        self._changed = asyncio.Event()
        self.serving = False

    def set_serving(self, serving: bool) -> None:
        """Tells it to all who watch."""
        self.serving = serving
        self._tell()

    def close(self) -> None:
        """Nothing serves, and those who watch are let go."""
        self.serving, self._closed = False, True
        self._tell()

    def by_name(self) -> Mapping[str, Method]:
        """The methods, by their names in the proto."""
        return {"Check": self._check, "Watch": self._watch, "List": self._list}

    async def _check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Status:
        if request.service not in self._services:
            message = f"service={request.service!r} is not served here; ask for one of {', '.join(self._services[1:])}."
            raise ServiceError(Kind.NOT_FOUND, message, field="service")
        return _Status(status=self._status(request.service))

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last = None
        while True:
            # Together, before the write: what changes during it is told after it.
            changed, closed, status = self._changed, self._closed, self._status(request.service)
            if status != last:
                await context.write(_Status(status=status).SerializeToString())
            last = status
            if closed:
                return
            await changed.wait()

    async def _list(self, _: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {service: _Status(status=self._status(service)) for service in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self.serving else _Status.NOT_SERVING

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
