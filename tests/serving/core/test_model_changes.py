# SPDX-License-Identifier: Apache-2.0
"""One model comes in the place of another: calls under way go on, a load that fails changes nothing, and it is told."""

import asyncio
import gc
import logging
import random
import threading
import weakref
from contextlib import asynccontextmanager

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import Caller, CallInfo, GenerateCall, LoadCall, Prompt, TokenizeCall, UnloadCall
from serving.core.catalog import Catalog, Wanted
from serving.core.errors import Kind, ServiceError
from serving.core.events import Ended
from serving.core.gate import Gate
from serving.core.keys import KeyRing
from serving.core.lifecycle import Lifecycle, State
from serving.core.limits import Meter
from serving.core.parts import AbstractFigures
from serving.core.service import Parts, Service, ServiceSettings
from serving.core.tracing import Tracing
from tests.serving.core.fake_llm import FakeLLM
from tests.serving.core.test_service import scenario, until

ADMIN, ANYBODY = Caller("root", peer="p", admin=True), Caller()
ENDLESS = 1 << 20


def slow():
    threading.Event().wait(0.001)


class Script:
    """Makes a `FakeLLM` for each load. By the name that is loaded, in order: an exception is raised, a function is
    called with the progress, and a model is handed out; a fresh model without any."""

    def __init__(self, **steps):
        self.steps = {name: list(listed) for name, listed in steps.items()}
        self.loads, self._made = [], []

    def __call__(self, wanted, progress):
        self.loads.append(wanted)
        progress("load", 5, 10)
        listed = self.steps.get(wanted.source)
        step = listed.pop(0) if listed else FakeLLM(slow)
        if isinstance(step, BaseException):
            raise step
        llm = step(progress) if callable(step) else step
        progress("load", 10, 10)
        self._made.append(weakref.ref(llm))
        return llm

    @property
    def made(self):
        return [one() for one in self._made]


class Figures(AbstractFigures):
    """Which engines are watched."""

    def __init__(self):
        self.followed = []

    def follow(self, stats):
        self.followed.append(stats)

    def forget(self, stats):
        if stats in self.followed:
            self.followed.remove(stats)


class World:
    """A service that starts with "one" and may load "two" and "bad", and what it told."""

    def __init__(self, script, room_for_two=True, **settings):
        self.script, self.records, self.changes, self.states = script, [], [], []
        self.lifecycle, keys, loop = Lifecycle(), KeyRing.anonymous(), asyncio.get_running_loop()
        self.lifecycle.listen(lambda state, _: self.states.append(state))
        self.figures = Figures()
        parts = Parts(
            keys,
            Meter(keys.limits_of, loop.time),
            Gate(0, 0, loop.time),
            self.lifecycle,
            self.records.append,
            Tracing(),
            changed=self.changes.append,
            figures=self.figures,
            room_for_two=lambda: room_for_two,
        )
        catalog = Catalog(Wanted("one", "one"), True, {"two": "two", "bad": "bad"})
        self.service = Service(script, ServiceSettings("one", **settings), parts, catalog)

    @property
    def told(self):
        return [(change.action, change.model, change.outcome) for change in self.changes]

    @property
    def served(self):
        return [card.id for card in self.service.models()]

    async def load(self, model="two", caller=ADMIN, **options):
        return await self.service.load_model(LoadCall(model, **options), caller)

    def begun(self, model="two", **options):
        return asyncio.ensure_future(self.load(model, **options))

    async def at(self, step):
        await until(lambda: self.status.change is not None and self.status.change.step == step)

    async def settled(self):
        await until(lambda: self.status.change is None)

    @property
    def status(self):
        return self.service.model_status(ADMIN)

    def stream(self, max_tokens=ENDLESS, **info):
        call = GenerateCall(Prompt(text="ab"), SamplingParams(max_tokens=max_tokens), CallInfo(**info))
        return self.service.generate(call, ANYBODY)

    async def answer(self, **info):
        (*_, end) = [event async for event in self.stream(3, **info)]
        assert isinstance(end, Ended)
        return end.result.text

    async def refusal(self, coroutine):
        with pytest.raises(ServiceError) as caught:
            await coroutine
        return caught.value


