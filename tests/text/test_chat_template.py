# SPDX-License-Identifier: Apache-2.0
"""Chat templates: equal to transformers', in a sandbox, and faults told in one line."""

import re

import pytest

from metrale_jax.core.errors import RequestError, TextError
from metrale_jax.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def render(template: str, messages=HELLO, **kwargs) -> str:
    """One rendering of `template`."""
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).render(messages, **kwargs)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_prompts_equal_those_of_transformers(name, request, goldens):
    tokenizer = request.getfixturevalue(name)
    assert goldens[name]["chats"]
    for chat in goldens[name]["chats"]:
        options = dict(chat["call"])
        assert tokenizer.apply_chat_template(options.pop("messages"), **options) == chat["prompt"]


@pytest.mark.parametrize("tools", [1.5, "x", {"a": 1}, [3]])
def test_tools_that_are_no_list_of_dicts_are_told(tools):
    with pytest.raises(RequestError, match="no list of tools"):
        render("x", tools=tools)


def test_variables_of_any_name_reach_the_template():
    assert render("{{ self_ }}{{ x }}", self=1, messages_=2, x="y") == "y"


@pytest.mark.parametrize(
    ("content", "kept", "trimmed"),
    [
        ("La la", "La la", "La la"),
        ("La la ", "La la ", "La la"),
        ("  La\n\n", "  La\n\n", "La"),
        ("sing", "sing", "sing"),
        ("assistant", "assistant", "assistant"),
    ],
)
def test_a_message_is_gone_on_with_where_its_content_ends(content, kept, trimmed):
    # As transformers 5.24 has it, for each of these.
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    messages = [{"role": "user", "content": "sing "}, {"role": "assistant", "content": content}]
    found = render(template, messages, continue_final_message=True)
    assert found == f"<user>sing <end><assistant>{kept}"
    found = render(template.replace("m.content", "m.content | trim"), messages, continue_final_message=True)
    assert found == f"<user>sing<end><assistant>{trimmed}"
    assert render(template, messages, add_generation_prompt=False).endswith(f"{content}<end>")


def test_an_empty_message_is_begun():
    messages = [*HELLO, {"role": "assistant", "content": ""}]
    for of in ("m.content", "m.content | trim"):
        template = "{% for m in messages %}<{{ m.role }}>\n{{ " + of + " }}<end>{% endfor %}"
        assert render(template, messages, continue_final_message=True) == "<user>\nhello<end><assistant>\n"


def test_what_cannot_be_gone_on_with_is_told():
    with pytest.raises(TextError, match="does not show the last message"):
        render("{{ messages[0].role }}", continue_final_message=True)
    calls = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    with pytest.raises(RequestError, match="no content that could be gone on with"):
        render("x", calls, continue_final_message=True)
    with pytest.raises(RequestError, match="continue_final_message='yes' is neither"):
        render("x", continue_final_message="yes")


def test_no_template_says_so_and_the_way_out(llama):
    assert not llama.has_chat_template
    with pytest.raises(TextError, match="has no chat template.*plain prompt"):
        llama.apply_chat_template(HELLO)


def test_a_refusal_of_the_template_is_told_in_one_line():
    with pytest.raises(TextError, match=r"roles must alternate user/assistant\.") as raised:
        render("{{ raise_exception('roles must\n alternate user/assistant') }}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + none }}",
        "{{ missing.name }}",
        "{{ [1][3].x }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_any_fault_of_a_template_is_a_text_error(template):
    with pytest.raises(TextError, match="the chat template refused"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__call__.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template):
    with pytest.raises(TextError):
        render(template)


def test_special_strings_are_visible_and_can_be_replaced():
    assert render("{{ bos_token }}") == "<s>"
    assert render("{{ bos_token }}", bos_token="<b>") == "<b>"


def test_the_date_is_there_for_templates_that_ask():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_the_messages_given_are_left_as_they_are():
    messages = [{"role": "assistant", "content": "x", "thinking": "t"}]
    assert render("{{ messages[0].reasoning_content }}", messages) == "t"
    assert messages == [{"role": "assistant", "content": "x", "thinking": "t"}]


def test_a_message_that_calls_tools_needs_no_content():
    call = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].tool_calls[0].name }}", call) == "f"


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ("hello", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role=None"),
        (HELLO + [{"role": "user"}], r"messages\[1\] has content=None"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content=3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\] has content=.*image_url.*type text"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\] has content=\['x'\]; give a text, or parts"),
    ],
)
def test_malformed_messages_are_named(messages, part):
    with pytest.raises(RequestError, match=part):
        render("", messages)


def test_parts_of_a_content_are_joined_for_templates_that_know_texts_only():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content + '!' }}", messages) == "a b!"
    assert messages[0]["content"] is parts
