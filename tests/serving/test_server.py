# SPDX-License-Identifier: Apache-2.0
"""The server from its first line to its last, in this process, over a model that does as it is told."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from contextlib import closing

import httpx
import pytest

import metrale_jax.llm
from metrale_jax.core.errors import ConfigError
from serving.client import Client, RetryPolicy, UnauthenticatedError, UnavailableError
from serving.core.lifecycle import State
from serving.server import DEAD, serve
from serving.settings_sources import resolve
from tests.serving.core.fake_llm import FakeLLM
from tests.serving.test_metrics import STATS

NO_RETRIES = RetryPolicy(max_attempts=1)
ENDLESS = 1 << 20
DEADLINE_S = 30
ALICE, BOB = "alice-0123456789-secret", "bob-0123456789-secret"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Driver:
    """What a test does to the server while that has the main thread."""

    def __init__(self):
        self.port, self.side_port, self.http_port = free_port(), free_port(), free_port()
        self.ended, self.error = threading.Event(), None

    def client(self, **options):
        return Client(f"127.0.0.1:{self.port}", retries=NO_RETRIES, timeout_s=DEADLINE_S, **options)

    def kill(self, number=signal.SIGTERM):
        os.kill(os.getpid(), number)

    def admin(self, what, token, **body):
        with closing(http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=DEADLINE_S)) as connection:
            headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
            connection.request("POST", f"/v1/admin/{what}", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def page(self, path):
        with closing(http.client.HTTPConnection("127.0.0.1", self.side_port, timeout=DEADLINE_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def state(self):
        return json.loads(self.page("/health")[1])["state"]

    def until(self, true):
        ends_at_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends_at_s:
            try:
                if true():
                    return
            except ConnectionError:
                pass
            time.sleep(0.005)
        raise AssertionError("it never came to pass")

    def until_state(self, state):
        self.until(lambda: self.state() == state.value)


@pytest.fixture
def served(monkeypatch, capfd):
    """Runs the server over `llm`, what that makes of a name, or what it raises, while `act(driver)` drives it; its
    ending, and its log."""

    def run(act, llm, **settings):
        driver = Driver()

        def load(source, **options):
            made = llm(source) if callable(llm) else llm
            if isinstance(made, Exception):
                raise made
            made.stats = lambda: STATS
            return made

        monkeypatch.setattr(metrale_jax.llm, "LLM", load)
        flags = {"grpc_port": driver.port, "side_port": driver.side_port, "served_name": "fake"} | settings
        if flags.get("http_port") == 0:
            flags["http_port"] = driver.http_port

        def drive():
            try:
                act(driver)
            except BaseException as error:
                driver.error = error
                while not driver.ended.is_set():
                    driver.kill()
                    driver.ended.wait(1)

        thread = threading.Thread(target=drive)
        thread.start()
        try:
            ending = serve(resolve(flags, {}, {}), "none", "grpc")
        finally:
            driver.ended.set()
            thread.join()
            if driver.error is not None:
                raise driver.error
        return ending, [json.loads(line) for line in capfd.readouterr().err.splitlines()]

    return run


def test_told_to_stop_it_lets_calls_end_takes_no_others_and_leaves_a_line_of_each(served):
    goes = threading.Event()
    llm = FakeLLM(on_step=lambda: llm.num_steps < 3 or goes.wait(DEADLINE_S))

    def act(driver):
        driver.until_state(State.SERVING)
        with driver.client() as client:
            assert client.health() == "SERVING" and driver.page("/ready")[0] == 200
            with client.stream("secret words", max_tokens=50) as stream:
                pieces = [next(stream)]
                driver.kill()
                driver.until_state(State.DRAINING)
                assert driver.page("/ready")[0] == 503
                with pytest.raises(UnavailableError), driver.client() as late:
                    late.generate("b", max_tokens=1)
                goes.set()
                pieces += list(stream)
            assert sum(len(piece.token_ids) for piece in pieces) == 50

    ending, log = served(act, llm)
    assert (ending.status, ending.clean) == (0, True) and llm.num_spilled == 1
    events = [line["event"] for line in log]
    assert events[0] == "listening" and events[-1] == "stopped" and events.count("call") >= 1
    states = [line["state"] for line in log if line["event"] == "state"]
    assert states == ["warming", "serving", "draining", "stopped"]
    (call,) = (line for line in log if line["event"] == "call" and line["outcome"] == "ok")
    assert (call["generated_tokens"], call["finish_reasons"]) == (50, ["length"])
    assert "secret words" not in json.dumps(log)


def test_two_fronts_stand_before_one_engine_and_end_together(served):
    stops, goes = threading.Event(), threading.Event()
    llm = FakeLLM(on_step=lambda: goes.wait(DEADLINE_S if stops.is_set() else 0.005))
    asked = {"model": "fake", "prompt": "secret words", "max_tokens": 1000}

    def act(driver):
        driver.until_state(State.SERVING)
        web = httpx.Client(base_url=f"http://127.0.0.1:{driver.http_port}", timeout=DEADLINE_S)
        with web, driver.client() as client:
            assert web.get("/ready").status_code == 200 and "metrale_server_state" in web.get("/metrics").text
            assert web.get("/v1/models").json()["data"][0]["id"] == "fake"
            with (
                web.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer,
                client.stream("secret words", max_tokens=1000) as stream,
            ):
                lines = answer.iter_lines()
                first, pieces = next(lines), [next(stream)]
                stops.set()
                driver.kill()
                driver.until_state(State.DRAINING)
                goes.set()
                rest, pieces = [first, *lines], [*pieces, *stream]
            assert answer.status_code == 200 and "data: [DONE]" in rest
            assert sum(len(piece.token_ids) for piece in pieces) == 1000
            with pytest.raises(httpx.ConnectError):
                web.get("/health")

    ending, log = served(act, llm, http_port=0)
    assert (ending.status, ending.clean) == (0, True)
    assert log[0]["http"].startswith("127.0.0.1:") and log[0]["grpc"]
    calls = {line["method"]: line["outcome"] for line in log if line["event"] == "call"}
    assert calls["/v1/completions"] == calls["Generate"] == "ok"
    assert "secret words" not in json.dumps(log)


def test_what_is_left_after_the_grace_is_told_that_the_server_shuts_down(served):
    def act(driver):
        driver.until_state(State.SERVING)
        with driver.client() as client, client.stream("a", max_tokens=ENDLESS) as stream:
            next(stream)
            driver.kill()
            with pytest.raises(UnavailableError, match="shutting down"):
                list(stream)

    ending, log = served(act, FakeLLM(on_step=lambda: time.sleep(0.001)), grace_s=0.2)
    assert (ending.status, ending.clean) == (0, True)
    assert [line["calls_ended"] for line in log if line["event"] == "drained"] == [1]


def test_a_second_signal_stops_it_at_once(served):
    def act(driver):
        driver.until_state(State.SERVING)
        with driver.client() as client, client.stream("a", max_tokens=ENDLESS) as stream:
            next(stream)
            driver.kill(signal.SIGINT)
            driver.until_state(State.DRAINING)
            driver.kill(signal.SIGTERM)
            with pytest.raises(UnavailableError):
                list(stream)

    began_s = time.monotonic()
    ending, log = served(act, FakeLLM(on_step=lambda: time.sleep(0.001)), grace_s=100.0)
    assert ending.status == 128 + signal.SIGTERM and time.monotonic() - began_s < DEADLINE_S
    assert [line["name"] for line in log if line["event"] == "signal"] == ["SIGINT", "SIGTERM"]


def test_an_engine_that_hangs_ends_it_with_70_and_the_calls_are_told(served):
    goes = threading.Event()

    def act(driver):
        driver.until_state(State.SERVING)
        with driver.client() as client, pytest.raises(UnavailableError, match="step"):
            client.generate("a", max_tokens=3)

    try:
        ending, log = served(act, FakeLLM(on_step=lambda: goes.wait(DEADLINE_S)), stuck_after_s=0.2)
    finally:
        goes.set()
    assert (ending.status, ending.clean) == (DEAD, False)
    (failed,) = (line for line in log if line.get("state") == "failed")
    assert failed["level"] == "error" and "0.2 s" in failed["reason"]


def test_while_it_loads_it_says_so_and_can_be_stopped(served):
    goes = threading.Event()
    llm = FakeLLM()
    llm.warm_up = lambda: goes.wait(DEADLINE_S)

    def act(driver):
        driver.until_state(State.WARMING)
        assert driver.page("/health")[0] == 200 and driver.page("/ready")[0] == 503
        status, text = driver.page("/metrics")
        assert status == 200 and 'metrale_server_state{state="warming"} 1.0' in text
        with driver.client() as client:
            assert client.health() == "NOT_SERVING"
            with pytest.raises(UnavailableError):
                client.generate("a", max_tokens=1)
        driver.kill()

    try:
        ending, _ = served(act, llm)
    finally:
        goes.set()
    assert ending.status == 0


def test_keys_are_read_again_at_a_hangup_and_counted_by_name(served, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "alice"\ntoken = "{ALICE}"\n')
    path.chmod(0o600)

    def let_in(driver, token):
        with driver.client(token=token) as client:
            try:
                return client.generate("a", max_tokens=2).finish_reason
            except UnauthenticatedError:
                return ""

    def act(driver):
        driver.until_state(State.SERVING)
        assert let_in(driver, ALICE) == "length" and not let_in(driver, BOB) and not let_in(driver, None)
        text = driver.page("/metrics")[1]
        assert 'metrale_key_tokens_total{key="alice",kind="generated"} 2.0' in text
        assert "metrale_steps_total 9.0" in text, "the engine's own figures"
        path.write_text("[[keys]]\n")
        driver.kill(signal.SIGHUP)
        path_read = [let_in(driver, ALICE)]
        assert path_read == ["length"], "a mistake changes nothing"
        path.write_text(f'[[keys]]\nid = "bob"\ntoken = "{BOB}"\n')
        driver.kill(signal.SIGHUP)
        driver.until(lambda: let_in(driver, BOB))
        assert not let_in(driver, ALICE)
        driver.kill()

    ending, log = served(act, FakeLLM(), key_file=path)
    assert ending.status == 0
    assert [line["event"] for line in log if line["event"].startswith("keys_")] == ["keys_kept", "keys_read"]
    assert ALICE not in json.dumps(log) and BOB not in json.dumps(log)


def test_an_admin_changes_the_model_while_the_server_listens(served, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nid = "alice"\ntoken = "{ALICE}"\nadmin = true\n[[keys]]\nid = "bob"\ntoken = "{BOB}"\n')
    path.chmod(0o600)
    sources = []

    def make(source):
        sources.append(source)
        return ConfigError("no such weights; mend them.") if source == "/models/broken" else FakeLLM()

    def act(driver):
        driver.until_state(State.SERVING)
        assert driver.admin("load", BOB, model="two")[0] == 403
        assert driver.admin("load", ALICE, model="/models/two")[0] == 403
        status, answer = driver.admin("load", ALICE, model="broken")
        assert status == 400 and "no such weights" in answer["error"]["message"]
        with driver.client(token=BOB) as client:
            assert client.generate("a", max_tokens=1).finish_reason == "length"
        status, answer = driver.admin("load", ALICE, model="two")
        assert status == 200 and answer["model"]["id"] == "two"
        driver.until(
            lambda: 'metrale_model_changes_total{action="retire",outcome="ok"} 1.0' in driver.page("/metrics")[1]
        )
        text = driver.page("/metrics")[1]
        assert "metrale_steps_total 18.0" in text, "those of both engines"
        assert "metrale_requests_running 3.0" in text, "those of the new one"
        assert driver.admin("unload", ALICE)[0] == 200
        assert driver.page("/ready")[0] == 503 and driver.page("/health")[0] == 200
        driver.until(lambda: "metrale_requests_running" not in driver.page("/metrics")[1])
        assert "metrale_steps_total 18.0" in driver.page("/metrics")[1]
        driver.kill()

    ending, log = served(
        act,
        make,
        model="/models/one",
        key_file=path,
        http_port=0,
        allow_model_changes=True,
        allowed_models="two=/models/two,broken=/models/broken",
    )
    assert (ending.status, ending.clean) == (0, True) and sources == ["/models/one", "/models/broken", "/models/two"]
    told = [(line["action"], line["model"], line["key"], line["outcome"]) for line in log if line["event"] == "model"]
    assert told == [
        ("load", "fake", "", "ok"),
        ("load", "two", "bob", "forbidden"),
        ("load", "/models/two", "alice", "forbidden"),
        ("load", "broken", "alice", "invalid"),
        ("load", "two", "alice", "ok"),
        ("retire", "fake", "", "ok"),
        ("retire", "two", "", "ok"),
        ("unload", "two", "alice", "ok"),
    ]
    assert [line["state"] for line in log if line["event"] == "state"][-3:] == ["unloaded", "draining", "stopped"]


def test_a_model_that_cannot_be_loaded_is_a_mistake(served):
    with pytest.raises(ConfigError, match="no such model"):
        served(lambda driver: None, ConfigError("no such model"))


@pytest.mark.parametrize("name", ["grpc_port", "http_port", "side_port"])
def test_a_port_that_is_taken_is_a_mistake(name, served):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ConfigError, match=str(holder.getsockname()[1])):
            served(lambda driver: None, FakeLLM(), **{name: holder.getsockname()[1]})


def test_files_that_are_not_there_are_mistakes(served, tmp_path):
    for settings in (
        {"key_file": tmp_path / "none"},
        {"tls_certificate": tmp_path / "none", "tls_key": tmp_path / "none"},
    ):
        with pytest.raises(ConfigError, match="none"):
            served(lambda driver: None, FakeLLM(), **settings)