@asynccontextmanager
async def serving(script=None, started=True, **settings):
    world = World(script or Script(), **settings)
    world.service.start()
    try:
        if started:
            await until(lambda: world.lifecycle.state is State.SERVING)
        yield world
    finally:
        assert await world.service.stop(10)


@pytest.fixture
def no_logs(caplog):
    caplog.set_level(logging.CRITICAL)


@scenario
async def test_calls_under_way_end_on_the_old_model_and_later_ones_come_to_the_new_one():
    async with serving() as world:
        old = world.script.made[0]
        events = world.stream(200)
        await anext(events)
        status = await world.load()
        assert world.served == ["two"] and status.model.id == "two" and status.state == "serving"
        assert status.change.step == "retiring" and status.change.outcome == "ok"
        assert len(old.running) == 1, "it goes on where it is"
        assert await world.answer() == "abc" and await world.answer(model="two") == "abc"
        assert (await world.refusal(world.answer(model="one"))).kind is Kind.NOT_FOUND
        ends = [event async for event in events if isinstance(event, Ended)]
        assert len(ends[0].result.token_ids) == 200
        await world.settled()
        assert old.num_spilled == 1 and not old.cancelled and world.states.count(State.SERVING) == 1
        assert world.told == [("load", "one", "ok"), ("load", "two", "ok"), ("retire", "one", "ok")]
        assert len(world.figures.followed) == 1, "figures are the new one's"
        assert State.LOADING not in world.states, "there was a model at every moment"


@scenario
async def test_the_memory_of_the_old_one_is_free_when_its_last_call_has_ended():
    async with serving() as world:
        events = world.stream(50)
        await anext(events)
        await world.load()
        assert [event async for event in events]
        await world.settled()
        assert world.changes[-1].action == "retire" and world.changes[-1].freed
        held = FakeLLM()
        world.script.steps["one"] = [held]
        await world.load("one")
        await world.settled()
        await world.load("two")
        await world.settled()
        assert not world.changes[-1].freed, "somebody holds it, and that is told"


@scenario
async def test_who_reads_slowly_keeps_no_model():
    async with serving() as world:
        events = world.stream(30)
        first = await anext(events)
        await world.load()
        await world.settled()
        assert world.service.num_calls == 1
        rest = [event async for event in events]
        assert len(first.token_ids) + len(rest[0].token_ids) == 30 and isinstance(rest[-1], Ended)


@scenario
async def test_a_caller_who_asks_twice_gets_one_model():
    async with serving() as world:
        pinned = world.service.pinned()
        tokens = await pinned.tokenize(TokenizeCall(Prompt(text="ab")), ANYBODY)
        events = world.stream(60)
        await anext(events)
        await world.load()
        assert [card.id for card in pinned.models()] == ["one"] and list(tokens) == [97, 98]
        again = pinned.tokenize(TokenizeCall(Prompt(text="ab"), CallInfo(model="one")), ANYBODY)
        assert list(await again) == [97, 98], "it is there while calls of it run"
        assert [event async for event in events]
        await world.settled()
        late = await world.refusal(pinned.tokenize(TokenizeCall(Prompt(text="ab")), ANYBODY))
        assert late.kind is Kind.UNAVAILABLE and late.retry_after_s
        assert world.records[-1].outcome == "unavailable"


