# SPDX-License-Identifier: Apache-2.0
"""`GrammarSpec`: the form that a user asks an answer to have, and what llguidance is given for it.

JSON answers are held to a schema of draft 2020-12, or refused where a keyword is not supported; properties come in the
schema's order. Between JSON tokens at most one space stands, or one line break and up to 32 blanks of indentation: a
model cannot fill its answer with blanks, and compact, spaced and indented JSON all pass. "x-guidance" at the top of a
schema sets this and more (whitespace_pattern, whitespace_flexible, coerce_one_of, lenient).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from llguidance import LLMatcher, regex_to_lark

from metrale_jax.core.errors import RequestError
from metrale_jax.text.multiples import embedded_schemas, num_remainders
from metrale_jax.text.trial import Named, TrialError, tried

MAX_TEXT = 1 << 16
# Of all `multipleOf` of a schema together; the library takes a third of a second for so many.
MAX_REMAINDERS = 100_000
# llguidance's word for a form that not even an empty answer has.
_NOTHING_MATCHES = "NoExtensionBias"
_MAX_QUOTED = 80
_MAX_REASON = 300

_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}", "json_allow_general_unicode_escapes": True}

# What may hold patterns, or intersections of them; an escape may spell any of these.
_DEAR_SCHEMA = re.compile(r"pattern|allOf|guidance|\\u")
_TOKEN_IDS, _NUMBER = re.compile(r"<\[([^\]>]*)\]>"), re.compile("[0-9]{1,9}")
_TOKEN_NAME = re.compile(r"<[^<>\s]+>")
_GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)
# Literals, classes and comments are passed over as wholes, so that a dot outside them is the one that means any. What
# is not closed goes to the end: to look for its end again from each place would take forever.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\r\n]*|\.', re.DOTALL)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY_CHARACTER = "[\\x00-\U0010ffff]"


@dataclass(frozen=True)
class GrammarSpec:
    """The form of an answer. `kind` is the field that asked for it, and says what `text` is.

    json_schema: JSON text of a schema. regex: a pattern that the whole answer matches, in the syntax of Rust's regex
    crate without look-around; a digit class means 0 to 9. choice: JSON text of a list of strings. grammar: Lark as
    llguidance reads it, with a rule `start`, or llama.cpp's GBNF, with a rule `root`. Texts are checked when compiled.
    """

    kind: str
    text: str

    @classmethod
    def of(cls, kind: str, value: Any) -> Self:
        """The spec of a request's field `kind`: a schema as a dict or JSON text, a list of choices, or a text."""
        whole = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
        if kind in ("json_schema", "choice") and whole:
            try:
                # The order of properties is the order in the answer, so keys keep theirs.
                value = json.dumps(list(value) if isinstance(value, Sequence) else dict(value), ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(
                    f"{kind} is not plain JSON data ({error}); use dicts, lists and scalars.", kind
                ) from error
        if not isinstance(value, str):
            raise RequestError(f"{kind}={_quoted(repr(value))} is not a text; give one.", kind)
        return cls(kind, value)


# What OpenAI's response_format json_object asks for.
ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')


def library_grammar(spec: GrammarSpec) -> str:
    """What llguidance compiles for `spec`. Raises `RequestError` for a text that is not what its kind promises."""
    if spec.kind not in _KINDS:
        raise RequestError(f"kind={spec.kind!r} of a grammar is not one of {', '.join(_KINDS)}; use one of them.")
    if len(spec.text) > MAX_TEXT:
        raise RequestError(
            f"{spec.kind} of {len(spec.text)} characters is over the limit of {MAX_TEXT}; ask for a simpler form.",
            spec.kind,
        )
    return _KINDS[spec.kind].translate(spec)


def named_tokens(spec: GrammarSpec, special: Mapping[str, int], vocab_size: int) -> Named:
    """The tokens that the text of `spec` may name, `special` ones by their text and any by its id."""
    if spec.kind != "grammar":
        return Named()
    found = {name: special[name] for name in _TOKEN_NAME.findall(spec.text) if name in special}
    spelt = (number for ids in _TOKEN_IDS.findall(spec.text) for number in _NUMBER.findall(ids))
    highest = max((*map(int, spelt), *found.values()), default=-1)
    return Named(min(highest + 1, vocab_size), found)


def check_cost(spec: GrammarSpec, grammar: str, limits: Mapping[str, Any], named: Named) -> None:
    """Nothing. Raises `RequestError` where `grammar`, what the library is to compile for `spec`, takes too long.

    `named` are the tokens that it may name."""
    if spec.kind == "choice" or (spec.kind == "json_schema" and not _DEAR_SCHEMA.search(spec.text)):
        return  # nothing in these but what the library bounds
    try:
        tried(grammar, limits, named=named)
    except TrialError as error:
        raise refused(spec, str(error)) from error


def refused(spec: GrammarSpec, reason: str) -> RequestError:
    """The error for a spec that the library refuses for `reason`."""
    if reason.startswith(_NOTHING_MATCHES):
        reason = "it matches nothing"
    reason = _quoted(" ".join(reason.removesuffix("<non-verbose/>").split()), _MAX_REASON)
    return RequestError(
        f"{spec.kind}={_quoted(spec.text)!r} is refused ({reason}); {_KINDS[spec.kind].remedy}.", spec.kind
    )


def _quoted(text: str, limit: int = _MAX_QUOTED) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _parsed(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise refused(spec, f"not JSON: {error}") from error


def _from_json_schema(spec: GrammarSpec) -> str:
    schema = _parsed(spec)
    if not isinstance(schema, dict):
        raise refused(spec, "not a JSON object")
    _check_multiples(spec, iter([schema]))
    try:
        return LLMatcher.grammar_from_json_schema(spec.text, defaults=_JSON_OPTIONS)
    except ValueError as error:
        raise refused(spec, str(error)) from error


def _check_multiples(spec: GrammarSpec, schemas: Iterator[Any]) -> None:
    count = num_remainders(schemas)
    if count > MAX_REMAINDERS:
        raise refused(spec, f"its multipleOf leave more than {MAX_REMAINDERS} remainders")


def _from_regex(spec: GrammarSpec) -> str:
    try:
        return _lark(f"start: /{regex_to_lark(spec.text, use_ascii='d')}/")
    except ValueError as error:
        raise refused(spec, str(error)) from error


def _from_choice(spec: GrammarSpec) -> str:
    """A pattern of the choices, in which every character that is no letter or digit is written by its number."""
    choices = _parsed(spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise refused(spec, "not a list of strings")
    literals = ["".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in choice) for choice in choices]
    return LLMatcher.grammar_from_regex(f"(?:{'|'.join(dict.fromkeys(literals))})")


def _from_grammar(spec: GrammarSpec) -> str:
    lark = _lark_of_gbnf(spec) if _GBNF_RULE.search(spec.text) else spec.text
    _check_multiples(spec, embedded_schemas(lark))
    return _lark(lark)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _lark_of_gbnf(spec: GrammarSpec) -> str:
    try:
        return tried(_GBNF_PART.sub(_portable_part, spec.text), {}, gbnf=True)
    except TrialError as error:
        raise refused(spec, str(error)) from error


def _portable_part(found: re.Match[str]) -> str:
    """A part of a GBNF text as the converter understands it: no numbered escapes, and a dot that matches all."""
    part = found[0]
    if part == ".":
        return _ANY_CHARACTER
    return part if part.startswith("#") else _GBNF_ESCAPE.sub(_character_of_escape, part)


def _character_of_escape(found: re.Match[str]) -> str:
    code = int(found[1] or found[2] or "0", 16)
    if not code or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return found[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


@dataclass(frozen=True)
class _Kind:
    """How a kind of text is translated, and what helps where the library refuses it."""

    translate: Callable[[GrammarSpec], str]
    remedy: str


_KINDS = {
    "json_schema": _Kind(
        _from_json_schema,
        'correct the schema, or add "x-guidance": {"lenient": true} to it to leave unsupported keywords unenforced and '
        "read oneOf as anyOf",
    ),
    "regex": _Kind(_from_regex, "write it for Rust's regex crate, without look-around and back-references"),
    "choice": _Kind(_from_choice, "give a list of one or more texts"),
    "grammar": _Kind(_from_grammar, "write Lark with a rule 'start', or GBNF with a rule 'root'"),
}
