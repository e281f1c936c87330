# SPDX-License-Identifier: Apache-2.0
"""Plans: what is asked of the service for a chat, and that nothing changes where there is nothing to change."""

import pytest

from metrale_jax.core.errors import TextError
from metrale_jax.sampling.params import SamplingParams
from serving.chat.messages import openai_messages
from serving.chat.model import ChatModel
from serving.chat.parts import Content, Reasoning, whole
from serving.chat.plan import Chat, plan
from serving.chat.reasoning import ReasoningOptions
from serving.chat.tools import openai_tools
from tests.serving.chat.models import BARE, CHATML, OPENED, QWEN, TEMPLATES, TOOLS, chat_model

HELLO = openai_messages([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("template", [CHATML, *TEMPLATES.values()])
def test_without_tools_and_reasoning_everything_stays_as_it_is(template):
    params = SamplingParams(json_schema={"type": "object"}, stop="x")
    made = plan(Chat(HELLO), chat_model(template, {"[TOOL_CALLS]": 5, "<|python_tag|>": 6}), params)
    assert made.params is params and made.messages == tuple(HELLO) and made.template == {} and not made.constrained
    text = ' <think> <tool_call>{"name": "weather", "arguments": {}}</tool_call> [TOOL_CALLS][] '
    parser = made.parser()
    assert parser.feed(text) + parser.end() == [Content(text)]


def test_reasoning_alone_leaves_the_params_as_they_are():
    params = SamplingParams()
    made = plan(Chat(HELLO), chat_model(QWEN), params)
    assert made.params is params
    parser = made.parser()
    assert parser.feed("<think>hm</think>Yes") + parser.end() == [Reasoning("hm"), Content("Yes")]


@pytest.mark.parametrize(
    ("template", "enabled", "opened"),
    [(QWEN, None, False), (QWEN, False, False), (OPENED, None, True), (BARE, None, True)],
)
def test_reasoning_that_the_prompt_has_opened_is_seen(template, enabled, opened):
    made = plan(Chat(HELLO, reasoning=ReasoningOptions(enabled)), chat_model(template), SamplingParams())
    parser = made.parser()
    said = whole(parser.feed("hm</think>Yes") + parser.end())
    assert said.reasoning == ("hm" if opened else "")


@pytest.mark.parametrize(
    ("begun", "opened"), [("<think>\nHm", True), ("<think>\nHm\n</think>\nSo", False), ("So", False)]
)
def test_reasoning_that_is_gone_on_with_is_seen(begun, opened):
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": begun}]
    options = ReasoningOptions(variables={"continue_final_message": True})
    made = plan(Chat(messages, reasoning=options), chat_model(QWEN), SamplingParams())
    parser = made.parser()
    assert parser.feed("more") + parser.end() == [Reasoning("more") if opened else Content("more")]


def test_words_that_are_special_tokens_are_shown_and_the_others_left_out():
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "</s>": 2, "<s>": 1}
    made = plan(
        Chat(HELLO, openai_tools({"tools": TOOLS})), chat_model(TEMPLATES["mistral"], special), SamplingParams()
    )
    assert not made.params.skip_special_tokens and "<[5]>" in made.params.grammar
    parser = made.parser()
    said = whole(
        parser.feed('Hm.</s>[TOOL_CALLS][{"name": "sum", "arguments": {}}]</') + parser.feed("s>") + parser.end()
    )
    assert said.content == "Hm." and [call.name for call in said.calls] == ["sum"]


def test_who_wants_special_tokens_gets_them_all():
    special = {"[TOOL_CALLS]": 5, "</s>": 2}
    params = SamplingParams(skip_special_tokens=False)
    made = plan(Chat(HELLO, openai_tools({"tools": TOOLS})), chat_model(TEMPLATES["mistral"], special), params)
    parser = made.parser()
    assert parser.feed("Hm.</s>") + parser.end() == [Content("Hm.</s>")]


def test_a_dialect_asked_for_by_name_is_used():
    made = plan(Chat(HELLO, openai_tools({"tools": TOOLS})), chat_model(CHATML), SamplingParams(), "mistral")
    assert "[TOOL_CALLS]" in made.messages[0]["content"]


def test_a_model_without_a_template_is_left_to_say_so():
    model = ChatModel()
    made = plan(Chat(HELLO, openai_tools({"tools": TOOLS})), model, SamplingParams())
    with pytest.raises(TextError, match="no chat template"):
        model.render(list(made.messages))