@pytest.mark.parametrize("drain_first", [False, True, None])
@pytest.mark.parametrize(
    "fault, kind, words",
    [
        (ConfigError("no such path; name one."), Kind.INVALID, "no such path"),
        (RuntimeError("secret"), Kind.INTERNAL, "RuntimeError"),
        (MemoryError(), Kind.INTERNAL, "no room"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), Kind.INTERNAL, "no room"),
        (SystemExit(), Kind.INTERNAL, "SystemExit"),
    ],
    ids=["mistake", "fault", "memory", "device-memory", "exit"],
)
def test_a_load_that_fails_leaves_the_old_model_serving(fault, kind, words, drain_first, no_logs):
    async def scene():
        async with serving(Script(two=[fault] * (2 if "no room" in words and drain_first is None else 1))) as world:
            events = world.stream(40)
            await anext(events)
            error = await world.refusal(world.load(drain_first=drain_first))
            assert error.kind is kind and words in str(error) and "secret" not in str(error)
            assert world.served == ["one"] and await world.answer() == "abc"
            assert isinstance([event async for event in events][-1], Ended)
            assert world.status.last_change.outcome == kind.value and words in world.status.last_change.error
            assert ("load", "two", kind.value) in world.told
            assert world.lifecycle.state is State.SERVING
            assert await world.load("two") and world.served == ["two"]

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_where_two_models_have_no_room_the_old_one_goes_first():
    async def scene():
        async with serving(Script(), room_for_two=False) as world:
            error = await world.refusal(world.load(drain_first=False))
            assert error.kind is Kind.INTERNAL and "no room" in str(error) and world.served == ["one"]
            begun = world.begun()
            await until(lambda: world.lifecycle.state is State.LOADING)
            assert world.served == []
            await begun
            assert world.served == ["two"] and await world.answer() == "abc"

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize("drain_first", [False, True])
def test_a_fault_while_warming_up_leaves_the_old_model_serving(drain_first, no_logs):
    def cold():
        raise RuntimeError("a compiler's")

    async def scene():
        broken = FakeLLM()
        broken.warm_up = cold
        async with serving(Script(two=[broken])) as world:
            error = await world.refusal(world.load(drain_first=drain_first))
            assert error.kind is Kind.INTERNAL and world.served == ["one"] and await world.answer() == "abc"
            assert len(world.figures.followed) == 1

    asyncio.run(asyncio.wait_for(scene(), 30))


@scenario
async def test_where_there_is_no_room_for_both_the_old_one_is_unloaded_first():
    async with serving(Script(two=[MemoryError()])) as world:
        events = world.stream(50)
        await anext(events)
        change = world.begun()
        await world.at("draining")
        assert world.served == [] and world.lifecycle.state is State.LOADING
        assert (await world.refusal(world.answer())).kind is Kind.UNAVAILABLE
        assert isinstance([event async for event in events][-1], Ended)
        await change
        assert world.served == ["two"] and world.script.made[0] is None
        assert [wanted.name for wanted in world.script.loads] == ["one", "two", "two"]


@scenario
async def test_draining_first_ends_calls_after_their_grace():
    async with serving() as world:
        events = world.stream()
        await anext(events)
        await world.load(drain_first=True, grace_s=0.05)
        error = await world.refusal(anext(events))
        while error is None:
            error = await world.refusal(anext(events))
        assert error.kind is Kind.UNAVAILABLE and "taken away" in str(error)
        assert [change.calls_ended for change in world.changes if change.action == "retire"] == [1]
        assert world.states[-3:] == [State.LOADING, State.WARMING, State.SERVING]


@scenario
async def test_a_model_that_cannot_be_loaded_again_either_ends_the_server():
    logging.disable(logging.CRITICAL)
    try:
        async with serving(Script(one=[FakeLLM(), RuntimeError()], two=[RuntimeError()])) as world:
            await world.refusal(world.load(drain_first=True))
            assert world.lifecycle.state is State.FAILED and world.served == []
            assert (await world.refusal(world.answer())).kind is Kind.UNAVAILABLE
            assert (await world.refusal(world.load())).kind is Kind.UNAVAILABLE
    finally:
        logging.disable(logging.NOTSET)


@scenario
async def test_a_model_is_unloaded_and_another_loaded():
    async with serving() as world:
        events = world.stream(50)
        await anext(events)
        unloading = asyncio.ensure_future(world.service.unload_model(UnloadCall(), ADMIN))
        await world.at("draining")
        assert world.served == [] and world.lifecycle.state is State.UNLOADED
        assert isinstance([event async for event in events][-1], Ended)
        status = await unloading
        assert status.model is None and status.state == "unloaded" and world.service.llm is None
        error = await world.refusal(world.answer())
        assert error.kind is Kind.UNAVAILABLE and error.retry_after_s and "no model" in str(error)
        assert world.service.pinned().models() == ()
        again = await world.refusal(world.service.unload_model(UnloadCall(), ADMIN))
        assert again.kind is Kind.CONFLICT
        await world.load("")
        assert world.served == ["one"] and await world.answer() == "abc"
        assert world.states[-4:] == [State.UNLOADED, State.LOADING, State.WARMING, State.SERVING]


