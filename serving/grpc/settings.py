# SPDX-License-Identifier: Apache-2.0
"""`GrpcSettings`: where and how the gRPC front listens."""

from dataclasses import dataclass

from serving.core.tls import TlsSettings

MIB = 2**20


@dataclass(frozen=True)
class GrpcSettings:
    """`port` 0 takes any free one. Without `tls` connections are in the clear.

    After `keepalive_time_s` of silence the server pings, and closes the connection when nothing comes back within
    `keepalive_timeout_s`; a client that pings more often than `min_ping_interval_s` is sent away. A connection has up
    to `max_concurrent_streams` calls at a time, a call of many requests (GenerateStream, ModelStreamInfer) up to
    `max_requests_per_stream`. `compression` compresses what is sent, which costs more time than it saves for tokens.
    `version` is what the server says of itself.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tls: TlsSettings | None = None
    max_receive_message_bytes: int = 32 * MIB
    max_send_message_bytes: int = 64 * MIB
    keepalive_time_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 10.0
    max_concurrent_streams: int = 1024
    max_requests_per_stream: int = 256
    reflection: bool = True
    compression: bool = False
    version: str = ""
