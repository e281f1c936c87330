# SPDX-License-Identifier: Apache-2.0
"""Batches over a real model: the tokens of live calls, beside live calls that go first."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import openai
import pytest

from metrale_jax import LLM
from serving.core.calls import Caller
from serving.http.batch_work import BatchWork
from serving.http.desk import Desk
from serving.http.server import make_http_server
from serving.http.settings import HttpSettings
from serving.store.settings import StoreSettings
from serving.store.store import Store
from tests.serving.http.batch_fronts import CHAT, ENDS, TEXT, jsonl
from tests.serving.http.fronts import run
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

COMPILING_S = 300
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
BODIES = {
    CHAT: [
        {"messages": SAID, "temperature": 0.0},
        {"messages": SAID, "temperature": 0.9, "seed": 8, "n": 2},
    ],
    TEXT: [
        {"prompt": "The quick brown fox jumps over the lazy dog", "temperature": 0.0},
        {"prompt": ["abc", [5, 6, 7]], "temperature": 1.0, "seed": 2**40 + 5, "n": 2},
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


@asynccontextmanager
async def batching(model, directory):
    """A server over the model that keeps batches, and a client of it."""
    async with whole_server(model) as server:
        store = Store(StoreSettings(directory), time.time)
        store.open()
        desk = Desk(server.service, server.lifecycle, HttpSettings(port=0))
        work = BatchWork(desk, store, lambda key_id: Caller())
        front = make_http_server(Desk(server.service, server.lifecycle, HttpSettings(port=0), batches=work))
        await front.start()
        work.start()
        try:
            url = f"http://127.0.0.1:{front.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield server, client
        finally:
            await work.stop()
            await front.stop()
            await store.close()
            await server.quiet()


async def batch_of(client, url, bodies):
    """A batch that has begun, of these bodies."""
    lines = [{"custom_id": str(place), "method": "POST", "url": url, "body": body} for place, body in enumerate(bodies)]
    file = await client.files.create(file=("a.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def answers_of(client, batch):
    """The bodies of its answers, in the order of its lines, once it is whole."""
    while batch.status not in ENDS:
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.error_file_id is None, batch
    lines = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return [line["response"]["body"] for line in sorted(lines, key=lambda line: int(line["custom_id"]))]


@pytest.mark.parametrize("url", BODIES)
def test_a_line_says_what_the_same_live_call_says(model, tmp_path, url):
    async def act():
        bodies = [body | {"model": "tiny", "max_tokens": 10, "return_token_ids": True} for body in BODIES[url]]
        async with batching(model, tmp_path) as (server, client):
            batched = await answers_of(client, await batch_of(client, url, bodies * 3))
            for place, answer in enumerate(batched):
                live = await client.post(url.removeprefix("/v1"), cast_to=object, body=bodies[place % len(bodies)])
                assert answer["choices"] == live["choices"] and answer["choices"][0]["token_ids"]
                assert answer["model"] == live["model"] == "tiny"
            assert {record.method for record in server.records} >= {"/v1/batches", url}

    run(act(), COMPILING_S)


def test_lines_without_a_seed_say_the_same_in_every_run_and_not_the_same_as_each_other(model, tmp_path):
    async def act():
        bodies = [{"prompt": "Once", "temperature": 1.0, "max_tokens": 8, "return_token_ids": True}] * 4
        async with batching(model, tmp_path) as (_, client):
            first, again = [await answers_of(client, await batch_of(client, TEXT, bodies)) for _ in range(2)]
            assert [one["choices"] for one in first] == [one["choices"] for one in again]
            assert len({str(one["choices"]) for one in first}) == 4

    run(act(), COMPILING_S)


def test_live_calls_are_answered_while_a_batch_fills_what_is_left(model, tmp_path):
    async def act():
        body = {"prompt": "Once upon", "max_tokens": 40, "ignore_eos": True}
        async with batching(model, tmp_path) as (server, client):
            batch = await batch_of(client, TEXT, [body] * 60)
            most = 0
            while (batch := await client.batches.retrieve(batch.id)).request_counts.completed < 60:
                most = max(most, server.llm.stats().num_running)
                if 0 < batch.request_counts.completed < 30:
                    live = await client.completions.create(model="tiny", prompt="a", max_tokens=4)
                    assert live.choices[0].finish_reason in ("length", "stop")
                await asyncio.sleep(0.005)
            records = [record for record in server.records if record.method == TEXT]
            behind = [record for record in server.records if record.method == "/v1/batches"]
            assert records and len(behind) == 60 and 0 < most <= 3, "half of the slots are left to live calls"

    run(act(), COMPILING_S)
