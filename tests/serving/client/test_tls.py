# SPDX-License-Identifier: Apache-2.0
"""TLS and mutual TLS against certificates of an authority made for the tests."""

import shutil
import subprocess

import grpc
import pytest

from serving.client import Client, ClientTls, RetryPolicy, UnavailableError
from tests.serving.client.server import serving

ONCE = RetryPolicy(max_attempts=1)

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def openssl(directory, *arguments):
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with the authority `ca`, and `server` and `client` that it has signed."""
    directory = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(directory, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(directory, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return directory


def credentials(files, mutual):
    pair = ((files / "server.key").read_bytes(), (files / "server.pem").read_bytes())
    return grpc.ssl_server_credentials([pair], (files / "ca.pem").read_bytes() if mutual else None, mutual)


def test_a_client_that_knows_the_authority_is_served_and_sends_its_token(files, servicer):
    with (
        serving(servicer, credentials(files, mutual=False)) as target,
        Client(target, tls=ClientTls(ca=files / "ca.pem"), token="secret") as client,
    ):
        assert client.generate("one").text == "one "
    assert servicer.calls[0][2]["authorization"] == "Bearer secret"


def test_a_client_that_does_not_know_the_authority_refuses_the_server(files, servicer):
    with serving(servicer, credentials(files, mutual=False)) as target:
        for tls in (ClientTls(), None):
            with Client(target, tls=tls, retries=ONCE) as client, pytest.raises(UnavailableError):
                client.models()
    assert servicer.calls == []


def test_mutual_tls_asks_for_the_clients_certificate(files, servicer):
    own = ClientTls(ca=files / "ca.pem", certificate=str(files / "client.pem"), key=files / "client.key")
    with serving(servicer, credentials(files, mutual=True)) as target:
        with Client(target, tls=own) as client:
            assert client.generate("one").text == "one "
        nobody = ClientTls(ca=files / "ca.pem")
        with Client(target, tls=nobody, retries=ONCE) as client, pytest.raises(UnavailableError):
            client.models()
    assert len(servicer.calls) == 1


def test_a_certificate_comes_with_its_key():
    with pytest.raises(ValueError, match="come in pairs"):
        ClientTls(certificate="a.pem")