@scenario
async def test_after_an_unload_a_load_that_fails_leaves_no_model_and_says_why():
    logging.disable(logging.CRITICAL)
    try:
        async with serving(Script(two=[ConfigError("broken weights; mend them.")])) as world:
            await world.service.unload_model(UnloadCall(), ADMIN)
            await world.refusal(world.load())
            assert world.lifecycle.state is State.UNLOADED and "broken weights" in world.status.reason
            await world.load("one")
            assert await world.answer() == "abc"
    finally:
        logging.disable(logging.NOTSET)


@scenario
async def test_one_change_at_a_time():
    goes = threading.Event()

    def waits(progress):
        goes.wait(10)
        return FakeLLM()

    async with serving(Script(two=[waits])) as world:
        first = world.begun()
        await world.at("loading")
        for other in (world.load("one"), world.service.unload_model(UnloadCall(), ADMIN)):
            error = await world.refusal(other)
            assert error.kind is Kind.CONFLICT and "load of 'two'" in str(error)
        assert world.status.change.stages[0].done == 5
        goes.set()
        await first
        assert world.told[1:3] == [("load", "one", "conflict"), ("unload", "one", "conflict")]


@scenario
async def test_nobody_may_change_models_but_who_is_told_so():
    async with serving() as world:
        for refused in (world.load(caller=ANYBODY), world.service.unload_model(UnloadCall(), Caller("alice"))):
            assert (await world.refusal(refused)).kind is Kind.FORBIDDEN
        for ask in (world.service.model_status, lambda caller: anext(world.service.model_changes(caller))):
            with pytest.raises(ServiceError) as caught:
                await ask(ANYBODY)
            assert caught.value.kind is Kind.FORBIDDEN
        error = await world.refusal(world.load("/etc/passwd"))
        assert error.kind is Kind.FORBIDDEN and error.field == "model" and error.recorded
        assert len(world.script.loads) == 1 and world.served == ["one"]
        assert [outcome for _, _, outcome in world.told[1:]] == ["forbidden"] * 3


@scenario
async def test_a_caller_that_goes_takes_nothing_back():
    async with serving() as world:
        asking = world.begun()
        await world.at("loading")
        asking.cancel()
        await world.settled()
        assert world.served == ["two"] and ("load", "two", "ok") in world.told


@scenario
async def test_progress_is_told_as_it_comes():
    async with serving() as world:
        watching = asyncio.ensure_future(_all(world.service.model_changes(ADMIN)))
        assert len(await watching) == 1, "nothing is under way"
        change = world.begun()
        await world.at("loading")
        seen = await _all(world.service.model_changes(ADMIN))
        await change
        assert seen[0].change.model == "two" and seen[0].change.key_id == "root"
        assert seen[-1].change is None and seen[-1].last_change.outcome == "ok"
        assert seen[-1].last_change.stages[0].total == 10 and seen[-1].loadable == ("one", "two", "bad")


async def _all(events):
    return [event async for event in events]


@scenario
async def test_the_end_of_the_server_gives_up_a_load_and_lets_calls_end():
    goes = threading.Event()

    def waits(progress):
        goes.wait(10)
        progress("load", 6, 10)
        return FakeLLM()

    async with serving(Script(two=[waits])) as world:
        events = world.stream(100)
        await anext(events)
        change = world.begun()
        await world.at("loading")
        draining = asyncio.ensure_future(world.service.drain(20))
        error = await world.refusal(change)
        assert error.kind is Kind.UNAVAILABLE and world.lifecycle.state is State.DRAINING
        assert isinstance([event async for event in events][-1], Ended) and await draining == 0
        goes.set()
        await asyncio.sleep(0.05)
        assert world.served == ["one"] and world.lifecycle.state is State.DRAINING


@scenario
async def test_the_end_of_the_server_waits_for_calls_of_both_models():
    async with serving() as world:
        old = world.stream(100)
        await anext(old)
        await world.load()
        new = world.stream(100)
        await anext(new)
        draining = asyncio.ensure_future(world.service.drain(20))
        for events in (old, new):
            assert isinstance([event async for event in events][-1], Ended)
        assert await draining == 0


@scenario
async def test_what_outlasts_the_grace_is_ended_on_both_models():
    async with serving() as world:
        streams = [world.stream()]
        await anext(streams[0])
        await world.load()
        streams.append(world.stream())
        await anext(streams[1])
        assert await world.service.drain(0.05) == 2
        for events in streams:
            with pytest.raises(ServiceError, match="shutting down"):
                await _all(events)


