# SPDX-License-Identifier: Apache-2.0
"""How a client reaches its server: target, TLS, token; and what every call takes along."""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from serving.client.errors import CallCancelledError
from serving.client.retry import Attempts, Clock, RetryPolicy
from serving.grpc.stubs.generate_pb2_grpc import GenerateServiceStub

CHANNEL_OPTIONS = (
    # Log-probabilities of long prompts and embeddings of many inputs are larger than gRPC's 4 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A client's connection is its own: it ends with the client.
    ("grpc.use_local_subchannel_pool", 1),
)
HEALTH_METHOD = "/grpc.health.v1.Health/Check"


@dataclass(frozen=True)
class ClientTls:
    """Files in PEM: the authorities that the server's certificate is checked against (None: the system's), and for
    mutual TLS the client's own `certificate` and `key`. Raises `ValueError` where only one of the two is given."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self):
        if (self.certificate is None) != (self.key is None):
            raise ValueError(f"certificate={self.certificate} and key={self.key} come in pairs; give both or neither.")

    def credentials(self) -> grpc.ChannelCredentials:
        """Them, read from their files."""
        ca, key, certificate = (path and Path(path).read_bytes() for path in (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True)
class Connection:
    """What a client was made with, for either kind of channel."""

    target: str
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    retries: RetryPolicy
    clock: Clock

    def channel(self) -> grpc.Channel:
        """A channel for threads."""
        if self.credentials is None:
            return grpc.insecure_channel(self.target, CHANNEL_OPTIONS)
        return grpc.secure_channel(self.target, self.credentials, CHANNEL_OPTIONS)

    def aio_channel(self) -> grpc.aio.Channel:
        """A channel of the running event loop."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.target, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.target, self.credentials, CHANNEL_OPTIONS)

    def attempts(self, timeout_s: float | None, retries: RetryPolicy | None = None) -> Attempts:
        """The tries of a call; the client's own timeout and policy where the call has none."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(
                f"timeout_s={timeout_s} is not above 0; give seconds, or None to wait as long as it takes."
            )
        return Attempts(retries or self.retries, timeout_s, self.clock)


def connection(
    target: str,
    token: str | None,
    tls: ClientTls | None,
    timeout_s: float | None,
    retries: RetryPolicy,
    insecure_token: bool,
    clock: Clock,
) -> Connection:
    """The connection of these. Raises `ValueError` for a token that anybody on the way could read, unless
    `insecure_token`, and for one that no header can carry."""
    if token is not None:
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError("the token is empty or holds characters that no header carries; give printable ASCII.")
        if tls is None and not insecure_token and not stays_here(target):
            raise ValueError(
                f"a token to {target} without TLS can be read on the way; give tls=, or insecure_token=True."
            )
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return Connection(target, tls and tls.credentials(), metadata, timeout_s, retries, clock)


def stays_here(target: str) -> bool:
    """Whether a gRPC target is a socket of this machine: loopback or a Unix one."""
    scheme, _, rest = target.rpartition(":///") if ":///" in target else target.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    address = rest if ":///" in target or scheme in ("ipv4", "ipv6", "dns") else target
    try:
        host = urlsplit(f"//{address}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def methods(channel: grpc.Channel | grpc.aio.Channel) -> Mapping[str, Callable]:
    """The callables of the service by name, and "Health"."""
    stub = GenerateServiceStub(channel)
    # A health check's request and response have one field each, with the numbers and types of these wrappers.
    health = channel.unary_unary(
        HEALTH_METHOD, request_serializer=StringValue.SerializeToString, response_deserializer=Int32Value.FromString
    )
    return {**vars(stub), "Health": health}


def closed_error() -> CallCancelledError:
    """What a call of a closed client meets."""
    return CallCancelledError("CANCELLED", "the client is closed; make a new one.")


def task_is_cancelled() -> bool:
    """Whether the running task was cancelled. gRPC raises `CancelledError` for calls that ended otherwise, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
