# SPDX-License-Identifier: Apache-2.0
"""Batches over HTTP, with OpenAI's own client: from a file of requests to files of answers."""

import asyncio
import json

import openai
import pytest

from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from serving.core.lifecycle import Lifecycle, State
from serving.http.batch_work import BatchWork
from tests.serving.http.batch_fronts import CHAT, RESPONSES, TEXT, Clock, chat, jsonl, keeping, text
from tests.serving.http.fronts import error_of, fronted, run
from tests.serving.scripted import CARD, ScriptedService

KEYS = {"alice-token": Caller(key_id="alice", salt="a"), "bob-token": Caller(key_id="bob", salt="b")}


def test_a_batch_goes_from_a_file_to_files(tmp_path):
    async def act():
        service = ScriptedService()
        async with keeping(tmp_path, service) as kept:
            lines = [chat(f"c{n}", f"say {n}") for n in range(50)]
            lines[7]["body"]["temperature"] = -3
            begun = await kept.begun(lines)
            assert (begun.object, begun.status, begun.endpoint) == ("batch", "validating", CHAT)
            assert begun.metadata == {"of": "a test"} and begun.expires_at == begun.created_at + 24 * 3600
            done = await kept.ended(begun)
            assert done.status == "completed" and done.errors is None and done.model == "scripted"
            counts = done.request_counts
            assert (counts.total, counts.completed, counts.failed) == (50, 49, 1)
            assert begun.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
            answers, errors = await kept.records(done.output_file_id), await kept.records(done.error_file_id)
            assert set(answers) == {f"c{n}" for n in range(50)} - {"c7"}
            for n in set(range(50)) - {7}:
                response = answers[f"c{n}"]["response"]
                assert response["status_code"] == 200 and answers[f"c{n}"]["error"] is None
                assert response["body"]["choices"][0]["message"]["content"] == f"user:say {n}\n"
            assert errors["c7"]["response"]["status_code"] == 400
            assert errors["c7"]["response"]["body"]["error"]["param"] == "temperature"
            assert all(call.info.background and call.params.priority > 0 for _, call, _ in service.asked)
            assert len({call.params.seed for _, call, _ in service.asked}) == 49
            error_of(await kept.world.client.post(f"/v1/batches/{done.id}/cancel"), 409)
            output = await kept.openai.files.retrieve(done.output_file_id)
            assert output.purpose == "batch_output" and output.filename.endswith("_output.jsonl")
            assert [one.id async for one in kept.openai.batches.list()] == [begun.id]

    run(act())


def test_texts_and_vectors_come_in_batches_too(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            done = await kept.ended(await kept.begun([text("a", "abc", n=2, seed=5)], TEXT))
            answer = (await kept.records(done.output_file_id))["a"]["response"]["body"]
            assert [one["text"] for one in answer["choices"]] == ["abc", "abc"] and done.model == "scripted"
            line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["ab", "c"]}}
            done = await kept.ended(await kept.begun([line], "/v1/embeddings"))
            answer = (await kept.records(done.output_file_id))["e"]["response"]["body"]
            assert [len(one["embedding"]) for one in answer["data"]] == [4, 4]
            bodies = {"r": {"input": "hi"}, "g": {"input": "hi", "previous_response_id": "resp_x"}}
            lines = [{"custom_id": name, "method": "POST", "url": RESPONSES, "body": bodies[name]} for name in bodies]
            done = await kept.ended(await kept.begun(lines, RESPONSES))
            answer = (await kept.records(done.output_file_id))["r"]["response"]["body"]
            assert answer["output"][0]["content"][0]["text"] == "user:hi\n" and answer["store"] is False
            assert (await kept.records(done.error_file_id))["g"]["response"]["status_code"] == 404
            params = kept.world.service.asked[-1][1].params
            assert params.seed is not None and params.priority > 0

    run(act())


