# SPDX-License-Identifier: Apache-2.0
"""Turns are fair between keys, in order within one, and are given back by whoever goes."""

import asyncio
import random

import pytest

from serving.core.turns import Turns


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


class Queue:
    """Calls that wait for their turns, and the order in which they got them."""

    def __init__(self, max_inside):
        self.turns, self.order, self.held = Turns(lambda: max_inside), [], []

    def ask(self, key_id, name, priority=0, num_answers=1, background=False):
        async def wait():
            turn = await self.turns.take(key_id, priority, num_answers, background)
            self.order.append(name)
            self.held.append(turn)

        return asyncio.ensure_future(wait())

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def serve_all(self, tasks):
        while not all(task.done() for task in tasks):
            await self.settle()
            self.held.pop(0).end()
        await self.settle()
        while self.held:
            self.held.pop().end()


def test_a_key_that_floods_the_server_waits_for_itself():
    async def scene():
        queue = Queue(2)
        tasks = [queue.ask("loud", f"loud{n}") for n in range(20)]
        await queue.settle()
        tasks += [queue.ask("quiet", f"quiet{n}") for n in range(3)]
        await queue.serve_all(tasks)
        return queue.order

    order = run(scene())
    assert order[:2] == ["loud0", "loud1"] and order[2] == "quiet0"
    assert max(order.index(f"quiet{n}") for n in range(3)) <= 7


def test_one_key_is_served_by_priority_and_then_in_order():
    async def scene():
        queue = Queue(1)
        tasks = [queue.ask("", "first")]
        await queue.settle()
        tasks += [queue.ask("", f"late{n}", priority=1) for n in range(2)]
        tasks += [queue.ask("", f"soon{n}", priority=0) for n in range(2)]
        await queue.serve_all(tasks)
        return queue.order

    assert run(scene()) == ["first", "soon0", "soon1", "late0", "late1"]


def test_one_that_is_larger_than_all_the_room_goes_alone():
    async def scene():
        queue = Queue(2)
        tasks = [queue.ask("", "small"), queue.ask("", "huge", num_answers=5), queue.ask("", "after")]
        await queue.settle()
        assert queue.order == ["small"]
        await queue.serve_all(tasks)
        return queue.order

    assert run(scene()) == ["small", "huge", "after"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_nothing_is_lost(seed):
    async def scene():
        rng = random.Random(seed)
        queue, tasks = Queue(3), []
        for step in range(200):
            if rng.random() < 0.5:
                tasks.append(queue.ask(rng.choice("abc"), step, rng.randrange(2), rng.randrange(1, 3)))
            if rng.random() < 0.3 and tasks:
                rng.choice(tasks).cancel()
            if rng.random() < 0.4 and queue.held:
                turn = queue.held.pop(rng.randrange(len(queue.held)))
                turn.end()
                turn.end()
            if rng.random() < 0.7:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await queue.settle()
        for turn in queue.held:
            turn.end()
        assert queue.turns.num_waiting == 0
        # All the room is there again.
        again = [queue.ask("z", f"again{n}") for n in range(3)]
        await queue.settle()
        assert all(task.done() for task in again)

    run(scene())


def test_calls_in_the_background_wait_for_those_of_every_key_whatever_their_priority():
    async def scene():
        queue = Queue(1)
        tasks = [queue.ask("", "first")]
        await queue.settle()
        tasks += [queue.ask(key, f"late-{key}", priority=-5, background=True) for key in ("a", "b")]
        tasks += [queue.ask("a", f"live{n}", priority=5) for n in range(3)]
        await queue.serve_all(tasks)
        return queue.order

    assert run(scene()) == ["first", "live0", "live1", "live2", "late-b", "late-a"]
