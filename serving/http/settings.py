# SPDX-License-Identifier: Apache-2.0
"""`HttpSettings`: where and how the HTTP front listens."""

from dataclasses import dataclass

from serving.core.tls import TlsSettings

MIB = 2**20


@dataclass(frozen=True)
class HttpSettings:
    """`port` 0 takes any free one. Without `tls` connections are in the clear.

    There are up to `max_connections`, with up to `max_calls` at work; who comes beyond that is told to come again. A
    connection may be silent for `keep_alive_s` between calls, the head of a call takes up to `head_s`, its body, of up
    to `max_body_bytes`, up to `body_s`; large bodies wait while `max_bodies_bytes` are being read. A client that takes
    nothing of its answer for `write_s` is given up. In a stream that has nothing to say a comment is sent each
    `ping_s`. Pages of `allowed_origins` may call from browsers; `page` puts our own at `/`. Calls to names that are
    none of `allowed_hosts` are refused; without any, all do. `tool_dialect` names how the model writes calls of tools;
    without it its chat template tells.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls: TlsSettings | None = None
    max_body_bytes: int = 32 * MIB
    max_bodies_bytes: int = 128 * MIB
    max_connections: int = 4096
    max_calls: int = 1024
    keep_alive_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 120.0
    write_s: float = 60.0
    ping_s: float = 15.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    page: bool = True
    tool_dialect: str = ""
