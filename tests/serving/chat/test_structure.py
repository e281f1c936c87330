# SPDX-License-Identifier: Apache-2.0
"""Calls that are asked for are calls, whoever draws them; free text may hold any."""

import json

import jsonschema
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from serving.chat.dialects.registry import DIALECTS, dialect_named
from serving.chat.messages import openai_messages
from serving.chat.parts import Whole, whole
from serving.chat.plan import Chat, ChatPlan, plan
from serving.chat.tools import openai_tools
from tests.serving.chat.drawing import byte_tokenizer, drawn, special_tokens
from tests.serving.chat.models import (
    CITY,
    MISTRAL_NEW,
    OPENED,
    QWEN,
    SUM,
    TEMPLATES,
    TOOLS,
    TOOLS_ONLY,
    chat_model,
    openai_tool,
)
from tests.serving.chat.test_parser import ONE

SCHEMAS = {"weather": CITY, "sum": SUM}
PLAIN = byte_tokenizer()
HELLO = openai_messages([{"role": "user", "content": "hello"}])
SEEDS = range(4)


def planned(template: str, body: dict, tokenizer=PLAIN, **params) -> ChatPlan:
    """The plan for a chat with these tools."""
    model = chat_model(template, special_tokens(tokenizer))
    return plan(Chat(HELLO, openai_tools({"tools": TOOLS, **body})), model, SamplingParams(**params))


def read(made: ChatPlan, text: str) -> Whole:
    """The answer's parts."""
    parser = made.parser()
    return whole(parser.feed(text) + parser.end())


def check_calls(said: Whole) -> None:
    """Every call's arguments are what its tool's schema wants."""
    assert said.calls
    for call in said.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def tokenizers(name: str):
    """One that spells the words of the format, and one where they are special tokens."""
    return PLAIN, byte_tokenizer(dialect_named(name).words)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_required_answer_is_calls_and_nothing_else(name, special, seed):
    tokenizer = tokenizers(name)[special]
    made = planned(TEMPLATES[name], {"tool_choice": "required"}, tokenizer)
    assert made.constrained and made.params.skip_special_tokens == (not dialect_named(name).words or not special)
    said = read(made, drawn(made.params.grammar, tokenizer, seed))
    check_calls(said)
    assert said.content == ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_named_tool_is_called_once(name, seed):
    made = planned(TEMPLATES[name], {"tool_choice": {"type": "function", "function": {"name": "sum"}}})
    said = read(made, drawn(made.params.grammar, PLAIN, seed))
    check_calls(said)
    assert [call.name for call in said.calls] == ["sum"] and said.content == ""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("special", [0, 1])
def test_newer_models_of_mistral_write_names_first(special, seed):
    tokenizer = tokenizers("mistral")[special]
    made = planned(MISTRAL_NEW, {"tool_choice": "required"}, tokenizer)
    text = drawn(made.params.grammar, tokenizer, seed)
    assert "[ARGS]" in text
    check_calls(read(made, text))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("special", [0, 1])
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_call_that_the_model_begins_itself_is_well_formed(name, special, seed):
    tokenizer = tokenizers(name)[special]
    made = planned(TEMPLATES[name], {}, tokenizer)
    whole_call = ONE[name]
    begin = "Hm.\n" + whole_call[: whole_call.index("weather")]
    if name == "llama3":
        begin = '<|python_tag|>{"name": "' if special else '{ "name": "weather", "parameters": {'
    said = read(made, drawn(made.params.grammar, tokenizer, seed, begin))
    check_calls(said)
    assert said.content == ("" if name == "llama3" else "Hm.")


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_text_without_a_call_is_free(name):
    made = planned(TEMPLATES[name], {})
    text = 'Well, {"a": 1} < 5 <tool_cal ```py\n [TOOL_CALL] \u00e9 {"name": "Bob"}'
    said = read(made, drawn(made.params.grammar, PLAIN, 0, text + "</s>"))
    assert said.content == text and not said.calls


def test_one_call_is_one():
    made = planned(TOOLS_ONLY, {"tool_choice": "required", "parallel_tool_calls": False})
    assert all(len(read(made, drawn(made.params.grammar, PLAIN, seed)).calls) == 1 for seed in range(8))
    several = planned(TOOLS_ONLY, {"tool_choice": "required"})
    assert any(len(read(several, drawn(several.params.grammar, PLAIN, seed)).calls) > 1 for seed in range(8))


