# SPDX-License-Identifier: Apache-2.0
"""Whatever body a client sends, it gets an answer or an error object in bounded time, and the server is unharmed."""

import asyncio
import itertools
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from metrale_jax import LLM, SamplingParams
from tests.serving.http.hostile_bodies import COUNTED, FIELDS, SANE, VALUES, Case, Maker, crowds
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

KNOWN = {"prompt": "A known prompt", "temperature": 0, "max_tokens": 8}
# What a client may be told of what it did; 408 is the time that it gave itself.
FAIR = {200, 400, 404, 408, 413, 415}
FEW, MANY, CROWD = 200, 12_000, 100_000
ENDS = {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
SLOWEST_S, MAX_GROWTH_BYTES = 30.0, 600 << 20
HEADERS = {"content-type": "application/json", "x-request-timeout": "20"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=32, kv_cache_mib=1)


def resident_bytes():
    """What this process takes of memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Judge:
    """What became of the cases: counts by status, and those whose end was not fair or took too long."""

    def __init__(self):
        self.counts: Counter[int] = Counter()
        self.faults: list[tuple[str, Case]] = []
        self.slowest_s, self.slowest = 0.0, None

    def saw(self, case: Case, answer: httpx.Response, took_s: float) -> None:
        """Notes the end of one."""
        self.counts[answer.status_code] += 1
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, case
        if fault := fault_of(answer):
            self.faults.append((fault, case))


def fault_of(answer: httpx.Response) -> str:
    """What is wrong with an answer, "" where nothing is."""
    if answer.status_code not in FAIR:
        return f"status {answer.status_code}: {answer.text[:300]}"
    if answer.status_code != 200 and ("Traceback" in answer.text or ".py" in answer.text):
        return f"it shows code: {answer.text[:300]}"
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return "" if is_end(last) else f"it ends with {last[:200]}"
    told = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if answer.status_code != 200 and not is_error(told):
        return f"no error object: {answer.text[:300]}"
    return "it tells at too great length" if answer.status_code != 200 and len(answer.content) > 4000 else ""


def is_error(told) -> bool:
    """Whether it is an error object, OpenAI's or Anthropic's."""
    shapes = ({"message", "type", "param", "code"}, {"message", "type"})
    return (
        set(told) - {"type", "request_id"} == {"error"}
        and set(told["error"]) in shapes
        and bool(told["error"]["message"])
    )


def is_end(event: str) -> bool:
    """Whether a stream may end with it."""
    if event == "[DONE]":
        return True
    told = json.loads(event)
    return told.get("type") in ENDS or is_error(told)


async def send_all(url, cases, judge, at_once=6) -> None:
    """Sends all cases, so many at a time."""
    left = iter(cases)

    async def work(client: httpx.AsyncClient) -> None:
        for case in left:
            began = time.monotonic()
            answer = await client.post(case.path, content=case.body, headers=HEADERS)
            judge.saw(case, answer, time.monotonic() - began)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*[work(client) for _ in range(at_once)])


def judged(model, cases) -> Judge:
    """What became of the cases, once the server has answered as before and holds nothing."""
    [expected] = model.generate([KNOWN["prompt"]], SamplingParams(temperature=0.0, max_tokens=8))
    judge = Judge()

    async def scene():
        async with whole_server(model) as server:
            await send_all(server.url, cases, judge)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                assert (await client.get("/ready")).status_code == 200
                told = (await client.post("/v1/completions", json=KNOWN)).json()
                assert told["choices"][0]["text"] == expected.text
            await server.quiet()

    asyncio.run(scene())
    return judge


def held(judge, count) -> None:
    assert sum(judge.counts.values()) == count
    shown = [(told, case.path, case.about, case.body[:400]) for told, case in judge.faults[:4]]
    assert not judge.faults, (len(judge.faults), judge.counts, shown)
    slowest = judge.slowest
    assert judge.slowest_s < SLOWEST_S, (judge.slowest_s, slowest.path, slowest.about, slowest.body[:400])


@pytest.fixture
def no_faults(caplog):
    """The server notes no fault of its own."""
    caplog.set_level(logging.ERROR)
    yield
    assert not caplog.records


def one_by_one(every: int) -> list[Case]:
    """A sane body with one field of another value, for each field, and each value or as many fewer."""
    return [
        Case(path, json.dumps(SANE[path] | {name: value()}).encode(), name)
        for path, names in FIELDS.items()
        for place, name in enumerate(dict.fromkeys(names))
        for value in VALUES[place % every :: every]
        if name not in COUNTED
    ]


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
def test_every_field_of_every_method_may_have_any_value(every, model, no_faults):
    cases = one_by_one(every)
    judge = judged(model, cases)
    held(judge, len(cases))
    assert judge.counts[200] > len(cases) // 20 and judge.counts[400] > len(cases) // 4, judge.counts


def test_a_few_hundred_bodies_leave_the_server_unharmed(model, no_faults):
    maker = Maker(1)
    judge = judged(model, (maker.one() for _ in range(FEW)))
    held(judge, FEW)
    assert judge.counts[200] > FEW // 20 and judge.counts[400] > FEW // 4, judge.counts


def test_bodies_of_a_hundred_thousand_parts_are_answered_in_bounded_time(model, no_faults):
    cases = crowds(CROWD)
    judge = judged(model, cases)
    held(judge, len(cases))


@pytest.mark.slow
def test_thousands_of_bodies_leave_the_server_unharmed_and_small(model, no_faults):
    maker = Maker(2)
    cases = (maker.one() for _ in itertools.repeat(None))
    judged(model, itertools.islice(cases, 1500))  # what is made once is there then
    before = resident_bytes()
    judge = judged(model, itertools.islice(cases, MANY))
    print(f"hostile bodies: {MANY}, {dict(judge.counts)}, slowest {judge.slowest_s:.1f} s ({judge.slowest.about})")
    held(judge, MANY)
    assert resident_bytes() - before < MAX_GROWTH_BYTES
