# SPDX-License-Identifier: Apache-2.0
"""Messages with calls and their results: checked, and told to models of every kind."""

import json

import pytest

from metrale_jax.core.errors import ConfigError, RequestError
from metrale_jax.sampling.params import SamplingParams
from serving.chat.dialects.registry import DIALECTS, OTHERWISE, dialect_named, dialect_of
from serving.chat.messages import openai_messages
from serving.chat.parser import AnswerParser
from serving.chat.parts import whole
from serving.chat.plan import Chat, plan
from serving.chat.tools import openai_tools
from tests.serving.chat.models import BY_NAME, CHATML, GEMMA, MISTRAL_NEW, TEMPLATES, TOOLS, chat_model


def call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Weather?"}
ASKED = call("call_1", "weather", '{"city": "Ulm", "unit": "C"}')
ADDED = call("call_2", "sum", '{"of": [1, 2]}')
HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [ASKED, ADDED]},
    {"role": "tool", "tool_call_id": "call_2", "content": "three"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
]


def prompt(template: str, messages: list[dict], **body) -> str:
    """What the model reads."""
    model = chat_model(template)
    made = plan(Chat(openai_messages(messages), openai_tools({"tools": TOOLS, **body})), model, SamplingParams())
    return model.render(list(made.messages), **made.template)


def test_calls_have_their_arguments_as_data_and_results_their_tools_name():
    messages = openai_messages(HISTORY)
    assert messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Ulm", "unit": "C"}}
    assert messages[2]["content"] == ""
    assert [(one["name"], one["content"]) for one in messages[3:]] == [("sum", "three"), ("weather", "sunny")]


def test_older_names_of_roles_and_calls_are_understood():
    messages = openai_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "function_call": {"name": "sum", "arguments": "{}"}},
            {"role": "function", "name": "sum", "content": "3"},
            {"role": "assistant", "content": "So.", "reasoning": "hm", "refusal": None, "annotations": []},
        ]
    )
    assert messages[0]["role"] == "system"
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    assert messages[2]["role"] == "tool"
    assert messages[3] == {"role": "assistant", "content": "So.", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (5, "messages[0]"),
        ("x", "messages[0]"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call("a", "", "{}")]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call("a", "b", 5)]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("a", "b", [1])]}, "messages[0].tool_calls[0].function.arguments"),
        ({"role": "assistant", "function_call": 3}, "messages[0].function_call"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(message, field):
    with pytest.raises(RequestError) as raised:
        openai_messages([message])
    assert raised.value.field == field


def test_a_message_that_is_no_object_is_told_and_every_role_there_is():
    with pytest.raises(RequestError, match=r"^messages\[0\]='x' is no object; give one with role and content\.$"):
        openai_messages(["x"])
    with pytest.raises(RequestError, match="one of system, user, assistant, tool, developer, function;"):
        openai_messages([{"role": "robot", "content": "x"}])
    with pytest.raises(RequestError, match="='x' is no object; give parts of type text"):
        openai_messages([{"role": "user", "content": ["x"]}])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "Well, "}, {"type": "refusal", "refusal": "no."}]}, "Well, no."),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
    ],
)
def test_what_an_answer_may_be_is_taken_back(message, text):
    assert openai_messages([{"role": "assistant"} | message]) == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("broken", ["{bad", '{"city": "Ul', "", "[1]", "5", "[" * 100_000])
@pytest.mark.parametrize("template", [*TEMPLATES.values(), MISTRAL_NEW, CHATML])
def test_a_chat_goes_on_behind_a_call_that_broke_off(template, broken):
    called = {"role": "assistant", "content": None, "tool_calls": [call("call_1", "weather", broken)]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "not JSON"}
    for history in ([USER, called, USER], [USER, called, result]):
        text = prompt(template, history)
        assert "weather" in text.partition("Weather?")[2]
        if broken in ("{bad", "[1]", "5"):
            assert broken in text.partition("Weather?")[2]


def test_of_several_calls_only_the_one_that_broke_off_is_told_as_text():
    called = {"role": "assistant", "content": "Hm.", "tool_calls": [ASKED, call("call_2", "sum", '{"of": [1')]}
    text = prompt(TEMPLATES["hermes"], [USER, called, HISTORY[4]])
    assert 'Hm.\nsum({"of": [1<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"' in text


def test_images_are_refused_by_name():
    with pytest.raises(RequestError, match="image_url"):
        openai_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_is_recognised_as_its_dialects(name):
    assert type(dialect_of(TEMPLATES[name])) is type(dialect_named(name))
    assert type(dialect_of(CHATML)) is type(dialect_named(OTHERWISE))


def test_a_dialect_that_is_none_is_told():
    with pytest.raises(ConfigError, match="tool_dialect='x' is no dialect; use one of"):
        dialect_named("x")


@pytest.mark.parametrize("template", [*TEMPLATES.values(), MISTRAL_NEW, CHATML])
def test_every_model_reads_its_tools_the_calls_and_their_results(template):
    text = prompt(template, HISTORY if template is not GEMMA else HISTORY[1:])
    for word in ("weather", "Ulm", "sum", "three", "sunny"):
        assert word in text
    assert text.index("Weather?") < text.index("Ulm") < text.index("sunny")


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_what_is_spelt_for_a_model_is_read_back(name):
    dialect = dialect_named(name)
    calls = openai_messages(HISTORY)[2]["tool_calls"]
    parser = AnswerParser(dialect, BY_NAME)
    said = whole(parser.feed(dialect.spelt_calls(calls)) + parser.end())
    assert [(one.name, json.loads(one.arguments)) for one in said.calls] == [
        ("weather", {"city": "Ulm", "unit": "C"}),
        ("sum", {"of": [1, 2]}),
    ]
    assert said.content == ""


def test_a_model_that_knows_no_tools_is_told_in_its_system_message():
    text = prompt(CHATML, HISTORY)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert "<|im_start|>tool" not in text and text.count("<tool_response>") == 2
    assert text.count("<|im_start|>user") == 2
    assert prompt(CHATML, [USER]).startswith("<|im_start|>system\nYou can call functions.")


def test_a_model_that_knows_no_system_message_is_told_in_the_first():
    assert prompt(GEMMA, [USER]).startswith("<s><start_of_turn>user\nWeather?\n\nYou can call functions.")


@pytest.mark.parametrize("template", [CHATML, TEMPLATES["hermes"]])
def test_tools_that_are_not_to_be_called_are_not_told(template):
    assert "weather" not in prompt(template, [USER], tool_choice="none")


def test_llama_gets_one_call_a_message_and_its_result_behind_it():
    text = prompt(TEMPLATES["llama3"], HISTORY)
    places = [text.index(word) for word in ('"name": "weather", "parameters"', "sunny", '"name": "sum", "p', "three")]
    assert places == sorted(places)


def test_mistral_gets_ids_of_nine_letters_that_belong_together():
    [made] = [one for one in dialect_named("mistral").fitted(openai_messages(HISTORY)) if one.get("tool_calls")]
    results = [one for one in dialect_named("mistral").fitted(openai_messages(HISTORY)) if one["role"] == "tool"]
    ids = [one["id"] for one in made["tool_calls"]]
    assert {one["tool_call_id"] for one in results} == set(ids) and len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    kept = {"role": "tool", "tool_call_id": "abc123DEF"}
    assert dialect_named("mistral").fitted([kept]) == [kept]
