# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests, made by openssl."""

import subprocess
from pathlib import Path


def made_certificates(directory: Path) -> dict[str, bytes]:
    """A CA, and a server's and a client's certificate of it, as PEM by name; they are in the directory too."""
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        directory, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"
    )
    for name in ("server", "client"):
        (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        _openssl(directory, "req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        of_ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        _openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *of_ca)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)
