# SPDX-License-Identifier: Apache-2.0
"""The project's fronts over a scripted service, on a thread, with metrics that say what runs: a server to load."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.load.server import Server
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Ended
from serving.core.front import AbstractFront
from serving.core.lifecycle import Lifecycle, State
from serving.grpc.server import make_server
from serving.grpc.settings import GrpcSettings
from serving.http.desk import Desk
from serving.http.server import make_http_server
from serving.http.settings import HttpSettings
from tests.serving.scripted import ScriptedService

START_S = 10


class CrowdService(ScriptedService):
    """A scripted service that refuses what a real one refuses, takes `pause_s` for each token, and every `spoils`th
    answer says something else."""

    def __init__(self, pause_s: float = 0.0, spoils: int = 0, leaks: bool = False):
        super().__init__()
        self._pause_s, self._spoils, self._leaks, self._num = pause_s, spoils, leaks, 0

    async def generate(self, call, caller):
        if call.info.model not in ("", "scripted"):
            raise ServiceError(Kind.NOT_FOUND, "There is no such model; ask for scripted.", field="model")
        if call.params.regex is not None:
            raise ServiceError(Kind.INVALID, "The pattern is none; give one.", field="params.regex")
        if call.prompt.token_ids and min(call.prompt.token_ids) < 0:
            raise ServiceError(Kind.INVALID, "The prompt has no such token; give others.", field="prompt")
        self._num += 1
        spoilt = self._spoils and self._num % self._spoils == 0
        async for event in super().generate(call, caller):
            await asyncio.sleep(self._pause_s)
            yield spoil(event) if spoilt else event

    def metrics(self) -> str:
        """As the engine's collector writes them."""
        used = len(self.running) + self._leaks
        return f'metrale_kv_blocks{{state="used"}} {used}.0\nmetrale_requests_running {len(self.running)}.0\n'


def spoil(event):
    """The event with another first token."""
    if isinstance(event, Ended):
        result = event.result
        ids = ((result.token_ids[0] + 1) % 256, *result.token_ids[1:])
        return dataclasses.replace(event, result=dataclasses.replace(result, token_ids=ids))
    return Delta(event.index, event.text, ((event.token_ids[0] + 1) % 256, *event.token_ids[1:]))


def front_of(name: str, service: CrowdService) -> AbstractFront:
    """The front of that name, not started."""
    if name == "grpc":
        return make_server(service, GrpcSettings(port=0))
    lifecycle = Lifecycle()
    lifecycle.move(State.SERVING)
    return make_http_server(Desk(service, lifecycle, HttpSettings(port=0)))


@contextmanager
def crowd_server(name: str, service: CrowdService) -> Iterator[Server]:
    """The server, whose front of that name runs meanwhile. Its process is the test's own."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(service.metrics().encode())

        def log_message(self, *arguments):
            """Nothing."""

    side = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    paging = threading.Thread(target=side.serve_forever)
    paging.start()
    started, loop = threading.Event(), asyncio.new_event_loop()
    front = front_of(name, service)

    async def serve():
        over = asyncio.Event()
        await front.start()
        front.set_serving(True)
        serving.append(over)
        started.set()
        await over.wait()
        await front.stop()

    serving: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(START_S)
    try:
        yield Server(name, f"127.0.0.1:{front.port}", f"http://127.0.0.1:{side.server_port}")
    finally:
        loop.call_soon_threadsafe(serving[0].set)
        thread.join(START_S)
        loop.close()
        side.shutdown()
        side.server_close()
        paging.join(START_S)


def main() -> None:
    """Serves the front that the command line names until stdin ends; prints target and URL."""
    with crowd_server(sys.argv[1], CrowdService(pause_s=0.002)) as server:
        print(server.target, server.side_url, flush=True)
        input()


if __name__ == "__main__":
    main()
