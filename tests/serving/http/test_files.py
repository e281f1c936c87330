# SPDX-License-Identifier: Apache-2.0
"""Files over HTTP: kept as they were sent, each key's apart, within bounds, whatever is sent."""

import asyncio
import json
import os
import random
import tracemalloc

import pytest

from metrale_jax.core.errors import ConfigError
from serving.core.calls import Caller
from serving.store.records import StoredFile
from serving.store.settings import StoreSettings
from serving.store.store import Store
from tests.serving.http.batch_fronts import keeping
from tests.serving.http.fronts import error_of, run
from tests.serving.scripted import ScriptedService

KEYS = {"alice-token": Caller(key_id="alice"), "bob-token": Caller(key_id="bob")}
MIB = 2**20


def on_disk(directory):
    """The names of all files but the lock."""
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and path.name != "lock")


def test_a_file_comes_back_as_it_was_sent_also_after_a_start(tmp_path):
    content = os.urandom(3 * MIB) + b"\r\n--x\r\n" + "naïve".encode()

    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            made = await kept.upload(content, "näme.jsonl")
            assert (made.object, made.bytes, made.purpose, made.filename) == (
                "file",
                len(content),
                "batch",
                "näme.jsonl",
            )
            assert made.expires_at == made.created_at + 30 * 86400
            answer = await kept.openai.files.content(made.id)
            assert answer.content == content and "attachment" in answer.response.headers["content-disposition"]
        async with keeping(tmp_path, ScriptedService()) as kept:
            assert await kept.openai.files.retrieve(made.id) == made
            assert (await kept.openai.files.content(made.id)).content == content
            assert (await kept.openai.files.delete(made.id)).deleted
            error_of(await kept.world.client.get(f"/v1/files/{made.id}"), 404)
            assert on_disk(tmp_path) == []

    run(act())


