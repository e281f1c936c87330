# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI against a whole server over a tiny model."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from metrale_jax import LLM, SamplingParams
from tests.serving.http.fronts import run
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

COMPILING_S = 300
CHAT = [SystemMessage("Be brief."), HumanMessage("Tell me a story.")]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}]
QUESTIONS = ["Who are you?", "What is seven times six?", "Warum?"]


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Bern", "Wien", "Zürich"] = Field(description="where")
    is_warm: bool
    wind: Literal[1, 2, 3]


@tool
def look_up(city: Literal["Bern", "Wien"], days: Literal[1, 2]) -> str:
    """The weather of some days."""
    return f"{city}: rain for {days} days"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    # A byte is a token, and what is said of tools is long.
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return LLM(directory, max_sequences=4, max_context_tokens=4096, prefill_tokens=256, kv_cache_mib=4)


def scene(model, test) -> None:
    """Runs `test(chat, server)` against a server that is quiet again afterwards."""

    async def whole():
        async with whole_server(model) as server:
            chat = ChatOpenAI(
                model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=12
            )
            await test(chat, server)
            await server.quiet()

    run(whole(), COMPILING_S)


def alone(model, messages, **params):
    """The model's own answer to a chat."""
    return model.generate(
        [model.chat_tokens(messages)], SamplingParams(**{"max_tokens": 12, "temperature": 0} | params)
    )[0]


def test_an_answer_comes_whole_and_in_pieces_with_what_it_took(model):
    async def check(chat, server):
        expected = alone(model, PLAIN)
        num_prompt, num_generated = len(model.chat_tokens(PLAIN)), len(expected.token_ids)
        whole, pieces = await asyncio.to_thread(chat.invoke, CHAT), []
        again = await chat.ainvoke(CHAT)
        streaming = chat.model_copy(update={"stream_usage": True})
        pieces = await asyncio.to_thread(lambda: list(streaming.stream(CHAT)))
        coming = [piece async for piece in streaming.astream(CHAT)]
        for answer in (whole, again, sum(pieces[1:], pieces[0]), sum(coming[1:], coming[0])):
            assert answer.content == expected.text and answer.response_metadata["finish_reason"] == "length"
            usage = answer.usage_metadata
            assert (usage["input_tokens"], usage["output_tokens"]) == (num_prompt, num_generated)
            assert usage["total_tokens"] == num_prompt + num_generated
        assert len([piece for piece in pieces if piece.content]) > 1
        assert whole.response_metadata["model_name"] == "tiny" and whole.usage_metadata["input_token_details"]

    scene(model, check)


def test_many_are_asked_at_once(model):
    async def check(chat, server):
        expected = [alone(model, [{"role": "user", "content": text}]).text for text in QUESTIONS]
        answers = await asyncio.to_thread(chat.batch, QUESTIONS)
        assert [answer.content for answer in answers] == expected
        assert [answer.content for answer in await chat.abatch(QUESTIONS)] == expected

    scene(model, check)


def test_parameters_and_log_probabilities_go_through(model):
    async def check(chat, server):
        drawn = {"temperature": 0.8, "seed": 11, "top_p": 0.9, "stop": ("e",)}
        expected = alone(model, PLAIN, logprobs=2, **drawn)
        told = await chat.bind(**drawn | {"stop": ["e"]}, logprobs=True, top_logprobs=2).ainvoke(CHAT)
        assert told.content == expected.text
        entries = told.response_metadata["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == pytest.approx([one.logprob for one in expected.logprobs])
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(expected.logprobs)
        several = await chat.agenerate([CHAT], n=2, temperature=0.9, seed=5)
        assert len({one.message.content for one in several.generations[0]}) == 2

    scene(model, check)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_have_the_structure_that_was_asked_for(method, model):
    async def check(chat, server):
        drawn = chat.model_copy(update={"temperature": 1.0, "max_tokens": 200})
        # A model of random weights goes on with whatever is not forbidden.
        asked = drawn.with_structured_output(Weather, method=method, strict=True)
        found = [await asked.ainvoke(CHAT, seed=seed) for seed in range(3)]
        assert all(isinstance(one, Weather) for one in found) and len(set(map(repr, found))) > 1
        assert isinstance(await asyncio.to_thread(asked.invoke, "The weather?"), Weather)
        schema = Weather.model_json_schema() | {"additionalProperties": False}
        raw = drawn.with_structured_output(schema, method=method, include_raw=True, strict=True)
        told = await raw.ainvoke(CHAT, seed=1)
        assert told["parsing_error"] is None and set(told["parsed"]) == {"city", "is_warm", "wind"}

    scene(model, check)


def test_tools_are_called_and_their_results_taken(model):
    async def check(chat, server):
        drawn = chat.model_copy(update={"temperature": 1.0, "max_tokens": 200})
        forced = drawn.bind_tools([look_up], tool_choice="any", strict=True, parallel_tool_calls=False)
        asked = [*CHAT, HumanMessage("And the weather?")]
        answer = await forced.ainvoke(asked, seed=3)
        [call] = answer.tool_calls
        assert call["name"] == "look_up" and not answer.invalid_tool_calls
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        pieces = [piece async for piece in forced.astream(asked, seed=3)]
        [same] = sum(pieces[1:], pieces[0]).tool_calls
        assert (same["name"], same["args"]) == (call["name"], call["args"])
        result = ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"])
        told = await drawn.bind_tools([look_up], tool_choice="none").ainvoke([*asked, answer, result])
        assert isinstance(told, AIMessage) and not told.tool_calls

    scene(model, check)


def test_what_is_refused_is_openais_error(model):
    async def check(chat, server):
        with pytest.raises(openai.BadRequestError, match="temperature=-1") as told:
            await chat.bind(temperature=-1).ainvoke(CHAT)
        assert told.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await chat.model_copy(update={"model_name": "other"}).ainvoke(CHAT)

    scene(model, check)
