# SPDX-License-Identifier: Apache-2.0
"""What bodies say of tools: read, or refused by the name of the field."""

import pytest

from metrale_jax.core.errors import RequestError
from serving.chat.reasoning import openai_reasoning
from serving.chat.tools import ChatTools, Choice, Tool, openai_tools
from tests.serving.chat.models import CITY, TOOLS, openai_tool


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_read_with_their_schemas():
    read = openai_tools({"tools": [openai_tool("weather", CITY, strict=True), named("bare")]})
    weather, bare = read.tools
    assert (weather.name, weather.description, weather.schema, weather.strict) == ("weather", "d", CITY, True)
    assert list(weather.schema["properties"]) == list(CITY["properties"])
    assert bare.schema == {"type": "object", "properties": {}} and not bare.strict
    assert weather.shown == {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": CITY},
    }
    assert read.choice == Choice("auto") and read.parallel and read.callable == read.tools


def test_without_parameters_there_are_no_arguments():
    for given in ({}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}):
        tool = Tool.of({"name": "a", **given}, "t")
        assert tool.held == {"type": "object", "properties": {}, "additionalProperties": False}
        assert tool.schema == {"type": "object", "properties": {}}
    for given in ({"type": "object"}, {"properties": {}, "additionalProperties": {"type": "string"}}, CITY):
        assert Tool.of({"name": "a", "parameters": given}, "t").held == {"type": "object"} | given


def test_strict_schemas_are_closed_and_require_all_that_they_name():
    inner = {"type": ["object", "null"], "properties": {"c": {}}}
    given = {"properties": {"a": {"type": "array", "items": inner}, "b": {"$ref": "#/$defs/d"}}, "$defs": {"d": inner}}
    tool = Tool.of({"name": "a", "strict": True, "parameters": given | {"required": ["b"]}}, "t")
    held = {**inner, "additionalProperties": False, "required": ["c"]}
    assert tool.held == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": held}, "b": {"$ref": "#/$defs/d"}},
        "$defs": {"d": held},
        "required": ["b", "a"],
        "additionalProperties": False,
    }
    # As given it is what the model is shown, and another API leaves out what is not required.
    assert tool.schema == {"type": "object", "required": ["b"], **given}
    other = Tool.of({"name": "a", "strict": True, "input_schema": given}, "t", "input_schema")
    assert "required" not in other.held and other.held["additionalProperties"] is False


@pytest.mark.parametrize("extra", [True, {"type": "string"}, {}])
def test_strict_schemas_that_are_open_are_refused_by_name(extra):
    inner = {"type": "object", "additionalProperties": extra}
    with pytest.raises(RequestError, match="is not false, as strict has it; set it so, or leave strict out") as raised:
        openai_tools({"tools": [openai_tool("a", {"properties": {"b": {"anyOf": [inner]}}}, strict=True)]})
    assert raised.value.field == "tools[0].function.parameters.properties.b.anyOf[0].additionalProperties"


def test_without_tools_there_are_none():
    assert openai_tools({}) == openai_tools({"tools": [], "tool_choice": "none"}).__class__()
    assert openai_tools({"tools": None}).callable == ()


@pytest.mark.parametrize(
    ("choice", "read", "names"),
    [
        (None, Choice("auto"), ["weather", "sum"]),
        ("auto", Choice("auto"), ["weather", "sum"]),
        ("none", Choice("none"), []),
        ("required", Choice("required"), ["weather", "sum"]),
        (named("sum"), Choice("required", ("sum",), single=True), ["sum"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("sum")]}},
            Choice("auto", ("sum",)),
            ["sum"],
        ),
    ],
)
def test_the_choice_says_which_tools_may_be_called(choice, read, names):
    tools = openai_tools({"tools": TOOLS, "tool_choice": choice})
    assert tools.choice == read and [tool.name for tool in tools.callable] == names


def test_a_named_tool_legacy_functions_and_no_parallel_calls_mean_one_call():
    assert openai_tools({"tools": TOOLS, "tool_choice": named("sum")}).one_call
    assert openai_tools({"tools": TOOLS, "parallel_tool_calls": False}).one_call
    assert not openai_tools({"tools": TOOLS, "parallel_tool_calls": True}).one_call
    legacy = openai_tools({"functions": [TOOLS[0]["function"]], "function_call": {"name": "weather"}})
    assert legacy.legacy and legacy.one_call and legacy.choice.names == ("weather",)
    assert openai_tools({"functions": [TOOLS[0]["function"]], "function_call": "none"}).callable == ()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOLS[0], named("a b")]}, "tools[1].function.name"),
        ({"tools": [named("a" * 129)]}, "tools[0].function.name"),
        ({"tools": [openai_tool("a", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [openai_tool("a", {"type": "object", "properties": 3})]}, "tools[0].function.parameters.properties"),
        (
            {"tools": [openai_tool("a", {"properties": {"b": {"anyOf": [{"enum": 5}]}}})]},
            "tools[0].function.parameters.properties.b.anyOf[0].enum",
        ),
        ({"tools": [openai_tool("a", {"required": "b"})]}, "tools[0].function.parameters.required"),
        ({"tools": [openai_tool("a", {"$defs": {"b": 1}})]}, "tools[0].function.parameters.$defs.b"),
        ({"tools": [openai_tool("a", CITY, strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [openai_tool("a", CITY, description=5)]}, "tools[0].function.description"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]"),
        ({"tools": [named(f"t{index}") for index in range(129)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [], "tools": TOOLS}, "tools"),
        ({"functions": [], "function_call": {"name": "x"}}, "function_call"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(body, field):
    with pytest.raises(RequestError) as raised:
        openai_tools(body)
    assert raised.value.field == field


def test_tools_of_other_apis_have_their_schema_elsewhere():
    assert Tool.of({"name": "a", "input_schema": CITY}, "tools[0]", "input_schema").schema == CITY
    with pytest.raises(RequestError, match="input_schema") as raised:
        Tool.of({"name": "a", "input_schema": 5}, "tools[0]", "input_schema")
    assert raised.value.field == "tools[0].input_schema"
    assert ChatTools((Tool("a"),)).callable == (Tool("a"),)


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "x": 1}, "reasoning_effort": "low"},
            {"enable_thinking": False, "x": 1, "reasoning_effort": "low"},
        ),
    ],
)
def test_what_is_said_of_reasoning_goes_to_the_template(body, variables):
    assert openai_reasoning(body).template == variables


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": []}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_reasoning_is_told(body, field):
    with pytest.raises(RequestError) as raised:
        openai_reasoning(body)
    assert raised.value.field == field
