# SPDX-License-Identifier: Apache-2.0
"""The front from its port to its last call: probes, models, what is not served, who may call, and how it ends."""

import asyncio
import json
import socket
import ssl

import httpx
import pytest

from metrale_jax.core.errors import ConfigError
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import Lifecycle, State
from serving.core.tls import TlsSettings
from serving.http.desk import Desk
from serving.http.server import make_http_server
from serving.http.settings import HttpSettings
from tests.serving.certificates import made_certificates
from tests.serving.http.fronts import error_of, fronted, run, serving
from tests.serving.scripted import CARD, ScriptedService

ALICE = {"alice-token": Caller(key_id="alice")}


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST:81", "[::1]:8000", "[::1]"])
def test_a_server_answers_to_its_names(host):
    async def act():
        async with fronted(ScriptedService(), allowed_hosts=("127.0.0.1", "localhost", "::1")) as world:
            assert (await world.client.get("/v1/models", headers={"host": host})).status_code == 200

    run(act())


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "[::2]:8000", "localhost@evil"])
def test_a_name_that_was_made_to_lead_here_is_refused(host):
    async def act():
        async with fronted(ScriptedService(), allowed_hosts=("127.0.0.1", "localhost", "::1")) as world:
            for path in ("/v1/models", "/", "/none"):
                answer = await world.client.get(path, headers={"host": host})
                assert error_of(answer, 421)["param"] == "host"
        async with fronted(ScriptedService()) as world:
            assert (await world.client.get("/v1/models", headers={"host": host})).status_code == 200

    run(act())


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost/v1/models", 200),
        ("HTTP://localhost:80/v1/models?x=http://b", 200),
        ("https://localhost/v1/models/a%20b", 404),
        ("http://evil.example/v1/models", 421),
        ("http://localhost", 404),
        ("http:///v1/models", 421),
    ],
)
def test_targets_with_a_host_are_paths_of_that_host(target, status):
    async def act():
        async with fronted(ScriptedService(), allowed_hosts=("localhost",), page=False) as world:
            head = f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            back = await world.raw(head.encode())
            assert back.startswith(f"HTTP/1.1 {status} ".encode()), back
            assert b"localhost/" not in back.partition(b"\r\n\r\n")[2]

    run(act())


def test_probes_say_where_the_server_stands():
    async def act():
        lifecycle = Lifecycle()
        async with fronted(ScriptedService(), lifecycle) as world:
            for state, health, ready in (
                (State.LOADING, 200, 503),
                (State.SERVING, 200, 200),
                (State.DRAINING, 200, 503),
                (State.FAILED, 503, 503),
            ):
                lifecycle.move(state, "secret reason")
                answers = [await world.client.get(path) for path in ("/health", "/ready")]
                assert [answer.status_code for answer in answers] == [health, ready]
                assert [answer.json() for answer in answers] == [{"state": state.value}] * 2

    run(act())


def test_metrics_are_for_callers():
    async def act():
        metrics = {"metrics": lambda: (b"a 1\n", "text/plain; version=1")}
        async with fronted(ScriptedService(keys=ALICE), desk=metrics) as world:
            error_of(await world.client.get("/metrics"), 401)
            answer = await world.client.get("/metrics", headers={"authorization": "Bearer alice-token"})
            assert answer.text == "a 1\n" and answer.headers["content-type"].startswith("text/plain; version=1")

    run(act())


def test_figures_of_keys_are_for_admins():
    told = (
        b'# TYPE metrale_key_calls counter\nmetrale_key_calls_total{key="bob"} 7\nmetrale_calls_total{method="m"} 9\n'
    )
    keys = ALICE | {"root-token": Caller(key_id="root", admin=True)}

    async def act():
        async with fronted(ScriptedService(keys=keys), desk={"metrics": lambda: (told, "text/plain")}) as world:
            for token, seen in (("root-token", told), ("alice-token", b'metrale_calls_total{method="m"} 9\n')):
                answer = await world.client.get("/metrics", headers={"authorization": f"Bearer {token}"})
                assert answer.content == seen
        async with fronted(ScriptedService(), desk={"metrics": lambda: (told, "text/plain")}) as world:
            assert (await world.client.get("/metrics")).content == told

    run(act())