@scenario
async def test_the_death_of_the_model_that_serves_is_the_servers_during_a_change_too():
    logging.disable(logging.CRITICAL)
    goes, dying = threading.Event(), threading.Event()

    def step():
        slow()
        if dying.is_set():
            raise SystemExit

    def waits(progress):
        goes.wait(10)
        return FakeLLM()

    try:
        async with serving(Script(one=[FakeLLM(step)], two=[waits])) as world:
            events = world.stream()
            await anext(events)
            change = world.begun()
            await world.at("loading")
            dying.set()
            with pytest.raises(ServiceError) as caught:
                await _all(events)
            assert caught.value.kind is Kind.UNAVAILABLE and world.lifecycle.state is State.FAILED
            goes.set()
            assert (await world.refusal(change)).kind is Kind.UNAVAILABLE
            assert world.lifecycle.state is State.FAILED
    finally:
        goes.set()
        logging.disable(logging.NOTSET)


@scenario
async def test_an_old_model_that_hangs_fails_its_own_calls_and_nobody_elses():
    release, stuck = threading.Event(), threading.Event()

    def step():
        slow()
        if stuck.is_set():
            release.wait(20)

    logging.disable(logging.CRITICAL)
    try:
        async with serving(Script(one=[FakeLLM(step)]), stuck_after_s=0.2) as world:
            events = world.stream()
            await anext(events)
            await world.load()
            stuck.set()
            with pytest.raises(ServiceError, match="in step for"):
                await _all(events)
            assert world.lifecycle.state is State.SERVING and await world.answer() == "abc"
            await until(lambda: world.changes[-1].action == "retire")
            assert not world.changes[-1].freed, "a thread that hangs holds it"
            release.set()
    finally:
        release.set()
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("way", ["unload", "in place"])
def test_an_old_model_that_hangs_with_nothing_beside_it_is_the_servers_end(way, no_logs):
    release, stuck = threading.Event(), threading.Event()

    def step():
        slow()
        if stuck.is_set():
            release.wait(20)

    async def scene():
        async with serving(Script(one=[FakeLLM(step)]), stuck_after_s=0.2) as world:
            events = world.stream()
            await anext(events)
            stuck.set()
            asking = world.load(drain_first=True)
            if way == "unload":
                asking.close()
                asking = world.service.unload_model(UnloadCall(), ADMIN)
            error = await world.refusal(asking)
            assert error.kind is Kind.INTERNAL and "does not end" in str(error)
            assert world.lifecycle.state is State.FAILED and "in step" in world.lifecycle.reason
            assert len(world.script.loads) == 1
            release.set()

    try:
        asyncio.run(asyncio.wait_for(scene(), 30))
    finally:
        release.set()


@scenario
async def test_who_asked_about_a_model_finds_it_when_they_call():
    async with serving() as world:
        pinned = world.service.pinned()
        assert [card.id for card in pinned.models()] == ["one"]
        await world.load()
        await asyncio.sleep(0.1)
        assert world.status.change.step == "retiring"
        call = GenerateCall(Prompt(text="ab"), SamplingParams(max_tokens=3), CallInfo(model="one"))
        assert isinstance([event async for event in pinned.generate(call, ANYBODY)][-1], Ended)
        await world.settled()


@scenario
async def test_the_stage_of_a_load_is_told_until_the_model_serves():
    goes = threading.Event()

    def waits(progress):
        goes.wait(10)
        return FakeLLM()

    async with serving(Script(two=[waits])) as world:
        assert world.service.stage is None
        change = world.begun()
        await until(lambda: world.service.stage is not None)
        assert (world.service.stage.name, world.service.stage.done) == ("load", 5)
        goes.set()
        await change
        assert world.service.stage is None


@scenario
async def test_a_model_that_was_asked_about_and_is_gone_is_not_the_one_a_call_goes_to():
    async with serving() as world:
        pinned = world.service.pinned()
        assert [card.id for card in pinned.models()] == ["one"]
        await world.load()
        await world.settled()
        call = GenerateCall(Prompt(text="ab"), SamplingParams(max_tokens=3))
        assert [event async for event in pinned.generate(call, ANYBODY)]
        assert [card.id for card in pinned.models()] == ["two"]


