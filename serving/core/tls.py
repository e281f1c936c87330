# SPDX-License-Identifier: Apache-2.0
"""`TlsSettings`: what every front needs to speak TLS."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TlsSettings:
    """PEM texts: the server's certificate chain, its key, and with `client_ca` whose certificates clients must show."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None