def test_probes_are_answered_while_calls_are_turned_away():
    async def act():
        lifecycle = serving()
        async with fronted(ScriptedService(), lifecycle, max_calls=0) as world:
            error_of(await world.client.get("/v1/models"), 503)
            assert (await world.client.get("/ready")).json() == {"state": "serving"}
            lifecycle.move(State.DRAINING)
            world.desk.calls.draining = True
            error_of(await world.client.get("/v1/models"), 503)
            answers = [await world.client.get(path) for path in ("/health", "/ready", "/v1/stats")]
            assert [answer.status_code for answer in answers] == [200, 503, 200]
            assert {answer.json()["state"] for answer in answers} == {"draining"}
            assert not len(world.desk.calls) and world.desk.calls.idle.is_set()

    run(act())


def test_models_are_listed_and_each_has_its_page():
    async def act():
        lifecycle = Lifecycle()
        async with fronted(ScriptedService(), lifecycle) as world:
            listed = (await world.client.get("/v1/models")).json()
            assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == ["scripted"]
            assert listed["data"][0]["max_model_len"] == CARD.max_context_tokens
            assert (await world.client.get("/v1/models/scripted")).json() == listed["data"][0]
            loading = await world.client.get("/v1/models/other/one")
            assert error_of(loading, 503)["code"] == "service_unavailable" and loading.headers["retry-after"] == "5"
            lifecycle.move(State.SERVING)
            error = error_of(await world.client.get("/v1/models/other/one"), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model") and "other/one" in error["message"]

    run(act())


def test_what_is_not_served_is_an_error_object():
    async def act():
        service = ScriptedService()
        async with fronted(service) as world:
            for path in ("/nothing", "/v1/models/", "/v1", "/v1/../etc/passwd", "/%00"):
                missing = await world.client.get(path, headers={"x-request-id": "mine"})
                error_of(missing, 404)
                assert missing.headers["x-request-id"] == "mine"
            for given in ({}, {"x-request-id": "two words"}):
                fresh = (await world.client.get("/nothing", headers=given)).headers["x-request-id"]
                assert len(fresh) == 32 and fresh != "two words"
            for path in ("/v1/messages/batches", "/v1/messages"):
                told = (await world.client.get(path)).json()
                assert told["type"] == "error" and told["error"]["type"] in ("not_found_error", "invalid_request_error")
            for method in ("POST", "DELETE", "OPTIONS", "PATCH"):
                answer = await world.client.request(method, "/v1/models")
                error_of(answer, 405)
                assert "GET" in answer.headers["allow"]
            head = await world.client.head("/v1/models")
            assert head.status_code == 200 and head.content == b"" and int(head.headers["content-length"]) > 0
        assert {name for name, _ in service.refusals} == {"(none)", "/v1/models/{model:path}"}

    run(act())


def test_keys_are_asked_for_and_named_in_neither_answer():
    async def act():
        async with fronted(ScriptedService(keys=ALICE)) as world:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic alice-token"}):
                answer = await world.client.get("/v1/models", headers=headers)
                error = error_of(answer, 401)
                assert error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
            for headers in ({"authorization": "bearer alice-token"}, {"x-api-key": "alice-token"}):
                assert (await world.client.get("/v1/models", headers=headers)).status_code == 200

    run(act())


def test_ids_of_requests_go_back_and_strange_ones_are_refused():
    async def act():
        async with fronted(ScriptedService()) as world:
            answer = await world.client.get("/v1/models", headers={"x-request-id": "mine-1"})
            assert answer.headers["x-request-id"] == "mine-1"
            fresh = [(await world.client.get("/v1/models")).headers["x-request-id"] for _ in range(2)]
            assert fresh[0] != fresh[1] and len(fresh[0]) == 32
            for strange in ("two words", "x" * 129):
                error = error_of(await world.client.get("/v1/models", headers={"x-request-id": strange}), 400)
                assert error["param"] == "x-request-id"
            for timeout in ("soon", "0", "-1", "nan", "1e9999"):
                error = error_of(await world.client.get("/v1/models", headers={"x-request-timeout": timeout}), 400)
                assert error["param"] == "x-request-timeout"

    run(act())


def test_what_nobody_foresaw_is_told_without_what_it_was(caplog):
    class Broken(ScriptedService):
        def models(self):
            raise RuntimeError("secret of ours")

    async def act():
        service = Broken()
        async with fronted(service) as world:
            answer = await world.client.get("/v1/models")
            error = error_of(answer, 500)
            incident = error["message"].split("incident ")[1].split(" ")[0]
            assert error["type"] == "server_error" and "secret" not in answer.text
        assert incident in caplog.text and "secret of ours" in caplog.text
        assert [(name, refusal.kind) for name, refusal in service.refusals] == [("/v1/models", Kind.INTERNAL)]

    run(act())


def test_pages_of_other_origins_call_only_where_they_are_let():
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}

    async def act():
        async with fronted(ScriptedService()) as world:
            answer = await world.client.get("/v1/models", headers={"origin": "https://a.example"})
            assert "access-control-allow-origin" not in answer.headers
            error_of(await world.client.options("/v1/models", headers=preflight), 405)
        async with fronted(ScriptedService(), allowed_origins=("https://a.example",)) as world:
            answer = await world.client.options("/v1/models", headers=preflight)
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            asked = preflight | {"access-control-request-method": "DELETE"}
            assert (await world.client.options("/v1/files/a", headers=asked)).status_code == 200
            answer = await world.client.get("/v1/models", headers={"origin": "https://b.example"})
            assert "access-control-allow-origin" not in answer.headers

    run(act())


