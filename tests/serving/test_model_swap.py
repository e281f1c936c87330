# SPDX-License-Identifier: Apache-2.0
"""Two real models change places under load: no stream fails, each answer is one model's own, and memory comes back."""

import asyncio
import gc
import logging

import jax
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.llm_config import llm_config
from serving.client import AsyncClient, NotFoundError, RetryPolicy, UnavailableError
from serving.core.calls import Caller, CallInfo, GenerateCall, LoadCall, Prompt, UnloadCall
from serving.core.catalog import Catalog, Wanted
from serving.core.errors import Kind, ServiceError
from serving.core.events import Ended
from serving.core.lifecycle import State
from serving.core.service import ServiceSettings
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

SIZES = {"max_sequences": 4, "max_context_tokens": 256, "prefill_tokens": 32, "kv_cache_mib": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [f"Prompt number {n}, which is like no other." for n in range(6)]
ADMIN = Caller("root", admin=True)
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    place = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny_chat(place / name, seed) for name, seed in (("one", 7), ("two", 8))}


@pytest.fixture(scope="module")
def expected(directories):
    """Of each model the answer to each prompt, alone."""
    found = {}
    for name, directory in directories.items():
        llm = LLM(directory, **SIZES)
        found[name] = {prompt: llm.generate([prompt], SamplingParams(**GREEDY))[0].token_ids for prompt in PROMPTS}
    assert all(found["one"][prompt] != found["two"][prompt] for prompt in PROMPTS)
    return found


def made(wanted, progress):
    options = {name: getattr(wanted.config, name) for name in SIZES}
    return LLM(wanted.source, progress=progress, **options)


