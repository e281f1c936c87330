# SPDX-License-Identifier: Apache-2.0
"""Schemas that no grammar can hold: what of them goes, and what is said of those that are strict."""

import json

import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.grammar_spec import GrammarSpec, library_grammar
from metrale_jax.text.trial import refusals
from serving.chat.dialects.registry import dialect_of
from serving.chat.holding import holdable, reason_of
from serving.chat.messages import openai_messages
from serving.chat.plan import Chat, plan
from serving.chat.tools import openai_tools
from tests.serving.chat.drawing import byte_tokenizer, drawn
from tests.serving.chat.models import CITY, TEMPLATES, chat_model, openai_tool

HELLO = openai_messages([{"role": "user", "content": "hello"}])
LOOKS = {"type": "string", "pattern": "^https?://(?!x)", "maxLength": 9}


def of(schema: dict, **root) -> dict:
    """A schema of an object with this property and another."""
    return {"type": "object", "properties": {"a": schema, "n": {"type": "integer"}}, **root}


# What is given of a property, and what is left of it.
CASES = {
    "look-around": (LOOKS, {"type": "string", "maxLength": 9}),
    "back-reference": ({"type": "string", "pattern": r"(a)\1"}, {"type": "string"}),
    "no pattern": ({"type": "string", "pattern": "("}, {"type": "string"}),
    "another document": ({"$ref": "https://example.com/a"}, {}),
    "nothing there": ({"$ref": "#/$defs/none"}, {}),
    "no type": ({"type": "any", "minLength": 1}, {"minLength": 1}),
    "no number": ({"type": "number", "multipleOf": 0}, {"type": "number"}),
    "of others": (
        {"anyOf": [LOOKS, {"type": "null"}]},
        {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
    ),
    "of items": ({"type": "array", "items": LOOKS}, {"type": "array", "items": {"type": "string", "maxLength": 9}}),
    "good": ({"type": "string", "pattern": "^a+$", "format": "unheard-of"},) * 2,
}


def held(schema: dict, template: str = TEMPLATES["hermes"], **more) -> dict:
    tools = openai_tools({"tools": [openai_tool("odd", schema, **more), openai_tool("weather", CITY)]})
    odd, weather = holdable(tools, dialect_of(template), chat_model(template)).tools
    assert weather.held == CITY and odd.schema == schema
    return odd.held


@pytest.mark.parametrize("name", sorted(CASES))
def test_of_a_tool_that_is_not_strict_what_cannot_be_held_goes(name):
    given, left = CASES[name]
    assert held(of(given)) == of(left)


def test_what_is_at_the_root_or_defined_goes_too_and_nothing_else():
    assert held(of({}, **{"$schema": "https://example.com/none"})) == of({})
    assert held(of({}, patternProperties={"(?=x)": {}})) == of({})
    defined = {"$defs": {"d": LOOKS}}
    assert held(of({"$ref": "#/$defs/d"}, **defined)) == of(
        {"$ref": "#/$defs/d"}, **{"$defs": {"d": {"type": "string", "maxLength": 9}}}
    )


def test_where_no_keyword_is_at_fault_arguments_are_any_object():
    assert held(of(False, required=["a"])) == {"type": "object"}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_of_every_model_can_be_held_to_what_is_left(name):
    body = {"tools": [openai_tool("odd", of(LOOKS, required=["a"])), openai_tool("weather", CITY)]}
    for choice in ("auto", "required"):
        tools = openai_tools({**body, "tool_choice": choice})
        made = plan(Chat(HELLO, tools), chat_model(TEMPLATES[name]), SamplingParams())
        assert refusals([library_grammar(GrammarSpec("grammar", made.params.grammar))], {}) == [""]
    drawn(made.params.grammar, byte_tokenizer(), seed=1)


@pytest.mark.parametrize("name", ["look-around", "nothing there", "no type", "of items"])
def test_a_strict_tool_is_refused_by_its_name_path_and_keyword(name):
    places = {"look-around": "pattern", "nothing there": "$ref", "no type": "type", "of items": "items.pattern"}
    with pytest.raises(RequestError) as raised:
        held(of(CASES[name][0]), strict=True)
    path = f"tools[0].function.parameters.properties.a.{places[name]}"
    assert raised.value.field == path and str(raised.value).startswith(f"{path}=")
    assert "of the tool 'odd' cannot be enforced (" in str(raised.value)
    assert str(raised.value).endswith("; leave it out, or strict.")
    for word in ("Lark", "GBNF", "%json", "grammar"):
        assert word not in str(raised.value)


def test_a_strict_tool_without_a_single_fault_is_refused_as_a_whole():
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters of the tool 'odd' cannot be enforced"):
        held(of(False), strict=True)


def test_tools_that_are_not_called_and_plain_ones_are_not_looked_at():
    body = {"tools": [openai_tool("odd", of(LOOKS), strict=True)], "tool_choice": "none"}
    for tools in (openai_tools(body), openai_tools({"tools": [openai_tool("weather", CITY)]})):
        assert holdable(tools, dialect_of(""), chat_model("")) is tools


def test_each_of_several_texts_has_its_bounds():
    good, wrong = (json.dumps({"grammars": [{"lark_grammar": f"start: {what}"}]}) for what in ('"a"', "nothing"))
    dear = json.dumps({"grammars": [{"lark_grammar": "start: X\nX: /(a|b)*a(a|b){60}/ & ~/(a|b)*b(a|b){50}/"}]})
    found = refusals([good, dear, wrong, good], {})
    assert (found[0], found[3]) == ("", "") and "nothing" in found[2] and found[1]


def test_what_the_library_says_is_told_without_its_grammar():
    error = (
        "at 1(8): failed to compile JSON schema: regex parse error:\n  (?!\n  ^\nerror: look-around is\n odd\n   1 | st"
    )
    assert reason_of(error) == "look-around is odd"
    assert reason_of("it takes long") == "it takes long"
