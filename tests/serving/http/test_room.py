# SPDX-License-Identifier: Apache-2.0
"""The room that large bodies share: never more than there is, first come, first served; who leaves loses nothing."""

import asyncio
import random

import pytest

from serving.http.room import Place, Room
from tests.serving.http.fronts import run

TOTAL = 10


async def turns(room, *sizes):
    """Tasks that wait for so much each, in this order."""
    tasks = [asyncio.create_task(room.take(size, TOTAL)) for size in sizes]
    await asyncio.sleep(0)
    return tasks


def done(tasks):
    return [task.done() for task in tasks]


def test_who_came_first_is_served_first_even_where_a_later_one_would_fit():
    async def act():
        room = Room()
        tasks = await turns(room, 6, 6, 1)
        assert done(tasks) == [True, False, False]
        room.give_back(6, TOTAL)
        await asyncio.gather(*tasks)
        assert room.taken == 7

    run(act())


@pytest.mark.parametrize("before", [False, True])
def test_who_leaves_while_waiting_takes_nothing_with_them(before):
    async def act():
        room = Room()
        first, second, third = await turns(room, 10, 8, 10)
        if before:
            second.cancel()
            room.give_back(10, TOTAL)
        else:
            room.give_back(10, TOTAL)
            second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert second.cancelled() and room.taken == 10
        room.give_back(10, TOTAL)
        assert room.taken == 0

    run(act())


def test_a_place_takes_once_and_no_more_than_there_is():
    async def act():
        room = Room()
        with Place(room, TOTAL) as place:
            await place.take(TOTAL + 5)
            await place.take(3)
            assert room.taken == TOTAL and not place.is_waiting
            with Place(room, TOTAL) as other, pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await other.take(1)
            assert other.is_waiting
        assert room.taken == 0

    run(act())


@pytest.mark.parametrize("seed", range(20))
def test_however_they_come_and_go_all_is_given_back(seed):
    draw = random.Random(seed)

    async def visit(room):
        with Place(room, TOTAL) as place:
            await place.take(draw.randint(1, TOTAL + 2))
            assert 0 < room.taken <= TOTAL
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)

    async def act():
        room = Room()
        tasks = [asyncio.create_task(visit(room)) for _ in range(30)]
        while not all(done(tasks)):
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            await asyncio.sleep(0)
        assert not [one for one in tasks if not one.cancelled() and one.exception()]
        assert room.taken == 0
        await room.take(TOTAL, TOTAL)

    run(act())
