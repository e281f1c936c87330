# SPDX-License-Identifier: Apache-2.0
"""Real models that are made to call tools, in every dialect: arguments are what the schemas want."""

import json

import jsonschema
import pytest

from metrale_jax import LLM
from metrale_jax.sampling.params import SamplingParams
from serving.chat.dialects.registry import DIALECTS
from serving.chat.messages import openai_messages
from serving.chat.parts import whole
from serving.chat.plan import Chat, ChatPlan, plan
from serving.chat.tools import openai_tools
from serving.core.cards import chat_model
from tests.serving.chat.models import CITY, SUM, TOOLS
from tests.serving.tiny_chat import write_tiny_chat

SCHEMAS = {"weather": CITY, "sum": SUM}
CHAT = openai_messages([{"role": "user", "content": "What is the weather in Ulm?"}])
NAMED = {"type": "function", "function": {"name": "sum"}}
SEEDS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights: it draws whatever it may."""
    return LLM(write_tiny_chat(tmp_path_factory.mktemp("tiny")), max_sequences=4, max_context_tokens=512)


@pytest.fixture(scope="module")
def smollm2():
    return LLM("smollm2-135m", max_sequences=6, max_context_tokens=1024, prefill_tokens=64)


def planned(llm: LLM, dialect: str, choice, **params) -> ChatPlan:
    tools = openai_tools({"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False})
    return plan(Chat(CHAT, tools), chat_model(llm), SamplingParams(**params), dialect)


def check(made: ChatPlan, text: str, names: tuple[str, ...]) -> None:
    parser = made.parser()
    said = whole(parser.feed(text) + parser.end())
    [call] = said.calls
    assert call.name in names and said.content == ""
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize(("choice", "names"), [("required", ("weather", "sum")), (NAMED, ("sum",))])
def test_random_weights_call_tools_in_every_dialect(tiny, choice, names):
    plans = [planned(tiny, name, choice, max_tokens=None, n=SEEDS, seed=3) for name in sorted(DIALECTS)]
    for made, result in zip(plans, tiny.generate(["Ulm"] * len(plans), [one.params for one in plans]), strict=True):
        for answer in result.choices:
            assert answer.finish_reason == "stop"
            check(made, answer.text, names)


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "names"), [("required", ("weather", "sum")), (NAMED, ("sum",))])
def test_smollm2_calls_tools_in_every_dialect(smollm2, choice, names):
    plans = [planned(smollm2, name, choice, max_tokens=200, seed=5) for name in sorted(DIALECTS)]
    prompts = [smollm2.chat_tokens(made.messages, **made.template) for made in plans]
    for made, result in zip(plans, smollm2.generate(prompts, [one.params for one in plans]), strict=True):
        assert result.finish_reason == "stop"
        check(made, result.text, names)


@pytest.mark.slow
def test_smollm2_answers_in_words_where_it_may(smollm2):
    made = planned(smollm2, "", "auto", max_tokens=12, temperature=0.0)
    assert made.constrained
    prompt = smollm2.chat_tokens(openai_messages([{"role": "user", "content": "Say hello."}]))
    result = smollm2.generate([prompt], made.params)[0]
    free = smollm2.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))[0]
    parser = made.parser()
    said = whole(parser.feed(result.text) + parser.end())
    assert said.content == result.text == free.text and not said.calls