BAD = [
    (b'{"torn"', "invalid_json_line", "no JSON"),
    (b"[1]", "invalid_json_line", "no object"),
    (chat("c0", "again"), "duplicate_custom_id", "taken by line 1"),
    (text("t", "a"), "invalid_request", "/v1/completions"),
    ({**chat("m", "a"), "method": "GET"}, "invalid_request", "GET"),
    ({**chat("x", "a"), "x": 1}, "invalid_request", "x is no field"),
    ({"custom_id": "b", "url": CHAT, "body": 3}, "invalid_request", "body"),
    ({"url": CHAT, "body": {}}, "invalid_request", "custom_id=None"),
    ({"custom_id": "p", "prompt": "a"}, "invalid_request", "custom_id, method"),
    (chat("s", "a", stream=True), "invalid_request", "stream"),
    (chat("o", "a", model="other"), "mismatched_model", "line 1"),
    (chat("n", "a", model=3), "invalid_request", "model=3"),
]


def test_a_file_with_bad_lines_fails_with_each_of_them_listed_and_nothing_is_answered(tmp_path):
    async def act():
        service = ScriptedService()
        async with keeping(tmp_path, service) as kept:
            done = await kept.ended(
                await kept.begun([chat("c0", "a"), b"", *(line for line, _, _ in BAD), chat("z", "")])
            )
            assert done.status == "failed" and done.failed_at and done.in_progress_at is None
            assert [(one.line, one.code) for one in done.errors.data] == [
                (number, code) for number, (_, code, _) in enumerate(BAD, start=3)
            ]
            for error, (_, _, words) in zip(done.errors.data, BAD, strict=True):
                assert words in error.message
            assert not service.asked and done.output_file_id is None and done.error_file_id is None

    run(act())


