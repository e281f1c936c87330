# SPDX-License-Identifier: Apache-2.0
"""Sockets and TLS of the HTTP front."""

import socket
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

from metrale_jax.core.errors import ConfigError
from serving.core.tls import TlsSettings

BACKLOG = 2048


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, all at one port. Raises `ConfigError` where that cannot be."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            own_port = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_listening(family, (address[0], own_port, *address[2:])))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(
            f"http_port={port} on host {host} cannot be listened on ({error.strerror or error}); "
            "use another port or host, or end what holds it."
        ) from error
    return sockets


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """What a server speaks TLS with. Raises `ConfigError` for what is no certificate, key or client CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # The library reads these from files only.
        with TemporaryDirectory() as directory:
            paths = Path(directory) / "certificate", Path(directory) / "key"
            for path, text in zip(paths, (tls.certificate, tls.key), strict=True):
                path.write_bytes(text)
            context.load_cert_chain(*paths, password="")
        if tls.client_ca is not None:
            context.load_verify_locations(cadata=tls.client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            "the TLS certificate, key or client CA cannot be used; give PEM texts, and the key that belongs to the "
            "certificate."
        ) from error
    return context


def _listening(family: int, address: tuple) -> socket.socket:
    # Asyncio lets small writes go at once only where the protocol is named; else each would wait for the client's ACK.
    one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen(BACKLOG)
        one.setblocking(False)
    except OSError:
        one.close()
        raise
    return one
