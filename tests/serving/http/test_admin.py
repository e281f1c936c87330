# SPDX-License-Identifier: Apache-2.0
"""/v1/admin hands on who asks for what, says what came of it, and tells how far it is."""

import asyncio
from dataclasses import replace

import pytest

from serving.core.calls import Caller, LoadCall, UnloadCall
from serving.core.changes import ChangeStatus, Stage
from serving.core.errors import Kind, ServiceError
from tests.serving.http.fronts import error_of, events_of, fronted, run
from tests.serving.scripted import STATUS, ScriptedService

CHANGE = ChangeStatus("load", "m", "root", "loading", (Stage("load", 1, 4),), 1.5, 2.0, 0, "", "")
UNDER_WAY = replace(STATUS, change=CHANGE)


def test_a_load_is_handed_on_and_answered_with_how_things_stand():
    async def check():
        service = ScriptedService(keys={"secret": Caller("root", admin=True)})
        async with fronted(service) as world:
            body = {
                "model": "m",
                "served_name": "n",
                "options": {"max_sequences": 2},
                "drain_first": False,
                "grace_s": 1.5,
            }
            headers = {"authorization": "Bearer secret"}
            answer = await world.client.post("/v1/admin/load", json=body, headers=headers)
            assert answer.status_code == 200 and answer.json()["state"] == "serving"
            assert answer.json()["model"]["id"] == "scripted" and answer.json()["change"] is None
            [(method, call, caller)] = service.asked
            assert (method, call) == ("load_model", LoadCall("m", "n", {"max_sequences": 2}, False, 1.5))
            assert (caller.key_id, caller.admin) == ("root", True)
            error_of(await world.client.post("/v1/admin/load", json=body), 401)

    run(check())


def test_an_unload_and_the_status_are_too():
    async def check():
        service = ScriptedService()
        async with fronted(service) as world:
            assert (await world.client.post("/v1/admin/unload", json={"grace_s": 0})).status_code == 200
            assert (await world.client.get("/v1/admin/status")).json()["loadable"] == ["scripted"]
            assert [(method, call) for method, call, _ in service.asked] == [
                ("unload_model", UnloadCall(0.0)),
                ("model_status", None),
            ]

    run(check())


def test_who_does_not_wait_is_told_that_it_has_begun():
    async def check():
        service = ScriptedService()
        service.statuses, service.changing = (UNDER_WAY,), asyncio.Event()
        async with fronted(service) as world:
            answer = await world.client.post("/v1/admin/load", json={"wait": False})
            assert answer.status_code == 202
            change = answer.json()["change"]
            assert change["stages"] == [{"name": "load", "done": 1, "total": 4}] and change["step"] == "loading"
            headers = {"x-request-timeout": "0.05"}
            late = await world.client.post("/v1/admin/load", json={}, headers=headers)
            assert "goes on" in error_of(late, 408)["message"]

    run(check())


@pytest.mark.parametrize("path", ["/v1/admin/load", "/v1/admin/unload"])
def test_progress_comes_as_events(path):
    async def check():
        service = ScriptedService()
        service.statuses, service.changing = (UNDER_WAY, STATUS), asyncio.Event()
        async with fronted(service) as world:
            answer = await world.client.post(path, json={"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = [part for part in answer.text.split("\n\n") if part]
            assert [part.partition("\n")[0] for part in parts[:-1]] == ["event: status"] * 2
            assert events_of(answer.text.replace("event: status\n", ""))[-1] == "[DONE]"
            watched = await world.client.get("/v1/admin/status?stream=true")
            assert watched.text == answer.text

    run(check())


@pytest.mark.parametrize(
    "kind, status", [(Kind.FORBIDDEN, 403), (Kind.CONFLICT, 409), (Kind.INVALID, 400), (Kind.INTERNAL, 500)]
)
@pytest.mark.parametrize("how", [{}, {"wait": False}, {"stream": True}])
def test_what_is_refused_has_a_status_however_it_was_asked_for(kind, status, how):
    async def check():
        service = ScriptedService()
        service.failure = ServiceError(kind, "It is so; do otherwise.", field="model")
        async with fronted(service) as world:
            for path in ("/v1/admin/load", "/v1/admin/unload"):
                answer = await world.client.post(path, json=how)
                assert error_of(answer, status)["message"] == "It is so; do otherwise."
            assert error_of(await world.client.get("/v1/admin/status?stream=true"), status)

    run(check())


@pytest.mark.parametrize(
    "body, field",
    [
        ({"model": 1}, "model"),
        ({"served_name": []}, "served_name"),
        ({"options": "a"}, "options"),
        ({"options": []}, "options"),
        ({"drain_first": "yes"}, "drain_first"),
        ({"grace_s": -1}, "grace_s"),
        ({"grace_s": True}, "grace_s"),
        ({"grace_s": 1e9}, "grace_s"),
        ({"wait": 1}, "wait"),
        ({"stream": "no"}, "stream"),
        ({"path": "/etc/passwd"}, "path"),
    ],
)
def test_bodies_that_are_wrong_reach_nobody(body, field):
    async def check():
        service = ScriptedService()
        async with fronted(service) as world:
            assert error_of(await world.client.post("/v1/admin/load", json=body), 400)["param"] == field
            assert not service.asked

    run(check())


def test_a_page_of_another_site_cannot_have_it_done():
    async def check():
        service = ScriptedService()
        async with fronted(service) as world:
            headers = {"content-type": "text/plain", "origin": "http://evil.example"}
            assert (await world.client.post("/v1/admin/unload", content="{}", headers=headers)).status_code == 415
            assert not service.asked

    run(check())
