# SPDX-License-Identifier: Apache-2.0
"""Answers in parts: the same however they are cut, and nothing of them is lost."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.chat.dialects.registry import DIALECTS, dialect_named
from serving.chat.parser import AnswerParser
from serving.chat.parts import Call, CallArguments, CallBegun, CallEnded, Content, Part, Reasoning, whole
from serving.chat.reasoning import KNOWN_TAGS, Tags, Thinking
from serving.chat.writer import merged
from tests.serving.chat.models import BY_NAME

THINK, MISTRAL_THINK = KNOWN_TAGS
OBJECT = '{"name": "weather", "%s": {"city": "Ulm", "unit": "C"}}'
ARGUMENTS = '{"city": "Ulm", "unit": "C"}'
CODER = "<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>"
# One call, and two in a row, as the models write them.
ONE = {
    "hermes": "<tool_call>\n" + OBJECT % "arguments" + "\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{CODER}\n</tool_call>",
    "llama3": OBJECT % "parameters",
    "mistral": "[TOOL_CALLS][" + OBJECT % "arguments" + "]",
    "gemma": "<start_function_call>call:weather{city:<escape>Ulm<escape>,unit:<escape>C<escape>}<end_function_call>",
    "fenced": "```tool_code\n" + OBJECT % "parameters" + "\n```",
}
TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "qwen3_coder": ONE["qwen3_coder"] + "\n" + ONE["qwen3_coder"],
    "llama3": ONE["llama3"] + "; " + ONE["llama3"],
    "mistral": "[TOOL_CALLS][" + OBJECT % "arguments" + ", " + OBJECT % "arguments" + "]",
    "gemma": ONE["gemma"] * 2,
    "fenced": ONE["fenced"] + "\n" + ONE["fenced"],
}
PIECES = (
    *'<>{}[]"\\:,;`|/= \n\tu0é1-.e',
    *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "city", "unit>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "```", "```json", "```tool_code", "<escape>"),
    *(
        "<start_function_call>",
        "<end_function_call>",
        "call:",
        "weather",
        "sum",
        '{"name": "weather", ',
        '"arguments": ',
    ),
    *('"parameters": ', '{"a": [1, true, null]}', '"x"', "<think>", "</think>", "<thi", "</s>", "<|eot_id|>"),
)
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(sorted(ONE.values()))), max_size=12).map("".join)
names = st.sampled_from(sorted(DIALECTS))
thoughts = st.sampled_from([None, Thinking(THINK, True), Thinking(THINK, False)])


def parser(name: str | None, thinking: Thinking | None = None, dropped=()) -> AnswerParser:
    """One for the tools of `BY_NAME`, with ids that count."""
    numbers = itertools.count()
    dialect = dialect_named(name) if name else None
    return AnswerParser(dialect, BY_NAME, thinking, dropped, new_id=lambda: f"id{next(numbers)}")


def parts_of(read: AnswerParser, *texts: str, cut_off: bool = False) -> list[Part]:
    """All parts of an answer that comes in these pieces."""
    return merged([part for text in texts for part in read.feed(text)] + read.end(cut_off))


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=600, deadline=None)
@given(names, texts, st.lists(st.integers(0, 400), max_size=8), thoughts, st.booleans())
def test_parts_are_the_same_however_an_answer_is_cut(name, text, places, thinking, cut_off):
    dropped = ("</s>", "<|eot_id|>")
    at_once = parts_of(parser(name, thinking, dropped), text, cut_off=cut_off)
    assert parts_of(parser(name, thinking, dropped), *cut(text, places), cut_off=cut_off) == at_once
    assert parts_of(parser(name, thinking, dropped), *text, cut_off=cut_off) == at_once


@settings(max_examples=600, deadline=None)
@given(names, texts, thoughts)
def test_without_a_call_nothing_but_blanks_at_tags_is_lost(name, text, thinking):
    parts = parts_of(parser(name, thinking), text)
    if any(isinstance(part, CallBegun) for part in parts):
        return
    if thinking is not None:
        if thinking.opened or text.lstrip().startswith(THINK.open):
            text = text if thinking.opened else text.lstrip().removeprefix(THINK.open)
            text = text.replace(THINK.close, "", 1)
        # Blanks at the tags are theirs.
        text = "".join(text.split())
    said = whole(parts)
    kept = said.reasoning + said.content
    assert (kept if thinking is None else "".join(kept.split())) == text


@settings(max_examples=300, deadline=None)
@given(names, texts, st.booleans())
def test_every_call_begins_and_ends_once_and_in_order(name, text, cut_off):
    seen: list[int] = []
    inside = None
    for part in parts_of(parser(name), text, cut_off=cut_off):
        if isinstance(part, CallBegun):
            assert inside is None and part.index == len(seen) and part.name in BY_NAME
            seen.append(part.index)
            inside = part.index
        elif isinstance(part, CallArguments | CallEnded):
            assert part.index == inside
            inside = None if isinstance(part, CallEnded) else inside
        else:
            assert inside is None
    assert inside is None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="<think>/ab \n", max_size=30), st.lists(st.integers(0, 40), max_size=4))
def test_without_tools_and_reasoning_an_answer_is_itself(text, places):
    read = parser(None)
    pieces = cut(text, places)
    # At once, too: nothing is held back.
    assert [whole(read.feed(piece)).content for piece in pieces] == pieces
    assert read.end() == []


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_call_is_found_with_the_text_before_it(name):
    text = ONE[name] if name == "llama3" else f"Let me see.\n\n{ONE[name]}\n"
    said = whole(parts_of(parser(name), text))
    assert [call.name for call in said.calls] == ["weather"]
    assert json.loads(said.calls[0].arguments) == json.loads(ARGUMENTS)
    assert said.content == ("" if name == "llama3" else "Let me see.")


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_several_calls_are_told_apart(name):
    said = whole(parts_of(parser(name), TWO[name]))
    assert [(call.id, call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("id0", "weather", json.loads(ARGUMENTS)),
        ("id1", "weather", json.loads(ARGUMENTS)),
    ]
    assert said.content == ""


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_call_begins_with_its_name_and_arguments_come_as_they_are_written(name):
    text, read = ONE[name], parser(name)
    found = [read.feed(letter) for letter in text]
    begun = next(place for place, parts in enumerate(found) if any(isinstance(part, CallBegun) for part in parts))
    ulm = text.index("Ulm") + 2
    assert begun < text.index("Ulm")
    told = whole([part for parts in found[: ulm + 1] for part in parts]).calls[0].arguments
    assert "".join(told.split()).endswith('"city":"Ulm')


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_call_that_is_cut_off_ends_with_what_it_has(name):
    text = ONE[name][: ONE[name].index("Ulm") + 2]
    parts = parts_of(parser(name), text)
    assert isinstance(parts[-1], CallEnded)
    [call] = whole(parts).calls
    assert "".join(call.arguments.split()) == '{"city":"Ul'


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("before", ["", "Let me see."])
def test_where_an_answer_is_cut_off_nothing_of_a_calls_format_is_content(name, before):
    tag = "<|python_tag|>" if name == "llama3" and before else ""
    text = f"{before} {tag}{TWO[name]}".lstrip()
    told: list[tuple[str, ...]] = []
    for end in range(text.index("Ulm") - 20, len(text) + 1):
        said = whole(parts_of(parser(name), text[:end], cut_off=True))
        assert said.content == before, text[:end]
        told.append(tuple(call.arguments for call in said.calls))
    # What came of the calls only grows.
    for earlier, later in itertools.pairwise(told):
        assert len(earlier) <= len(later)
        assert all(after.startswith(one) for one, after in zip(earlier, later, strict=False))
    assert [json.loads(one) for one in told[-1]] == [json.loads(ARGUMENTS)] * 2


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_of_an_answer_of_nothing_but_calls_no_sign_is_content(name):
    dialect = dialect_named(name)
    for end in range(len(TWO[name]) + 1):
        read = AnswerParser(dialect, BY_NAME, only_calls=True)
        assert whole(parts_of(read, TWO[name][:end], cut_off=True)).content == ""


@settings(max_examples=300, deadline=None)
@given(names, st.text(alphabet='ab {}[]":,`<_\n', max_size=30), st.booleans())
def test_text_that_is_cut_off_is_kept(name, text, cut_off):
    text = f"Well: {text}"
    assert whole(parts_of(parser(name), text, cut_off=cut_off)).content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"items": [1, 2'),
        ("llama3", '{"type": "object", "properties": {"a'),
        ("llama3", '{"name": "Bob'),
        ("fenced", '```json\n{"a": 1'),
        ("fenced", "See:\n```"),
        ("hermes", "a <to"),
        ("hermes", '<tool_call>{"name": "tornado"'),
    ],
)
def test_json_and_code_that_are_cut_off_are_kept(name, text):
    assert parts_of(parser(name), text, cut_off=True) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "weather", "argu', [("weather", "")]),
        ("hermes", '<tool_call>\n{"name": "weath', []),
        ("hermes", '<tool_call>\n{"arguments": {"city": "U', []),
        ("llama3", '{"name": "wea', []),
        ("llama3", '{"na', []),
        ("mistral", "[TOOL_CALLS]weather", []),
        ("mistral", "[TOOL_CALLS]weather[AR", [("weather", "")]),
        ("mistral", "[TOOL_CALLS]weather[CALL_ID]ab", [("weather", "")]),
        ("mistral", "[TOOL_CALLS]weather[ARGS]", [("weather", "")]),
        ("qwen3_coder", "<tool_call>\n<function=weather", []),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<para", [("weather", "")]),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nUlm\n</para", [("weather", '{"city": "Ulm')]),
        ("gemma", "<start_function_call>call:weather", []),
        ("gemma", "<start_function_call>call:weather{", [("weather", "{")]),
        ("fenced", '```tool_code\n{"name": "weather", "parameters": {', [("weather", "{")]),
    ],
)
def test_a_call_that_is_cut_off_is_told_once_its_name_is_known(name, text, calls):
    said = whole(parts_of(parser(name), text, cut_off=True))
    assert [(call.name, call.arguments) for call in said.calls] == calls and said.content == ""


@pytest.mark.parametrize("text", ["<thi", "<think>hm</thi"])
def test_of_a_tag_of_reasoning_that_is_cut_off_nothing_shows(text):
    parts = parts_of(parser("hermes", Thinking(THINK, False)), text, cut_off=True)
    assert parts == ([Reasoning("hm")] if "hm" in text else [])


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("of", ["tornado", "weather!", ""])
def test_a_call_of_no_tool_is_text(name, of):
    text = "Well: " + ONE[name].replace("weather", of)
    assert parts_of(parser(name), text) == [Content(text)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>oops</tool_call>"),
        ("hermes", '  <tool_call> {"name": "weather", }'),
        ("hermes", "a < b <tool_call"),
        ("qwen3_coder", "<tool_call>\n<functions=weather>"),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]5"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("gemma", "<start_function_call>call:sum"),
        ("fenced", '```json\n{"a": 1}\n```'),
    ],
)
def test_what_is_no_call_is_text(name, text):
    assert parts_of(parser(name), text) == [Content(text)]


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('{"arguments": {"city": "U"}, "name": "weather"}', '{"city": "U"}', ""),
        ('{"type": "function", "name": "weather", "parameters": {"a": "\\u00e9"}}', '{"a": "\\u00e9"}', ""),
        ('{"name": "weather"}', "{}", ""),
        ('{"name": "weather", "arguments": {"a": 1]}', '{"a": 1', "]}"),
        ('{"name": "weather", "arguments": {"a": 1} oops', '{"a": 1}', "oops"),
    ],
)
def test_models_write_calls_in_other_ways_too(text, arguments, content):
    said = whole(parts_of(parser("hermes"), f"<tool_call>{text}"))
    assert said.calls == (Call("id0", "weather", arguments),)
    assert said.content == content


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]sum[ARGS]{}",
        "[TOOL_CALLS]weather{}[TOOL_CALLS]sum{}",
        "[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{}[TOOL_CALLS]sum[CALL_ID]x[ARGS] {}",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "sum", "arguments": {}}]',
    ],
)
def test_mistral_writes_names_before_arguments_or_within_lists(text):
    said = whole(parts_of(parser("mistral"), text))
    assert [(call.name, call.arguments) for call in said.calls] == [("weather", "{}"), ("sum", "{}")]
    assert said.content == ""


def test_values_of_function_gemma_become_json():
    text = '<start_function_call>call:sum{of:[1,2.5,-3],options:{round:true,to:<escape>a "b"\n{<escape>},e:{},n:null}'
    [call] = whole(parts_of(parser("gemma"), text)).calls
    assert json.loads(call.arguments) == {
        "of": [1, 2.5, -3],
        "options": {"round": True, "to": 'a "b"\n{'},
        "e": {},
        "n": None,
    }


def test_values_of_qwen_coder_become_json_by_their_schema():
    text = (
        '<tool_call>\n<function=sum>\n<parameter=of>\n[1, 2]\n</parameter>\n<parameter=note>\n 5 "x"\n\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    [call] = whole(parts_of(parser("qwen3_coder"), text)).calls
    assert json.loads(call.arguments) == {"of": [1, 2], "note": ' 5 "x"\n'}


@pytest.mark.parametrize(
    ("tags", "opened", "text", "parts"),
    [
        (THINK, True, "\nhm\n</think>\n\nYes", [Reasoning("hm"), Content("Yes")]),
        (THINK, True, "hm", [Reasoning("hm")]),
        (THINK, True, "</think>Yes", [Content("Yes")]),
        (THINK, False, "<think>hm</think>Yes", [Reasoning("hm"), Content("Yes")]),
        (THINK, False, "\n<think>\nhm", [Reasoning("hm")]),
        (THINK, False, " <thin>", [Content(" <thin>")]),
        (THINK, False, "Yes <think>no</think>", [Content("Yes <think>no</think>")]),
        (MISTRAL_THINK, False, "[THINK]hm[/THINK]Yes", [Reasoning("hm"), Content("Yes")]),
    ],
)
def test_reasoning_is_told_apart(tags: Tags, opened, text, parts):
    assert parts_of(parser(None, Thinking(tags, opened)), text) == parts


def test_calls_follow_reasoning_and_are_not_looked_for_in_it():
    text = f"<think>{ONE['hermes']}</think>\n\n{ONE['hermes']}"
    said = whole(parts_of(parser("hermes", Thinking(THINK, False)), text))
    assert said.reasoning == ONE["hermes"] and len(said.calls) == 1 and said.content == ""


def test_a_tag_is_held_back_only_as_long_as_it_may_be_one():
    read = parser("hermes")
    assert read.feed("a <tool_") == [Content("a")]
    assert read.feed("x") == [Content(" <tool_x")]
    assert read.feed(" ") == []
    assert read.end() == [Content(" ")]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab<", max_size=30), st.lists(st.integers(0, 40), max_size=5))
def test_words_are_left_out_wherever_a_text_is_cut(text, places):
    words = ("<a", "ab<b", "bb")
    at_once = whole(parts_of(parser(None, dropped=words), text)).content
    assert whole(parts_of(parser(None, dropped=words), *cut(text, places))).content == at_once
    if not any(word in text for word in words):
        assert at_once == text


def test_a_long_answer_of_beginnings_takes_no_longer_than_its_length():
    text = '<tool_call>{"a": "' * 20_000
    assert parts_of(parser("hermes"), text) == [Content(text)]