def test_only_allowed_tools_are_called():
    names = [{"type": "function", "function": {"name": "sum"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    made = planned(TOOLS_ONLY, {"tool_choice": choice})
    assert len(made.template["tools"]) == 2
    for seed in SEEDS:
        assert {call.name for call in read(made, drawn(made.params.grammar, PLAIN, seed)).calls} == {"sum"}


@pytest.mark.parametrize("seed", SEEDS)
def test_reasoning_comes_before_required_calls(seed):
    made = planned(OPENED, {"tool_choice": "required"})
    said = read(made, drawn(made.params.grammar, PLAIN, seed, "so <tool_call> it is</think>\n\n<tool"))
    check_calls(said)
    assert said.reasoning == "so <tool_call> it is"


@pytest.mark.parametrize("thought", ["<think>\nhm <tool_call></think>\n\n", ""])
def test_reasoning_that_the_model_opens_itself_may_be_left_out(thought):
    made = planned(QWEN, {"tool_choice": "required"})
    said = read(made, drawn(made.params.grammar, PLAIN, 1, thought + "<tool_call>"))
    check_calls(said)
    assert said.reasoning == ("hm <tool_call>" if thought else "")


def test_text_may_end_within_reasoning():
    made = planned(QWEN, {})
    said = read(made, drawn(made.params.grammar, PLAIN, 0, "<think>hm <tool_call> and</s>"))
    assert said.reasoning == "hm <tool_call> and" and not said.calls


def test_a_structure_of_content_stands_behind_reasoning_and_beside_calls():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    made = planned(OPENED, {}, json_schema=schema)
    said = read(made, drawn(made.params.grammar, PLAIN, 0, 'hm</think>{"a": 5}</s>'))
    assert (said.reasoning, said.content) == ("hm", '{"a": 5}')
    check_calls(read(made, drawn(made.params.grammar, PLAIN, 0, "hm</think><tool_call>")))
    with pytest.raises(AssertionError, match="may not go on"):
        drawn(made.params.grammar, PLAIN, 0, "hm</think>No.")


@pytest.mark.parametrize(("field", "text"), [("regex", "abc"), ("choice", "abc"), ("json_schema", '{"a": 1}')])
def test_every_structure_stands_behind_reasoning(field, text):
    given = {"regex": "[a-c]+", "choice": ["abc", 'x"y'], "json_schema": {"type": "object"}}[field]
    model = chat_model(OPENED, special_tokens(PLAIN))
    made = plan(Chat(HELLO), model, SamplingParams(**{field: given}))
    said = read(made, drawn(made.params.grammar, PLAIN, 0, f"hm</think>\n\n{text}</s>"))
    assert (said.reasoning, said.content) == ("hm", text)


@pytest.mark.parametrize("template", [TEMPLATES["hermes"], QWEN])
@pytest.mark.parametrize("blanks", ["\n", " ", "\n\n\n"])
def test_what_is_chosen_from_is_not_put_off_by_blanks(template, blanks):
    made = planned(template, {}, choice=["x", "y"])
    assert drawn(made.params.grammar, PLAIN, 1, "x") == "x"
    with pytest.raises(AssertionError, match="may not go on"):
        drawn(made.params.grammar, PLAIN, 1, f"{blanks}x")


def test_thoughts_stand_before_what_is_chosen_from_with_few_blanks_around_them():
    made = planned(QWEN, {}, choice=["x", "y"])
    text = drawn(made.params.grammar, PLAIN, 1, "\n\n<think>hm</think>\n\nx")
    assert read(made, text).content == "x"
    with pytest.raises(AssertionError, match="may not go on"):
        drawn(made.params.grammar, PLAIN, 1, "\n\n\n<think>")


def test_two_structures_are_refused_where_they_cannot_be_told_apart():
    with pytest.raises(RequestError, match="calls are JSON as well"):
        planned(TEMPLATES["llama3"], {}, json_schema={"type": "object"})
    with pytest.raises(RequestError, match="grammar and tools"):
        planned(QWEN, {}, grammar='start: "a"')


def test_keywords_that_cannot_be_enforced_are_passed_over_unless_strict():
    odd = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}
    for strict in (False, True):
        for name in ("hermes", "gemma"):
            body = {"tools": [openai_tool("odd", odd, strict=strict)], "tool_choice": "required"}
            if not strict:
                made = planned(TEMPLATES[name], body)
                assert read(made, drawn(made.params.grammar, PLAIN, 0)).calls[0].name == "odd"
                continue
            with pytest.raises(RequestError, match="not"):
                drawn(planned(TEMPLATES[name], body).params.grammar, PLAIN, 0)


def test_schemas_of_function_gemma_may_refer_and_choose():
    schema = {
        "type": "object",
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]}},
        "properties": {
            "at": {"$ref": "#/$defs/p"},
            "as": {"anyOf": [{"const": "a b"}, {"type": "number", "minimum": 0, "maximum": 1}]},
            "any": {},
            "tags": {"type": "array", "items": {"enum": ["u", "v"]}, "minItems": 2, "maxItems": 3},
        },
        "required": ["at", "as", "tags"],
    }
    body = {"tools": [openai_tool("put", schema)], "tool_choice": "required", "parallel_tool_calls": False}
    made = planned(TEMPLATES["gemma"], body)
    seen = set()
    for seed in range(12):
        [call] = read(made, drawn(made.params.grammar, PLAIN, seed)).calls
        jsonschema.validate(json.loads(call.arguments), schema)
        seen |= json.loads(call.arguments).keys()
    assert seen == {"at", "as", "any", "tags"}


def test_long_schemas_leave_free_what_is_not_required():
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(4000)}}
    body = {"tools": [openai_tool("wide", wide)]}
    assert not planned(QWEN, body).constrained
    with pytest.raises(RequestError, match="over the limit.*shorten their schemas"):
        planned(QWEN, {**body, "tool_choice": "required"})
