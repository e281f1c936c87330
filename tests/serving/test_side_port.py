# SPDX-License-Identifier: Apache-2.0
"""What probes and scrapes are told, by an HTTP client that is not ours; and who would tie it up does not."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from metrale_jax.core.errors import ConfigError
from serving import side_port
from serving.core.lifecycle import Lifecycle, State
from serving.side_port import MAX_CONNECTIONS, MAX_HEAD_BYTES, SidePort

BODY = b"metrale_steps_total 3.0\n"


@contextmanager
def listening(metrics=lambda: (BODY, "text/plain; version=1"), lifecycle=None):
    port = SidePort("127.0.0.1", 0, lifecycle or Lifecycle(), metrics)
    try:
        yield port.start()
    finally:
        port.stop()


def asked(port, path, method="GET", body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


@contextmanager
def raw(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        yield plain


def everything(plain):
    data = b""
    try:
        while piece := plain.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("state", list(State))
def test_probes_are_told_where_the_server_stands(state):
    lifecycle = Lifecycle()
    lifecycle.move(state, "because")
    with listening(lifecycle=lifecycle) as port:
        status, body, _ = asked(port, "/health")
        assert status == (503 if state in (State.FAILED, State.STOPPED) else 200)
        told = json.loads(body)
        assert told["state"] == state.value
        status, body, headers = asked(port, "/ready?verbose=1")
        assert status == (200 if state is State.SERVING else 503)
        assert json.loads(body) == told and headers["content-type"] == "application/json"
        if state is not State.LOADING:
            assert told["reason"] == "because"


def test_a_scrape_gets_the_whole_exposition_however_long():
    long = BODY * 200_000
    with listening(lambda: (long, "text/plain; version=1")) as port:
        status, body, headers = asked(port, "/metrics")
    assert status == 200 and body == long
    assert headers["content-type"] == "text/plain; version=1" and headers["content-length"] == str(len(long))


def test_what_is_not_there_is_said_so_and_a_head_has_no_body():
    with listening() as port:
        assert asked(port, "/")[0] == 404 and asked(port, "/metricss")[0] == 404
        assert asked(port, "/metrics", "POST", b"x" * 100)[0] == 405
        status, body, headers = asked(port, "/metrics", "HEAD")
        assert (status, body, headers["content-length"]) == (200, b"", str(len(BODY)))
        with raw(port) as plain:
            plain.sendall(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert everything(plain).endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b" 400 "),
        (b"GET /health HTTP/1.1\r\n\r\n", b" 400 "),  # no host
        (b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\n", b" 400 "),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 3 * MAX_HEAD_BYTES, b" 431 "),
    ],
    ids=["tls", "no-host", "lengths", "large-head"],
)
def test_what_is_no_request_is_told_so(sent, status):
    with listening() as port, raw(port) as plain:
        plain.sendall(sent)
        assert status in everything(plain).split(b"\r\n")[0]
        assert asked(port, "/health")[0] == 200


def test_who_sends_slowly_is_cut_off_and_keeps_nobody(monkeypatch):
    monkeypatch.setattr(side_port, "READ_S", 0.3)
    with listening() as port, raw(port) as plain:
        plain.sendall(b"GET /health HT")
        assert asked(port, "/health")[0] == 200
        assert everything(plain) == b""


def test_who_reads_slowly_is_cut_off(monkeypatch):
    monkeypatch.setattr(side_port, "WRITE_S", 0.3)
    long = bytes(64 << 20)
    port = SidePort("127.0.0.1", 0, Lifecycle(), lambda: (long, "text/plain"))
    with raw(port.start()) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert plain.recv(1) == b"H"
        until = time.monotonic() + 30
        while port._num_connections and time.monotonic() < until:
            time.sleep(0.01)
        assert port._num_connections == 0 and len(everything(plain)) < len(long)
    port.stop()


def test_of_very_many_connections_some_are_turned_away_and_later_ones_are_served(monkeypatch):
    monkeypatch.setattr(side_port, "READ_S", 1.0)
    with listening() as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(MAX_CONNECTIONS + 20)]
        assert everything(idle[-1]) == b"", "turned away"
        assert everything(idle[0]) == b"", "cut off"
        assert asked(port, "/health")[0] == 200
        for one in idle:
            one.close()


def test_it_answers_when_all_else_hangs():
    held = threading.Lock()
    lifecycle = Lifecycle()
    with held, listening(lifecycle=lifecycle) as port:
        hung = threading.Thread(target=held.acquire, daemon=True)
        hung.start()
        lifecycle.move(State.SERVING)
        assert asked(port, "/ready")[0] == 200
        lifecycle.move(State.FAILED, "the engine is stuck")
        status, body, _ = asked(port, "/ready")
        assert status == 503 and json.loads(body) == {"state": "failed", "reason": "the engine is stuck"}


def test_a_scrape_that_fails_ends_its_connection_alone(caplog):
    def broken():
        raise RuntimeError("no figures")

    with listening(broken) as port:
        with pytest.raises(http.client.RemoteDisconnected):
            asked(port, "/metrics")
        assert asked(port, "/health")[0] == 200
    assert "no figures" in caplog.text


def test_it_stops_under_open_connections_and_a_port_that_is_taken_is_told():
    with listening() as port, raw(port):
        other = SidePort("127.0.0.1", port, Lifecycle(), lambda: (b"", ""))
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            other.start()
        other.stop()
