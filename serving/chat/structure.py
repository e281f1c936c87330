# SPDX-License-Identifier: Apache-2.0
"""The structure of an answer with calls or reasoning, as a Lark grammar for llguidance.

In free text a lazy terminal ends at the first tag of a call, or a special token ends it, and from there on the call is
held to its format and its arguments to their schema; text without the tag runs to the end. So a call once begun is
well formed whether it was asked for or the model's own idea. Special tokens are named by id: within text they are not
allowed, and by their spelling alone they do not count.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from llguidance import regex_to_lark

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import STRUCTURES, SamplingParams
from serving.chat.lark import json_of, literal, pattern, word
from serving.chat.reasoning import Thinking

# What may stand before reasoning: a model could else put off for ever what it is held to.
BEFORE = "[ \\t\\r\\n]{0,2}"


@dataclass(frozen=True)
class CallForm:
    """How a dialect writes calls. In free text they begin with `tag`, or where it is "" or not the first, with what
    the pattern `bare` matches at the beginning of the answer.

    `first`, `more` and `close` are Lark: the first call behind the tag, each further one with all that stands before
    it, and what ends them; `rules` are those they refer to.
    """

    tag: str
    first: str
    more: str
    close: str
    rules: tuple[str, ...]
    bare: str = ""


@dataclass(frozen=True)
class Wanted:
    """What an answer is to be: `calls` in this form (None: none), for sure (`required`) or one of content and calls;
    at most `one_call`; and, before it, reasoning."""

    calls: CallForm | None = None
    required: bool = False
    one_call: bool = False
    thinking: Thinking | None = None


def grammar_of(wanted: Wanted, params: SamplingParams, special_tokens: Mapping[str, int]) -> str | None:
    """The Lark text; None where `params` alone say all there is to say. Raises `RequestError` for two structures."""
    if wanted.calls is None and (wanted.thinking is None or not params.structured):
        return None
    if wanted.calls is None and params.grammar is not None:
        return None  # whoever writes a grammar writes all of it
    rules: list[str] = []
    content = None if wanted.required else _content(params)
    if content:
        rules.append(f"content: {content}")
    body, more = _body(wanted, bool(content), special_tokens)
    rules += more
    start, more = _start(wanted, free=not (content or wanted.required), special_tokens=special_tokens)
    return "\n".join([start, f"body: {body}", *rules, *more])


def _content(params: SamplingParams) -> str | None:
    """What structured params make of the content."""
    if params.grammar is not None:
        raise RequestError("grammar and tools are both given, an answer has one structure; leave one out.", "grammar")
    if params.json_schema is not None:
        schema = json.loads(params.json_schema)
        if not isinstance(schema, dict):
            raise RequestError("json_schema is no JSON object; give one.", "json_schema")
        return json_of(schema, strict=True)
    if params.regex is not None:
        try:
            return f"/{regex_to_lark(params.regex, use_ascii='d')}/"
        except ValueError as error:
            raise RequestError(f"regex is refused ({error}); write it for Rust's regex crate.", "regex") from error
    return " | ".join(map(literal, params.choice)) if params.choice is not None else None


def _body(wanted: Wanted, has_content: bool, special_tokens: Mapping[str, int]) -> tuple[str, list[str]]:
    """What comes behind reasoning, and the rules that it refers to."""
    form = wanted.calls
    if form is None:
        return "content", []
    calls = f"{form.first} {'' if wanted.one_call else f'({form.more})*'} {form.close}"
    tagged = f"{word(form.tag, special_tokens)} calls" if form.tag else ""
    rules = [f"calls: {calls}", *form.rules]
    if wanted.required:
        return "calls" if form.bare else tagged, rules
    if has_content:
        if form.bare:
            raise RequestError(
                "a structure and tools that may be called are both given, and this model's calls are JSON as well; "
                'set tool_choice to "required" or "none", or leave the structure out.',
                "tool_choice",
            )
        return f"content | {tagged}", rules
    kept = _kept_from_text(wanted, special_tokens)
    branches = ["text"]
    if form.bare:
        kept.append(f"{form.bare}(?s:.*)")
        branches.append("calls")
    if form.tag in special_tokens:
        branches.append(f"text {tagged}")
    elif form.tag:
        rules.append(f"lead[lazy]: LEAD\nLEAD: /(?s:.*){pattern(form.tag)}/{_without(kept)}")
        kept.append(f"(?s:.*){pattern(form.tag)}(?s:.*)")
        branches.append("lead calls")
    rules.append(f"text: TEXT?\nTEXT: /(?s:.+)/{_without(kept)}")
    return " | ".join(branches), rules


def _kept_from_text(wanted: Wanted, special_tokens: Mapping[str, int]) -> list[str]:
    """Patterns of texts that are reasoning."""
    if wanted.thinking is None or wanted.thinking.tags.open in special_tokens:
        return []
    return [f"{BEFORE}{pattern(wanted.thinking.tags.open)}(?s:.*)"]


def _start(wanted: Wanted, free: bool, special_tokens: Mapping[str, int]) -> tuple[str, list[str]]:
    """The first rule, and those that it refers to; a `free` answer may also end within reasoning."""
    blanks = "BLANKS: /[ \\t\\r\\n]{1,4}/"
    if wanted.thinking is None:
        return "start: body", [blanks]
    tags, opened = wanted.thinking.tags, wanted.thinking.opened
    begins = [] if opened else [word(tags.open, special_tokens)]
    if tags.close in special_tokens:
        think = " ".join([*begins, "THOUGHT?", word(tags.close, special_tokens)])
        rules = [f"think: {think}", f"unclosed: {' '.join([*begins, 'THOUGHT?'])}", "THOUGHT: /(?s:.+)/"]
    else:
        beginning = "" if opened else f"{BEFORE}{pattern(tags.open)}"
        end = pattern(tags.close)
        rules = [
            f"think[lazy]: /{beginning}(?s:.*){end}/",
            f"unclosed: UNCLOSED\nUNCLOSED: /{beginning}(?s:.*)/{_without([f'(?s:.*){end}(?s:.*)'])}",
        ]
    ways = (
        ["think body" if free else "think BLANKS? body"] + ([] if opened else ["body"]) + (["unclosed"] if free else [])
    )
    return f"start: {' | '.join(ways)}", [blanks, *(rules if free else [r for r in rules if "unclosed" not in r])]


def _without(patterns: list[str]) -> str:
    return "".join(f" & ~/{one}/" for one in patterns)


assert set(STRUCTURES) == {"json_schema", "regex", "choice", "grammar"}, "each has its place in a grammar"
