# SPDX-License-Identifier: Apache-2.0
"""What waits for a reader stays in order, whole and small."""

import asyncio

import pytest

from metrale_jax.results import TokenLogprob, Usage
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta
from serving.core.outbox import Outbox


def taken(box, count):
    async def read():
        return [await asyncio.wait_for(box.take(), 5) for _ in range(count)]

    return asyncio.run(read())


def test_deltas_that_nobody_took_become_one():
    box = Outbox()
    for token in range(1000):
        box.put(Delta(0, chr(97 + token % 26), (token,), (TokenLogprob(token, -1.0, ()),)))
    (delta,) = taken(box, 1)
    assert delta.token_ids == tuple(range(1000)) and len(delta.text) == 1000
    assert [one.token_id for one in delta.logprobs] == list(range(1000))


def test_each_answer_gathers_its_own_deltas_in_order():
    box = Outbox()
    for count, (index, text) in enumerate(((0, "a"), (1, "x"), (0, "b"), (1, "y"))):
        box.put(Delta(index, text, (index,), usage=Usage(5, 2, count)))
    told = [(delta.index, delta.text, delta.usage.generated_tokens) for delta in taken(box, 2)]
    assert told == [(0, "ab", 2), (1, "xy", 3)]


def test_a_delta_after_one_that_was_taken_is_another():
    box = Outbox()
    box.put(Delta(0, "a", (1,)))
    assert taken(box, 1) == [Delta(0, "a", (1,))]
    box.put(Delta(0, "b", (2,)))
    assert taken(box, 1) == [Delta(0, "b", (2,))]


def test_an_error_comes_before_what_waits():
    box = Outbox()
    box.put(Delta(0, "a", (1,)))
    box.fail(ServiceError(Kind.UNAVAILABLE, "gone"))
    with pytest.raises(ServiceError, match="gone"):
        taken(box, 1)


def test_a_reader_that_waits_is_woken():
    async def run():
        box = Outbox()
        reader = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put(Delta(0, "late", (7,)))
        return await asyncio.wait_for(reader, 5)

    assert asyncio.run(run()).text == "late"
