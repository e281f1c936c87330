# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import jsonschema
import pytest
from starlette.testclient import TestClient

from metrale_jax.engine.stats import EngineStats
from metrale_jax.speculative.policy import DraftStats
from serving.core.calls import Caller
from serving.core.lifecycle import Lifecycle, State
from serving.http.app import make_app
from serving.http.desk import Desk
from serving.http.settings import HttpSettings
from serving.http.stats import NO_ENGINE, Looks, figures
from tests.serving.scripted import CARD, ScriptedService

NOW = EngineStats(
    num_waiting=2,
    num_prefilling=1,
    num_running=3,
    used_blocks=20,
    cached_blocks=30,
    free_blocks=50,
    prompt_tokens=400,
    cached_tokens=100,
    generated_tokens=1000,
    num_steps=70,
    num_preemptions=0,
    num_compiles=5,
    num_unreported=0,
    plan_s=1.0,
    launch_s=1.0,
    read_s=1.0,
    uptime_s=100.0,
    recent_tokens_per_s=41.5,
    finished=(("stop", 4),),
)
DRAFTS = DraftStats(3, 1, (), (), (), ((10, 9), (10, 6), (0, 0)), 0, 0, 1.0)


def served(service=None, **of_desk) -> tuple[TestClient, Lifecycle]:
    lifecycle = Lifecycle()
    desk = Desk(service or ScriptedService(), lifecycle, HttpSettings(), version="1.2.3", **of_desk)
    return TestClient(make_app(desk)), lifecycle


def test_the_figures_of_a_server_that_serves():
    client, lifecycle = served(stats=lambda: NOW)
    lifecycle.move(State.SERVING)
    said = client.get("/v1/stats").json()
    assert (said["object"], said["state"], said["version"], said["loading"]) == ("stats", "serving", "1.2.3", None)
    assert (said["model"]["id"], said["model"]["fingerprint"]) == (CARD.id, CARD.fingerprint)
    assert said["requests"] == {"waiting": 2, "prefilling": 1, "running": 3, "max": CARD.max_sequences}
    assert said["kv_blocks"] == {"used": 20, "cached": 30, "free": 50, "total": 100}
    assert (said["generated_tokens_per_s"], said["prompt_tokens_per_s"]) == (41.5, None)
    assert (said["prefix_hit_rate"], said["recent_prefix_hit_rate"]) == (0.25, None)
    assert said["snapshots"] is said["drafts"] is None


def test_who_waits_for_a_turn_in_the_engine_waits_too():
    client, _ = served(stats=lambda: NOW, waiting=lambda: 5)
    assert client.get("/v1/stats").json()["requests"]["waiting"] == 7


def test_a_server_that_loads_has_a_state_and_how_far_it_is():
    service = ScriptedService()
    service.cards = ()
    client, _ = served(service, loading=lambda: {"stage": "load", "done": 1, "total": 2})
    said = client.get("/v1/stats").json()
    assert (said["state"], said["model"]) == ("loading", None)
    assert said["loading"] == {"stage": "load", "done": 1, "total": 2}
    assert {name: said[name] for name in NO_ENGINE} == NO_ENGINE


def test_the_same_fields_are_there_with_an_engine_and_without():
    assert figures(NOW, None, 8).keys() == NO_ENGINE.keys()


@pytest.mark.parametrize("now", [None, NOW, replace(NOW, num_snapshots=8, drafts=DRAFTS)], ids=["none", "plain", "all"])
def test_what_is_told_is_as_described(now):
    client, _ = served(stats=lambda: now, loading=lambda: {"stage": "load", "done": 1, "total": 2})
    answers = client.get("/openapi.json").json()["paths"]["/v1/stats"]["get"]["responses"]
    schema = answers["200"]["content"]["application/json"]["schema"]
    said = client.get("/v1/stats").json()
    jsonschema.validate(said, schema, jsonschema.Draft202012Validator)
    assert said.keys() == schema["properties"].keys()


def test_figures_are_for_callers():
    client, _ = served(ScriptedService(keys={"secret": Caller("one")}))
    assert client.get("/v1/stats").status_code == 401
    assert client.get("/v1/stats", headers={"authorization": "Bearer secret"}).status_code == 200


def test_rates_are_of_what_came_between_two_looks():
    later = replace(NOW, uptime_s=104.0, prompt_tokens=480, cached_tokens=160)
    said = figures(later, NOW, 8)
    assert said["prompt_tokens_per_s"] == 20.0
    assert (said["prefix_hit_rate"], said["recent_prefix_hit_rate"]) == (round(160 / 480, 6), 0.75)


def test_snapshots_and_drafts_are_there_where_a_model_has_them():
    now = replace(NOW, num_snapshots=8, used_snapshots=2, drafts=DRAFTS)
    said = figures(now, None, 8)
    assert said["snapshots"] == {"used": 2, "total": 8}
    assert said["drafts"] == {
        "width": 3,
        "acceptance": 0.75,
        "recent_acceptance": None,
        "positions": [0.9, 0.6, None],
    }
    more = replace(now, uptime_s=105.0, drafts=replace(DRAFTS, positions=((14, 10), (14, 7), (0, 0))))
    assert figures(more, now, 8)["drafts"]["recent_acceptance"] == 0.25


@pytest.mark.parametrize("every_s, reach_s", [(1.0, 10.0), (0.25, 10.0), (4.0, 8.0)], ids=["1s", "quarter", "4s"])
def test_the_oldest_look_of_the_last_seconds_is_gone_back_to(every_s, reach_s):
    looks = Looks()
    assert looks.before(NOW) is None
    for at in range(1, 100):
        now = replace(NOW, uptime_s=NOW.uptime_s + at * every_s)
        before = looks.before(now)
    assert reach_s - 1.0 <= now.uptime_s - before.uptime_s <= reach_s


def test_after_a_pause_and_with_another_engine_looks_begin_anew():
    looks = Looks()
    looks.before(NOW)
    assert looks.before(replace(NOW, uptime_s=150.0)) is None
    assert looks.before(replace(NOW, uptime_s=1.0)) is None
    assert looks.before(replace(NOW, uptime_s=3.0)).uptime_s == 1.0