def test_connections_are_encrypted_and_clients_known_where_that_is_asked_for(tmp_path):
    made = made_certificates(tmp_path)
    tls = TlsSettings(made["server.pem"], made["server.key"], made["ca.pem"])

    async def act():
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        async with fronted(ScriptedService(), tls=tls) as world:
            url = f"https://localhost:{world.front.port}"
            async with httpx.AsyncClient(base_url=url, verify=context) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get("/health")
            context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
            async with httpx.AsyncClient(base_url=url, verify=context) as known:
                assert (await known.get("/health")).status_code == 200
            with pytest.raises(httpx.TransportError):
                await world.client.get("/health")

    run(act())
    for certificate, key in (("nonsense", "server.key"), ("server.pem", "nonsense"), ("server.pem", "client.key")):
        wrong = TlsSettings(made.get(certificate, b"nonsense"), made.get(key, b"nonsense"))
        desk = Desk(ScriptedService(), Lifecycle(), HttpSettings(port=0, tls=wrong))
        with pytest.raises(ConfigError, match="TLS"):
            run(make_http_server(desk).start())


def test_a_port_that_is_taken_is_told():
    async def act():
        async with fronted(ScriptedService()) as world:
            settings = HttpSettings(port=world.front.port)
            with pytest.raises(ConfigError, match=f"http_port={world.front.port}"):
                await make_http_server(Desk(ScriptedService(), Lifecycle(), settings)).start()

    run(act())


def test_tokens_do_not_wait_for_the_client_to_acknowledge_those_before():
    async def act():
        async with fronted(ScriptedService()) as world:
            await world.client.get("/health")
            [connection] = world.front._connections._open
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(act())


def test_stopping_before_starting_and_twice_is_nothing():
    async def act():
        front = make_http_server(Desk(ScriptedService(), Lifecycle(), HttpSettings(port=0)))
        await front.stop()
        front = make_http_server(Desk(ScriptedService(), Lifecycle(), HttpSettings(port=0)))
        await front.start()
        await front.drain(1.0)
        await front.stop()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", front.port)

    run(act())


def test_too_many_connections_are_turned_away_with_an_error_object():
    async def act():
        async with fronted(ScriptedService(), max_connections=1) as world:
            await world.client.get("/health")
            async with httpx.AsyncClient(base_url=world.base_url) as other:
                answer = await other.get("/health")
                assert error_of(answer, 503) and answer.headers["retry-after"] == "1"

    run(act())


def test_silent_connections_are_cut_off():
    async def act():
        async with fronted(ScriptedService(), head_s=0.05) as world:
            for sent in (b"", b"GET / HT", b"GET /health HTTP/1.1\r\nhost: a\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", world.front.port)
                writer.write(sent)
                assert await _end(reader) == b""
                writer.close()

    run(act())


async def _end(reader):
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_an_error_of_the_service_keeps_its_headers():
    class Full(ScriptedService):
        def authenticate(self, token, peer):
            raise ServiceError(Kind.EXHAUSTED, "come again in 1.2 s.", retry_after_s=1.2)

    async def act():
        async with fronted(Full()) as world:
            answer = await world.client.get("/v1/models")
            assert error_of(answer, 429)["code"] == "rate_limit_exceeded"
            assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1200")
            assert json.loads(answer.content) and answer.headers["cache-control"] == "no-store"

    run(act())