def test_lists_come_in_pages_in_either_order(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            made = [(await kept.upload(b"{}", f"{n}")).id for n in range(5)]
            assert [one.id async for one in kept.openai.files.list(limit=2, order="asc")] == made
            assert [one.id async for one in kept.openai.files.list(limit=2)] == made[::-1]
            assert not (await kept.openai.files.list(purpose="vision")).data
            for query in ("limit=0", "limit=10001", "limit=ten", "order=up", "after=file-none", "strange=1"):
                assert error_of(await kept.world.client.get(f"/v1/files?{query}"), 400)["param"] == query.split("=")[0]

    run(act())


def test_each_key_sees_its_own_only_and_no_id_is_a_path(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService(keys=KEYS), token="alice-token") as kept:
            made = await kept.upload(b"{}")
            client, bob = kept.world.client, {"authorization": "Bearer bob-token"}
            assert (await client.get("/v1/files", headers=bob)).json()["data"] == []
            for path in (f"/v1/files/{made.id}", f"/v1/files/{made.id}/content"):
                error_of(await client.get(path, headers=bob), 404)
            error_of(await client.delete(f"/v1/files/{made.id}", headers=bob), 404)
            alice = {"authorization": "Bearer alice-token"}
            for tricky in ("..%2f..%2flock", "%2e%2e%2flock", f"{made.id}.json", "%00", f"{made.id}%2f"):
                for path in (f"/v1/files/{tricky}", f"/v1/files/{tricky}/content"):
                    error_of(await client.get(path, headers=alice), 404)
                    assert (await client.delete(path, headers=alice)).status_code in (404, 405)
            assert len(on_disk(tmp_path)) == 2 and "alice" not in str(list(tmp_path.rglob("*")))

    run(act())


@pytest.mark.parametrize("name", ["../../evil", "C:\\evil", "/etc/evil", "a\x00\x1bevil", "x" * 1000 + "evil", "."])
def test_names_are_for_showing_only(tmp_path, name):
    async def act():
        async with keeping(tmp_path / "data", ScriptedService()) as kept:
            answer = await kept.world.client.post("/v1/files", files={"file": (name, b"{}")}, data={"purpose": "batch"})
            told = answer.json()["filename"]
            assert len(told) <= 255 and not {"/", "\\", "\0", "\x1b"} & set(told)
            content = await kept.world.client.get(f"/v1/files/{answer.json()['id']}/content")
            assert content.content == b"{}"
        assert [path.name for path in tmp_path.iterdir()] == ["data"]

    run(act())


def multipart(*parts, boundary="x", end="--x--\r\n"):
    body = b"".join(b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in parts)
    return {"content": body + end.encode(), "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}


PURPOSE = ('content-disposition: form-data; name="purpose"', b"batch")
FILE = ('content-disposition: form-data; name="file"; filename="a"', b"{}")
BROKEN = [
    (multipart(PURPOSE, FILE, end=""), 400, ""),
    (multipart(PURPOSE, FILE, end="--x"), 400, ""),
    (multipart(PURPOSE, FILE, boundary="other"), 400, ""),
    (multipart(PURPOSE, FILE, boundary=""), 400, ""),
    (multipart(PURPOSE, FILE, boundary="x" * 500), 400, ""),
    (multipart(PURPOSE), 400, "file"),
    (multipart(FILE), 400, "purpose"),
    (multipart(), 400, "file"),
    (multipart(("x: y", b"a"), FILE), 400, ""),
    (multipart(("content-disposition: attachment", b"a"), FILE), 400, ""),
    (multipart(PURPOSE, FILE, FILE), 400, "file"),
    (multipart(PURPOSE, ('content-disposition: form-data; name="b"; filename="a"', b"{}")), 400, "file"),
    (multipart(PURPOSE, ('content-disposition: form-data; name="file"', b"{}")), 400, "file"),
    (multipart(PURPOSE, PURPOSE, FILE), 400, "purpose"),
    (multipart((PURPOSE[0], b"x" * 5000), FILE), 400, "purpose"),
    (multipart((PURPOSE[0], b"fine-tune"), FILE), 400, "purpose"),
    (multipart(PURPOSE, ('content-disposition: form-data; name="strange"', b"1"), FILE), 400, "strange"),
    (multipart(*[(f'content-disposition: form-data; name="n{n}"', b"") for n in range(17)], FILE), 400, "n16"),
    (multipart(("a: b\r\n" * 100 + PURPOSE[0], b"batch"), FILE), 400, ""),
    (multipart(("a: " + "b" * 100_000, b"batch"), FILE), 400, ""),
    (
        multipart(PURPOSE, ('content-disposition: form-data; name="expires_after[seconds]"', b"9"), FILE),
        400,
        "expires_after.anchor",
    ),
    ({"json": {"file": "a", "purpose": "batch"}}, 415, "content-type"),
    ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400, ""),
    ({"content": b""}, 415, "content-type"),
]


def test_a_form_that_is_none_is_refused_and_leaves_nothing(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            for sent, status, field in BROKEN:
                error = error_of(await kept.world.client.post("/v1/files", **sent), status)
                assert (error["param"] or "") == field, (sent, error)
            owner = kept.work.store.owner("")
            assert (owner.files, owner.growing, on_disk(tmp_path)) == ({}, {}, [])
            good = multipart(PURPOSE, FILE)
            assert (await kept.world.client.post("/v1/files", **good)).status_code == 200

    run(act())


def test_any_bytes_as_a_form_are_an_error_object(tmp_path):
    async def act():
        rng = random.Random(5)
        good = multipart(PURPOSE, FILE)
        async with keeping(tmp_path, ScriptedService()) as kept:
            for _ in range(60):
                body = bytearray(good["content"])
                for _ in range(rng.randint(1, 4)):
                    place = rng.randrange(len(body))
                    body[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
                answer = await kept.world.client.post("/v1/files", content=bytes(body), headers=good["headers"])
                assert answer.status_code == 200 or error_of(answer, 400)
            assert not kept.work.store.owner("").growing

    run(act())


async def flood(num_bytes):
    yield multipart(PURPOSE, end="")["content"] + b"--x\r\n" + FILE[0].encode() + b"\r\n\r\n"
    for _ in range(num_bytes // MIB):
        yield bytes(MIB)
    yield b"\r\n--x--\r\n"


def test_a_file_over_the_limit_is_refused_while_it_comes_and_never_in_memory(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService(), max_file_bytes=20 * MIB) as kept:
            headers = multipart()["headers"]
            tracemalloc.start()
            whole = await kept.world.client.post("/v1/files", content=flood(18 * MIB), headers=headers)
            assert whole.status_code == 200 and whole.json()["bytes"] == 18 * MIB
            error_of(await kept.world.client.post("/v1/files", content=flood(28 * MIB), headers=headers), 413)
            assert tracemalloc.get_traced_memory()[1] < 12 * MIB
            tracemalloc.stop()
            declared = {**headers, "content-length": str(200 * MIB)}
            head = "".join(f"{name}: {value}\r\n" for name, value in declared.items())
            back = await kept.world.raw(
                f"POST /v1/files HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{head}\r\n".encode()
            )
            assert b" 413 " in back.splitlines()[0], "before any of it has come"
            assert len(on_disk(tmp_path)) == 2

    run(act(), 40)


def test_there_are_bounds_to_what_a_key_has_here(tmp_path):
    async def act():
        service = ScriptedService(keys=KEYS)
        bounds = {"max_owner_bytes": 3 * MIB, "max_files": 3, "max_uploads": 1}
        async with keeping(tmp_path, service, token="alice-token", **bounds) as kept:
            client, alice = kept.world.client, {"authorization": "Bearer alice-token"}
            first = await kept.upload(bytes(2 * MIB))
            sent = {"files": {"file": ("a", bytes(2 * MIB))}, "data": {"purpose": "batch"}}
            assert "3 MiB together" in error_of(await client.post("/v1/files", headers=alice, **sent), 400)["message"]
            bob = await client.post("/v1/files", headers={"authorization": "Bearer bob-token"}, **sent)
            assert bob.status_code == 200, "others have their own"
            await kept.openai.files.delete(first.id)
            for _ in range(3):
                await kept.upload(b"{}")
            sent = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
            assert "3 files" in error_of(await client.post("/v1/files", headers=alice, **sent), 400)["message"]

    run(act())


def test_who_goes_or_stalls_in_the_midst_of_sending_leaves_nothing(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService(), max_uploads=1) as kept:
            owner = kept.work.store.owner("")
            head = b"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            begun = multipart(PURPOSE, end="")["content"] + b"--x\r\n" + FILE[0].encode() + b"\r\n\r\n" + bytes(3 * MIB)
            _, writer = await asyncio.open_connection("127.0.0.1", kept.world.front.port)
            writer.write(head + b"content-length: 99999999\r\n\r\n" + begun)
            await writer.drain()
            while not on_disk(tmp_path):
                await asyncio.sleep(0.005)
            sent = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
            assert error_of(await kept.world.client.post("/v1/files", **sent), 429)["message"].startswith("1 files")
            writer.close()
            while owner.growing or on_disk(tmp_path):
                await asyncio.sleep(0.005)
            await kept.upload(b"{}")

    run(act())


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    def no_room(descriptor, data):
        raise OSError(28, "No space left on device")

    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            monkeypatch.setattr("serving.store.upload.write_all", no_room)
            sent = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
            error = error_of(await kept.world.client.post("/v1/files", **sent), 503)
            assert "No space left" in error["message"] and str(tmp_path) not in error["message"]
            monkeypatch.undo()
            assert on_disk(tmp_path) == [] and not kept.work.store.owner("").growing
            await kept.upload(b"{}")

    run(act())


def test_a_start_clears_what_was_half_done_and_passes_over_what_is_damaged(tmp_path, caplog):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            made = await kept.upload(b"{}")
            folder = kept.work.store.owner("").content(made.id).parent
        (folder / "file-half").write_bytes(b"torn")
        (folder / ".file-half.json.tmp").write_bytes(b"torn")
        (folder / "file-lost.json").write_text(json.dumps(StoredFile("file-lost", "", "batch", 1, 1, 1).__dict__))
        (folder.parent / "batches").mkdir()
        (folder.parent / "batches" / "batch_x.json").write_text('{"id": 3')
        async with keeping(tmp_path, ScriptedService()) as kept:
            assert [one.id async for one in kept.openai.files.list()] == [made.id]
            assert not (await kept.openai.batches.list()).data
        assert {path.name for path in folder.iterdir()} == {made.id, f"{made.id}.json"}
        assert "batch_x.json is damaged" in caplog.text

    run(act())


def test_a_directory_is_one_servers_and_has_to_be_one(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()):
            with pytest.raises(ConfigError, match="another server"):
                Store(StoreSettings(tmp_path), int).open()
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigError, match="data_dir="):
            Store(StoreSettings(tmp_path / "file" / "below"), int).open()

    run(act())


def test_an_own_time_of_keeping_is_taken_within_bounds(tmp_path):
    async def act():
        async with keeping(tmp_path, ScriptedService()) as kept:
            after = {"anchor": "created_at", "seconds": 7200}
            made = await kept.openai.files.create(file=("a", b"{}"), purpose="batch", expires_after=after)
            assert made.expires_at == made.created_at + 7200
            for seconds in ("60", "99999999", "soon"):
                data = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
                answer = await kept.world.client.post("/v1/files", files={"file": ("a", b"{}")}, data=data)
                assert error_of(answer, 400)["param"] == "expires_after.seconds"

    run(act())