@scenario
async def test_a_load_that_takes_too_long_is_given_up():
    def waits(progress):
        while True:
            threading.Event().wait(0.01)
            progress("load", 1, 10)

    async with serving(Script(two=[waits]), load_after_s=0.2) as world:
        error = await world.refusal(world.load())
        assert error.kind is Kind.INTERNAL and "0.2 s" in str(error)
        assert await world.answer() == "abc" and world.served == ["one"]


@scenario
async def test_a_server_that_is_stopped_while_it_starts_begins_nothing():
    goes = threading.Event()

    def waits(progress):
        goes.wait(10)
        progress("load", 6, 10)

    world = World(Script(one=[waits]))
    world.service.start()
    await world.at("loading")
    assert (await world.refusal(world.load())).kind is Kind.CONFLICT
    assert not await world.service.stop(0.05)
    assert world.lifecycle.state is State.STOPPED
    goes.set()
    await asyncio.sleep(0.05)
    assert world.states == [State.STOPPED]


class Chance:
    """A service under commands drawn by `seed`: streams that are read or left, and changes of all kinds and fates."""

    def __init__(self, world, seed):
        self.world, self.draw = world, random.Random(seed)
        self.streams, self.changes, self.outcomes = [], [], []

    async def go(self, num_commands):
        commands = (self.open, self.open, self.read, self.leave, self.load, self.unload, self.rest)
        for _ in range(num_commands):
            await self.draw.choice(commands)()
            self.check()
        for stream in self.streams:
            self.outcomes.append(await self.ended(stream))
        for change in self.changes:
            self.outcomes.append(await self.ended(change))

    def check(self):
        serves = self.world.lifecycle.state is State.SERVING
        assert bool(self.world.served) is serves, "a model is told of if and only if one serves"
        assert sum(llm is not None for llm in self.world.script.made) <= 3

    async def ended(self, events):
        try:
            if asyncio.isfuture(events):
                return (await events).state
            return "ok" if [event async for event in events] else "read before"
        except ServiceError as error:
            return error.kind.value

    async def open(self):
        self.streams.append(self.world.stream(self.draw.randint(1, 60)))
        await self.pull(self.streams[-1])

    async def pull(self, stream):
        try:
            await anext(stream, None)
        except ServiceError as error:
            self.outcomes.append(error.kind.value)

    async def read(self):
        if self.streams:
            await self.pull(self.draw.choice(self.streams))

    async def leave(self):
        if self.streams:
            await self.streams.pop(self.draw.randrange(len(self.streams))).aclose()

    async def load(self):
        options = {"drain_first": self.draw.choice([None, False, True]), "grace_s": self.draw.choice([None, 0, 0.02])}
        if self.draw.random() < 0.3:
            fault = self.draw.choice([ConfigError("wrong; mend it."), RuntimeError("a fault"), MemoryError()])
            self.world.script.steps["bad"] = [fault] * 2
            self.changes.append(self.world.begun("bad", **options))
        else:
            self.changes.append(self.world.begun(self.draw.choice(["one", "two", ""]), **options))
        await asyncio.sleep(0)

    async def unload(self):
        call = UnloadCall(self.draw.choice([None, 0, 0.02]))
        self.changes.append(asyncio.ensure_future(self.world.service.unload_model(call, ADMIN)))
        await asyncio.sleep(0)

    async def rest(self):
        await asyncio.sleep(self.draw.uniform(0, 0.03))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_calls_and_changes_end_and_one_model_is_left(seed, no_logs):
    async def scene():
        async with serving() as world:
            chance = Chance(world, seed)
            await chance.go(80)
            await world.settled()
            assert set(chance.outcomes) <= {
                *("ok", "read before", "serving", "unloaded", "unavailable", "conflict", "invalid", "internal"),
                *("loading", "warming"),
            }
            assert world.service.num_calls == 0
            await world.load("two")
            await world.settled()
            assert world.served == ["two"] and await world.answer() == "abc"
            gc.collect()
            assert sum(llm is not None for llm in world.script.made) == 1
            assert sum(thread.name == "engine" for thread in threading.enumerate()) == 1
            assert all(change.freed for change in world.changes)

    asyncio.run(asyncio.wait_for(scene(), 60))