@pytest.mark.parametrize(
    "lines, code",
    [
        ([], "empty_file"),
        ([b"", b""], "empty_file"),
        ([chat(f"{n}", "a") for n in range(21)], "too_many_requests"),
        ([chat("a", "b", model="none")], "model_not_found"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_fails(tmp_path, lines, code):
    async def act():
        async with keeping(tmp_path, ScriptedService(), max_lines=20) as kept:
            done = await kept.ended(await kept.begun(lines))
            assert done.status == "failed" and [one.code for one in done.errors.data] == [code]

    run(act())


def test_what_is_wrong_with_a_call_is_told_by_its_field(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            file = await kept.upload([chat("a", "b")])
            good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            for field, values in {
                "input_file_id": ("file-none", "../x", 3, None),
                "endpoint": ("/v1/tokenize", "/v1/batches", ["a"], None),
                "completion_window": ("0h", "31d", "soon", 24, None),
                "metadata": ([], {"a": 1}, {"a" * 65: ""}, {"a": "b" * 513}, {str(n): "" for n in range(17)}),
                "output_expires_after": (3,),
                "strange": (1,),
            }.items():
                for value in values:
                    answer = await kept.world.client.post("/v1/batches", json=good | {field: value})
                    error = error_of(answer, 404 if value in ("file-none", "../x") else 400)
                    assert error["param"] == field, error
            for path in ("?limit=0", "?limit=x", "?after=batch_none", "?strange=1"):
                error_of(await kept.world.client.get(f"/v1/batches{path}"), 400)
            for path in ("batch_none", "..%2f..%2flock", file.id):
                error_of(await kept.world.client.get(f"/v1/batches/{path}"), 404)
                error_of(await kept.world.client.post(f"/v1/batches/{path}/cancel"), 404)

    run(act())


def test_lists_come_in_pages_the_newest_first(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            made = [(await kept.begun([chat("a", "b")])).id for _ in range(5)]
            first = await kept.openai.batches.list(limit=2)
            assert [one.id for one in first.data] == made[:2:-1] and first.has_more
            assert [one.id async for one in kept.openai.batches.list(limit=2)] == made[::-1]

    run(act())


def test_cancelled_it_keeps_what_it_has_and_names_the_rest(tmp_path):
    async def act():
        gate = asyncio.Event()
        service, lifecycle = ScriptedService(), Lifecycle()
        async with keeping(tmp_path, service, lifecycle) as kept:
            batch = await kept.begun([chat(f"c{n}", f"{n:03}") for n in range(40)])
            service.scripts = {f"{batch.id}-{line}": (gate,) for line in range(11, 41)}
            lifecycle.move(State.SERVING)
            await service.until(lambda: len(service.running) == 8)
            while (batch := await kept.openai.batches.retrieve(batch.id)).request_counts.completed < 10:
                await asyncio.sleep(0.01)
            assert batch.status == "in_progress"
            error_of(await kept.world.client.delete(f"/v1/files/{batch.input_file_id}"), 409)
            told = [await kept.openai.batches.cancel(batch.id) for _ in range(2)]
            assert {one.status for one in told} <= {"cancelling", "cancelled"} and told[0].cancelling_at
            done = await kept.ended(told[0])
            assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("cancelled", 10, 30)
            assert not service.running and len(service.cancelled) == 8
            answers, errors = await kept.records(done.output_file_id), await kept.records(done.error_file_id)
            assert set(answers) | set(errors) == {f"c{n}" for n in range(40)}
            assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
            assert (await kept.openai.batches.cancel(done.id)).status == "cancelled"
            await kept.openai.files.delete(batch.input_file_id)

    run(act())


def test_cancelled_while_it_is_looked_through_it_ends_without_files(tmp_path):
    async def act():
        service = ScriptedService()
        async with keeping(tmp_path, service) as kept:
            batch = await kept.begun([chat(f"c{n}", "a") for n in range(5000)])
            told = await kept.openai.batches.cancel(batch.id)
            assert told.status in ("cancelling", "cancelled") and told.cancelling_at
            done = await kept.ended(told)
            assert (
                done.status == "cancelled"
                and done.in_progress_at is None
                and done.output_file_id is None
                and not service.asked
            )

    run(act())


def test_past_its_window_it_expires(tmp_path):
    async def act():
        clock, service = Clock(), ScriptedService((asyncio.Event(),))
        async with keeping(tmp_path, service, clock=clock) as kept:
            batch = await kept.begun([chat(f"c{n}", "a") for n in range(20)], window="1h")
            await service.until(lambda: service.running)
        clock.ahead_s = 3601
        async with keeping(tmp_path, service, clock=clock) as kept:
            done = await kept.ended(batch)
            assert done.status == "expired" and done.expired_at >= done.expires_at and done.output_file_id is None
            errors = await kept.records(done.error_file_id)
            assert len(errors) == 20 and {one["error"]["code"] for one in errors.values()} == {"batch_expired"}

    run(act())


def test_a_window_that_ends_while_it_waits_ends_it(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService(), Lifecycle()) as kept:
            done = await kept.ended(await kept.begun([chat("a", "b")], window="1s"))
            assert done.status == "expired" and done.request_counts.completed == 0

    run(act())


def test_it_waits_for_its_model_and_goes_on_with_it(tmp_path):
    async def act():
        service, lifecycle = ScriptedService(), Lifecycle()
        cards, service.cards = service.cards, ()
        async with keeping(tmp_path, service, lifecycle) as kept:
            batch = await kept.begun([chat("a", "b")])
            while batch.status == "validating":
                batch = await kept.openai.batches.retrieve(batch.id)
            lifecycle.move(State.SERVING)
            await asyncio.sleep(0.3)
            assert not service.asked
            service.script = (ServiceError(Kind.UNAVAILABLE, "the model goes."),)
            service.cards = cards
            await service.until(lambda: len(service.asked) == 1)
            service.script = (ServiceError(Kind.NOT_FOUND, "another is there.", field="model"),)
            await service.until(lambda: len(service.asked) == 2)
            service.script = None
            assert (await kept.ended(batch)).request_counts.completed == 1

    run(act())


def test_a_line_that_always_takes_too_long_is_given_up_and_one_that_breaks_is_told(tmp_path, caplog):
    async def act():
        service, lifecycle = ScriptedService(), Lifecycle()
        async with keeping(tmp_path, service, lifecycle) as kept:
            batch = await kept.begun([chat("late", "a"), chat("broken", "b"), chat("good", "c")])
            service.scripts[f"{batch.id}-1"] = (ServiceError(Kind.TOO_LATE, "too late."),)
            service.scripts[f"{batch.id}-2"] = (RuntimeError("secret of ours"),)
            lifecycle.move(State.SERVING)
            done = await kept.ended(batch)
            errors = await kept.records(done.error_file_id)
            assert {name: one["response"]["status_code"] for name, one in errors.items()} == {
                "late": 408,
                "broken": 500,
            }
            assert "secret" not in json.dumps(errors) and done.status == "completed"
        assert "secret of ours" in caplog.text

    run(act())


def test_stopped_it_goes_on_at_the_next_start_and_every_line_comes_once(tmp_path):
    async def act():
        gate = asyncio.Event()
        service, lifecycle = ScriptedService(), Lifecycle()
        async with keeping(tmp_path, service, lifecycle) as kept:
            batch = await kept.begun([chat(f"c{n}", f"{n:03}") for n in range(40)])
            service.scripts = {f"{batch.id}-{line}": (gate,) for line in range(21, 41)}
            lifecycle.move(State.SERVING)
            while (batch := await kept.openai.batches.retrieve(batch.id)).request_counts.completed < 20:
                await asyncio.sleep(0.01)
        again = ScriptedService()
        async with keeping(tmp_path, again) as kept:
            done = await kept.ended(await kept.openai.batches.retrieve(batch.id))
            assert done.status == "completed" and done.request_counts.completed == 40
            assert len(await kept.records(done.output_file_id)) == 40
        assert len(again.asked) == 20 and not service.running
        seeds = {call.info.request_id: call.params.seed for _, call, _ in (*service.asked, *again.asked)}
        assert all(seeds[call.info.request_id] == call.params.seed for _, call, _ in again.asked)

    run(act())


def test_a_server_that_stopped_while_it_cancelled_ends_that_first(tmp_path):
    async def act():
        service = ScriptedService((asyncio.Event(),))
        async with keeping(tmp_path, service) as kept:
            batch = await kept.begun([chat("a", "b")])
            await service.until(lambda: service.running)
            owner = kept.work.store.owner("")
            await kept.work.store.put(owner, owner.batches[batch.id].at("cancelling", 1))
            kept.work._is_stopping = True
        async with keeping(tmp_path, service) as kept:
            done = await kept.ended(batch)
            assert done.status == "cancelled" and done.request_counts.failed == 1

    run(act())


def test_a_batch_in_whose_midst_the_server_ends_again_and_again_is_not_taken_up_for_ever(tmp_path, monkeypatch):
    async def act():
        service = ScriptedService((asyncio.Event(),))
        for left in range(20):
            async with keeping(tmp_path, service) as kept:
                batch = await kept.openai.batches.retrieve(batch.id) if left else await kept.begun([chat("a", "b")])
                if batch.status == "failed":
                    break
                await service.until(lambda: service.running)
        assert left == 19 and batch.status == "in_progress", "it was left in order each time"
        monkeypatch.setattr(BatchWork, "stop", gone)
        num_left = 0
        while batch.status != "failed":
            async with keeping(tmp_path, service) as kept:
                while (batch := await kept.openai.batches.retrieve(batch.id)).status != "failed":
                    if service.running:
                        num_left += 1
                        break
                    await asyncio.sleep(0.01)
        assert batch.errors.data[0].code == "server_ended" and num_left == 10

    run(act(), 40)


async def gone(work):
    """A server that ends without leaving anything in order."""
    for task in [*work._runs.values(), work._sweeping]:
        task.cancel()
    await asyncio.sleep(0.02)


def test_a_disk_that_is_full_fails_the_batch_and_not_the_server(tmp_path, monkeypatch):
    async def act():
        service, lifecycle = ScriptedService(), Lifecycle()
        async with keeping(tmp_path, service, lifecycle) as kept:
            batch = await kept.begun([chat(f"c{n}", f"{n}") for n in range(30)])

            def no_room(descriptor, data):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr("serving.batch.jsonl.write_all", no_room)
            lifecycle.move(State.SERVING)
            done = await kept.ended(batch)
            (error,) = done.errors.data
            assert done.status == "failed" and error.code == "storage_failed" and "No space left" in error.message
            assert str(tmp_path) not in error.message
            monkeypatch.undo()
            assert (await kept.ended(await kept.begun([chat("a", "b")]))).status == "completed"

    run(act())


def test_a_key_that_may_store_no_more_fails_its_batch(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService(), max_owner_bytes=20_000) as kept:
            done = await kept.ended(await kept.begun([chat(f"c{n}", "x" * 100) for n in range(60)]))
            assert done.status == "failed" and done.errors.data[0].code == "storage_full"
            assert done.output_file_id and len(await kept.records(done.output_file_id)) == done.request_counts.completed

    run(act())


def test_batches_run_as_the_key_that_made_them_and_others_do_not_see_them(tmp_path):
    async def act():
        service = ScriptedService(keys=KEYS)
        async with keeping(tmp_path, service, token="alice-token") as kept:
            done = await kept.ended(await kept.begun([chat("a", "b")]))
            assert {(caller.key_id, caller.salt) for _, _, caller in service.asked} == {("alice", "a")}
            bob = {"authorization": "Bearer bob-token"}
            client = kept.world.client
            assert (await client.get("/v1/batches", headers=bob)).json()["data"] == []
            error_of(await client.get(f"/v1/batches/{done.id}", headers=bob), 404)
            error_of(await client.post(f"/v1/batches/{done.id}/cancel", headers=bob), 404)
            error_of(await client.get(f"/v1/files/{done.output_file_id}/content", headers=bob), 404)
            body = {"input_file_id": done.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
            error_of(await client.post("/v1/batches", json=body, headers=bob), 404)
            error_of(await client.get("/v1/batches"), 401)

    run(act())


def test_a_key_that_was_taken_away_ends_its_batch(tmp_path):
    async def act():
        service = ScriptedService(keys=KEYS)
        async with keeping(tmp_path, service, token="alice-token") as kept:
            shared = kept.work._shared

            def gone(key_id):
                raise ServiceError(Kind.UNAUTHENTICATED, "the key was taken back.")

            object.__setattr__(shared, "caller", gone)
            done = await kept.ended(await kept.begun([chat("a", "b")]))
            assert done.status == "failed" and done.errors.data[0].code == "key_revoked" and not service.asked

    run(act())


def test_there_is_a_bound_to_batches_under_way_and_to_those_that_are_kept(tmp_path):
    async def act():
        gate = asyncio.Event()
        service = ScriptedService((gate,))
        async with keeping(tmp_path, service, max_unfinished=2, max_batches=3) as kept:
            first, second = [await kept.begun([chat("a", "b")]) for _ in range(2)]
            with pytest.raises(openai.RateLimitError, match="2 batches"):
                await kept.begun([chat("a", "b")])
            service.script = None
            gate.set()
            for one in (first, second):
                await kept.ended(one)
            made = [await kept.ended(await kept.begun([chat("a", "b")])) for _ in range(2)]
            listed = [one.id async for one in kept.openai.batches.list()]
            assert listed == [made[1].id, made[0].id, second.id]

    run(act())


def test_what_is_old_is_swept_away_but_for_what_a_batch_reads(tmp_path):
    async def act():
        clock, gate = Clock(), asyncio.Event()
        service = ScriptedService((gate,))
        async with keeping(tmp_path, service, clock=clock, keep_s=7200) as kept:
            batch, spare = await kept.begun([chat("a", "b")]), await kept.upload([])
            await service.until(lambda: service.running)
            clock.ahead_s = 7300
            await kept.work.store.sweep()
            assert [one.id async for one in kept.openai.files.list()] == [batch.input_file_id]
            error_of(await kept.world.client.get(f"/v1/files/{spare.id}"), 404)
            gate.set()
            done = await kept.ended(batch)
            await kept.work.store.sweep()
            assert {one.id async for one in kept.openai.files.list()} == {done.output_file_id}
            clock.ahead_s = 30 * 86400
            await kept.work.store.sweep()
            assert not [one async for one in kept.openai.files.list()]
            assert not [one async for one in kept.openai.batches.list()]
            left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
            assert left == {"lock"}

    run(act())


def test_a_server_that_keeps_nothing_says_how_to_make_it_keep(tmp_path):
    async def act():
        async with fronted(ScriptedService()) as world:
            for path in ("/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"):
                assert "--data-dir" in error_of(await world.client.get(path), 404)["message"]
            for path in ("/v1/batches", "/v1/batches/a/cancel"):
                assert "--data-dir" in error_of(await world.client.post(path, json={}), 404)["message"]
            answer = await world.client.post("/v1/files", files={"file": ("a", jsonl([chat("a", "b")]))})
            assert "--data-dir" in error_of(answer, 404)["message"]

    run(act())


def test_a_hundred_thousand_lines_are_answered_while_others_are_served(tmp_path):
    async def act():
        service = ScriptedService()
        async with keeping(tmp_path, service, max_lines=2000) as kept:
            batch = await kept.begun([chat(f"c{n}", "a") for n in range(100_000)])
            done = await kept.ended(batch)
            assert done.status == "failed" and done.errors.data[0].code == "too_many_requests"
            assert CARD.id == (await kept.openai.models.list()).data[0].id

    run(act(), 60)