@pytest.fixture
def swapping(directories, expected):
    """A server that starts with "one" and may load "two", and two that cannot be loaded."""
    broken = write_tiny_chat(directories["one"].parent / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    first = Wanted("one", str(directories["one"]), llm_config(SIZES))
    others = {"two": str(directories["two"]), "broken": str(broken), "nowhere": str(broken / "none")}
    return lambda: whole_server(
        None,
        settings=ServiceSettings("one", warm_up=False),
        load=made,
        catalog=Catalog(first, True, others),
    )


@pytest.fixture
def no_logs(caplog):
    caplog.set_level(logging.CRITICAL)


async def change(server, model, **options):
    """Changes the model, and waits until the one before is gone."""
    await server.service.load_model(LoadCall(model, **options), ADMIN)
    await gone(server)


async def gone(server):
    async with asyncio.timeout(30):
        while server.service.model_status(ADMIN).change is not None:
            await asyncio.sleep(0.005)


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_under_load_no_stream_fails_and_each_answer_is_one_models_own(swapping, expected):
    answers, going = [], True

    async def ask(client, place):
        while going:
            prompt = PROMPTS[place % len(PROMPTS)]
            place += 1
            stream = client.stream(prompt, **GREEDY)
            async for _ in stream:
                pass
            answers.append((prompt, stream.result.token_ids))

    async def scene():
        nonlocal going
        async with swapping() as server, AsyncClient(server.target, timeout_s=60, retries=ONCE) as client:
            asking = [asyncio.ensure_future(ask(client, place)) for place in range(3)]
            for model, other in (("two", "one"), ("one", "two")):
                prompt = PROMPTS[3]
                under_way = client.stream(prompt, **GREEDY)
                await anext(under_way)
                await server.service.load_model(LoadCall(model), ADMIN)
                assert await client.health() == "SERVING"
                assert [card.id for card in await client.models()] == [model]
                later = await client.generate(prompt, **GREEDY)
                async for _ in under_way:
                    pass
                assert under_way.result.token_ids == expected[other][prompt]
                assert later.token_ids == expected[model][prompt]
                await gone(server)
            going = False
            await asyncio.gather(*asking)
            assert all(record.outcome == "ok" for record in server.records)
            retired = [record for record in server.changes if record.action == "retire"]
            assert len(retired) == 2 and all(record.freed and not record.calls_ended for record in retired)

    asyncio.run(scene())
    assert len(answers) > 10
    assert all(tokens in (expected["one"][prompt], expected["two"][prompt]) for prompt, tokens in answers)


def test_memory_is_that_of_one_model_and_none_after_an_unload(swapping):
    async def scene():
        found = [live_bytes()]
        async with swapping() as server, AsyncClient(server.target, timeout_s=60, retries=ONCE) as client:
            for model in ("two", "one", "two"):
                await client.generate(PROMPTS[0], **GREEDY)
                found.append(live_bytes())
                # A length of context is one model's, and "two" is to be as large.
                options = {"max_context_tokens": SIZES["max_context_tokens"]} if model == "two" else {}
                await change(server, model, drain_first=model == "two", options=options)
            await server.service.unload_model(UnloadCall(), ADMIN)
            found.append(live_bytes())
            with pytest.raises(UnavailableError, match="no model"):
                await client.generate(PROMPTS[0], **GREEDY)
            assert await client.health() == "NOT_SERVING" and not await client.models()
            assert all(record.freed for record in server.changes)
        return found

    nothing, *loaded, unloaded = asyncio.run(scene())
    assert nothing == unloaded and loaded[0] > nothing + 300_000 and len(set(loaded)) == 1


def test_nothing_of_the_old_model_answers_for_the_new_one(swapping, expected):
    async def scene():
        async with swapping() as server, AsyncClient(server.target, timeout_s=60, retries=ONCE) as client:
            before = (await client.models())[0]
            for _ in range(2):
                last = await client.generate(PROMPTS[0], **GREEDY)
            assert last.usage.cached_tokens >= 16
            await change(server, "two")
            after = (await client.models())[0]
            assert before.fingerprint != after.fingerprint and after.id == "two"
            first = await client.generate(PROMPTS[0], **GREEDY)
            assert first.usage.cached_tokens == 0 and first.token_ids == expected["two"][PROMPTS[0]]
            with pytest.raises(NotFoundError, match="two"):
                await client.generate(PROMPTS[0], model="one", **GREEDY)
            await change(server, "two", served_name="one")
            assert (await client.models())[0].fingerprint == after.fingerprint
            assert (await client.generate(PROMPTS[0], model="one", **GREEDY)).token_ids == first.token_ids

    asyncio.run(scene())


@pytest.mark.parametrize("drain_first", [False, True])
def test_a_load_that_fails_gives_the_old_model_back(swapping, expected, drain_first, no_logs):
    async def scene():
        async with swapping() as server, AsyncClient(server.target, timeout_s=60, retries=ONCE) as client:
            for wrong, options in (("broken", {}), ("nowhere", {}), ("two", {"kv_cache_mib": 1, "block_size": 7})):
                call = GenerateCall(Prompt(text=PROMPTS[1]), SamplingParams(**GREEDY), CallInfo())
                events = server.service.generate(call, ADMIN)
                await anext(events)
                with pytest.raises(ServiceError) as caught:
                    await server.service.load_model(LoadCall(wrong, options=options, drain_first=drain_first), ADMIN)
                assert caught.value.kind is Kind.INVALID, str(caught.value)
                ends = [event async for event in events if isinstance(event, Ended)]
                assert ends[0].result.token_ids == expected["one"][PROMPTS[1]]
                again = await client.generate(PROMPTS[2], **GREEDY)
                assert again.token_ids == expected["one"][PROMPTS[2]]
                assert server.lifecycle.state is State.SERVING and await client.health() == "SERVING"
            await change(server, "two")
            assert (await client.generate(PROMPTS[2], **GREEDY)).token_ids == expected["two"][PROMPTS[2]]

    asyncio.run(scene())


def test_progress_of_a_real_load_has_bytes_and_programs(swapping):
    async def scene():
        async with swapping() as server:
            await change(server, "two")
            return server.service.model_status(ADMIN).last_change

    stages = {stage.name: stage for stage in asyncio.run(scene()).stages}
    assert stages["load"].done == stages["load"].total > 1000
    assert stages["compile"].done == stages["compile"].total >= 1
