# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a client sends, it gets an answer or a fair error in bounded time, and the server is unharmed."""

import asyncio
import itertools
import logging
import os
from pathlib import Path

import grpc
import pytest

from metrale_jax import LLM, SamplingParams
from serving.client import AsyncClient
from tests.serving.fuzz.drive import Judge, send_all
from tests.serving.fuzz.inputs import Maker
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

KNOWN = ("A known prompt", {"temperature": 0.0, "max_tokens": 8})
FEW, MANY = 400, 20_000
SLOWEST_S, MAX_GROWTH_BYTES = 30.0, 600 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


def resident_bytes():
    """What this process takes of memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzzed(model, seed, count):
    """What became of so many inputs, and whether the server then answered as before."""
    expected = model.generate([KNOWN[0]], SamplingParams(**KNOWN[1]))[0].token_ids
    judge, maker = Judge(), Maker(seed)
    inputs = (maker.one() for _ in itertools.repeat(None, count))

    async def scene():
        async with whole_server(model) as server:
            options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
            async with grpc.aio.insecure_channel(server.target, options=options) as channel:
                await send_all(channel, inputs, judge)
            async with AsyncClient(server.target, timeout_s=60) as client:
                assert await client.health() == "SERVING"
                assert (await client.generate(KNOWN[0], **KNOWN[1])).token_ids == expected
            await server.quiet()

    asyncio.run(scene())
    return judge


def held(judge, count):
    assert sum(judge.counts.values()) == count
    assert not judge.faults, [(told, case.method, case.about, case.messages) for told, case in judge.faults[:3]]
    assert judge.slowest_s < SLOWEST_S, (judge.slowest_s, judge.slowest.about, judge.slowest.method)
    assert judge.counts["OK"] > count // 20 and judge.counts["INVALID_ARGUMENT"] > count // 4, judge.counts


def test_a_few_hundred_inputs_leave_the_server_unharmed(model, caplog):
    caplog.set_level(logging.ERROR)
    held(fuzzed(model, 1, FEW), FEW)
    assert not caplog.records, "the server noted a fault of its own"


@pytest.mark.slow
def test_twenty_thousand_inputs_leave_the_server_unharmed_and_small(model, caplog):
    caplog.set_level(logging.ERROR)
    fuzzed(model, 2, 2000)  # what is made once is there then
    before = resident_bytes()
    judge = fuzzed(model, 3, MANY)
    print(f"fuzz: {MANY} inputs, {dict(judge.counts)}, slowest {judge.slowest_s:.1f} s")
    held(judge, MANY)
    assert not caplog.records, "the server noted a fault of its own"
    assert resident_bytes() - before < MAX_GROWTH_BYTES
