# SPDX-License-Identifier: Apache-2.0
"""Answers held to a form: what masks allow is valid, what is valid is allowed, and nothing else is.

Judges are jsonschema, Python's re and the tokenizers library's decoder.
"""

import json
import random
import re
import threading

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from metrale_jax.core.errors import RequestError
from metrale_jax.text import grammar as grammar_module
from metrale_jax.text.grammar import GrammarCompiler
from metrale_jax.text.grammar_spec import ANY_OBJECT, MAX_TEXT, GrammarSpec
from metrale_jax.text.special_tokens import SpecialTokens
from metrale_jax.text.tokenizer import Tokenizer

# As much padding as ends a mask inside a word.
PADDING = 37

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "born"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "enum": {"enum": ["red", "grün", 3, None, {"a": [1]}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "range": {"type": "array", "items": {"type": "number", "minimum": -1.5, "maximum": 10.25}, "maxItems": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "any_of": {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": "x"}, PERSON]}, "maxItems": 2},
    "unicode": {
        "type": "object",
        "properties": {"имя": {"enum": ["Ёж", "日本語", "😀"]}, "π": {"const": 3}},
        "required": ["имя", "π"],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer", "multipleOf": 5}, "maxProperties": 3},
    "tuple": {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 4}], "items": False},
    "moment": {"type": "string", "format": "date-time"},
    "object": json.loads(ANY_OBJECT.text),
}
DOCUMENTS = {
    "person": {"name": 'Zoë "the third" O\\Neill\n日本', "age": 42, "born": "2024-02-29", "tags": ["a b", "ç"]},
    "enum": {"a": [1]},
    "array": [True, False, True],
    "range": [-1.5, 0.125, 10, 3.5],
    "pattern": "QX-123",
    "tree": {"v": -1, "next": {"v": 20, "next": {"v": 300}}},
    "any_of": [None, {"name": "", "age": 0, "born": "1999-12-31"}],
    "unicode": {"имя": "日本語", "π": 3},
    "map": {"a key": 25, "другой": -10},
    "tuple": [1, "four"],
    "moment": "2024-05-06T07:08:09Z",
    "object": {"a": {"b": [1.5e-7, None, "<table>\t😀"]}, "": []},
}
REGEXES = ["ab*c?", "(yes|no|maybe)", "[α-ω]{2,5}", "\\d{3}-\\d{4}", "(?i:hello) [^\\n]{1,9}!", "^x{3,5}$", "a/b//c|#"]
LARK = 'start: expr\nexpr: NUM | "(" expr ("+" | "*") expr ")"\nNUM: /[0-9]{1,3}/'
GBNF = """root ::= item (", " item){1,3} # a comment with a dot. and "quotes"
item ::= word "\\u2192" [\\u4e00-\\u4e10] | "[" . "]"
word ::= [a-c]+
"""


class Walks:
    """A real tokenizer with its compiler, and walks through what masks allow."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[int, ...]):
        self.tokenizer = tokenizer
        self.ends = ends
        self.vocab_size = tokenizer.vocab_size + PADDING
        self.compiler = GrammarCompiler(tokenizer, self.vocab_size, ends)
        joined = [tokenizer.encode(text, add_special_tokens=False) for text in ('"', "}", "]", '"}', '"]', ")", "!")]
        self.closers = [ids[0] for ids in joined if len(ids) == 1]
        self.never = sorted(tokenizer.special_token_ids - set(ends)) + list(
            range(tokenizer.vocab_size, self.vocab_size)
        )

    def constraint(self, kind: str, value):
        return self.compiler.compile(GrammarSpec.of(kind, value))

    def allowed(self, constraint) -> np.ndarray:
        """Whether each id of the model may be drawn."""
        words = constraint.mask()
        assert words.dtype == np.uint32 and words.shape == (-(-self.vocab_size // 32),)
        flags = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        assert flags.any() and not flags[self.vocab_size :].any()
        assert not flags[self.never].any(), "neither special tokens nor padding"
        ends = flags[list(self.ends)]
        assert ends.all() or not ends.any(), "all ends or none"
        assert not constraint.is_complete or flags.sum() == len(ends)
        return flags[: self.vocab_size]

    def may_end(self, constraint) -> bool:
        return bool(self.allowed(constraint)[self.ends[0]])

    def random_ids(self, constraint, seed: int) -> list[int]:
        """Ids drawn until the end, which is sought harder the longer the answer is."""
        draw, ids = random.Random(seed), []
        for step in range(400):
            flags = self.allowed(constraint)
            if flags[self.ends[0]] and (flags.sum() == len(self.ends) or draw.random() < 0.1 + step / 40):
                constraint.accept(draw.choice(self.ends))
                assert constraint.is_complete
                return ids
            flags[list(self.ends)] = False
            closing = [token for token in self.closers if flags[token]]
            closes = closing and draw.random() < 0.2 + step / 50
            ids.append(draw.choice(closing) if closes else int(draw.choice(np.flatnonzero(flags))))
            constraint.accept(ids[-1])
        pytest.fail(f"no end in sight: {self.tokenizer.decode(ids)!r}")

    def random_text(self, kind: str, value, seed: int) -> str:
        return self.tokenizer.decode(self.random_ids(self.constraint(kind, value), seed))

    def follow(self, constraint, text: str) -> None:
        """Asserts that the tokenizer's own ids of `text` are allowed in turn, and then the end."""
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            assert self.allowed(constraint)[token], (text, self.tokenizer.id_to_token(token))
            constraint.accept(token)
        assert self.may_end(constraint), text

    def takes(self, kind: str, value, text: str) -> bool:
        try:
            self.follow(self.constraint(kind, value), text)
        except AssertionError:
            return False
        return True


@pytest.fixture(scope="session")
def small(smollm2) -> Walks:
    """Byte-level BPE; a second id ends answers as in chat models."""
    return Walks(smollm2, (*smollm2.eos_token_ids, 0))


@pytest.fixture(scope="session")
def large(gemma3) -> Walks:
    """SentencePiece with byte tokens and user-defined tokens such as `<table>`."""
    return Walks(gemma3, gemma3.eos_token_ids)


def check_schema(schema, text: str) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_drawn_under_a_schema_validates(small, name):
    for seed in range(8):
        text = small.random_text("json_schema", SCHEMAS[name], seed)
        check_schema(SCHEMAS[name], text)
        small.follow(small.constraint("json_schema", SCHEMAS[name]), text)


@pytest.mark.parametrize("name", ["person", "unicode", "object"])
def test_a_sentencepiece_vocabulary_keeps_to_schemas_too(large, name):
    for seed in range(3):
        check_schema(SCHEMAS[name], large.random_text("json_schema", SCHEMAS[name], seed))


# Constants, enumerations and patterns are spelt one way only; free text and names may have escapes.
FORMS = {
    "spaced": ({"ensure_ascii": False}, list(SCHEMAS)),
    "compact": ({"ensure_ascii": False, "separators": (",", ":")}, list(SCHEMAS)),
    "indented": ({"ensure_ascii": False, "indent": 4}, list(SCHEMAS)),
    "escaped": ({}, ["person", "map", "object"]),
}


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, (_, names) in FORMS.items() for name in names])
def test_a_valid_document_is_allowed_token_by_token(small, large, name, form):
    text = json.dumps(DOCUMENTS[name], **FORMS[form][0])
    check_schema(SCHEMAS[name], text)
    for walks in (small, large):
        walks.follow(walks.constraint("json_schema", SCHEMAS[name]), text)


@pytest.mark.parametrize(
    "text", ['{"name":"a","age":151', '{"age"', '{"name": "a", "age": 1, "born": "2023-02-30"', "["]
)
def test_an_invalid_document_is_stopped(small, text):
    assert not small.takes("json_schema", PERSON, text)


def test_blanks_between_json_tokens_are_bounded(small):
    assert small.takes("json_schema", {"type": "array"}, "[1,\n" + " " * 32 + "2]")
    assert not small.takes("json_schema", {"type": "array"}, "[1,\n" + " " * 33 + "2]")
    assert not small.takes("json_schema", {"type": "array"}, "[1,\n\n2]")
    assert not small.takes("json_schema", {"type": "array"}, " [1]")
    free = {"type": "array", "x-guidance": {"whitespace_pattern": "\\s+"}}
    assert small.takes("json_schema", free, "[1,\n\n  2]")


def test_any_object_is_an_object_and_nothing_else(small):
    assert small.takes(ANY_OBJECT.kind, ANY_OBJECT.text, '{"a": [1, {}]}')
    assert not small.takes(ANY_OBJECT.kind, ANY_OBJECT.text, "[]")


@pytest.mark.parametrize("pattern", REGEXES)
def test_whatever_is_drawn_under_a_pattern_matches_as_a_whole(small, large, pattern):
    for walks, seeds in ((small, 8), (large, 3)):
        for seed in range(seeds):
            text = walks.random_text("regex", pattern, seed)
            assert re.fullmatch(pattern, text), text


def test_a_digit_of_a_pattern_is_an_ascii_one(small):
    assert small.takes("regex", r"\d+", "42")
    assert not small.takes("regex", r"\d+", "٤٢")


def test_a_moment_is_a_moment(small):
    for seed in range(8):
        moment = json.loads(small.random_text("json_schema", SCHEMAS["moment"], seed))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", moment)


def test_a_choice_is_one_of_the_list(small, large):
    choices = ["yes", "yes, please", "no", "naïve 😀", 'a "quote"\\', "<|im_end|>", "line\nbreak\x7f", "(a|b)*"]
    for walks in (small, large):
        seen = {walks.random_text("choice", choices, seed) for seed in range(60)}
        assert seen <= set(choices) and len(seen) >= 6
        for choice in choices[:-3]:
            walks.follow(walks.constraint("choice", choices), choice)


def test_an_end_is_allowed_exactly_where_the_answer_is_whole(small):
    constraint = small.constraint("choice", ["yes", "yes, please"])
    for token in small.tokenizer.encode("yes, please", add_special_tokens=False):
        assert not constraint.is_complete
        assert small.may_end(constraint) == (token == small.tokenizer.encode(",", add_special_tokens=False)[0])
        constraint.accept(token)
    assert constraint.is_complete
    assert np.flatnonzero(small.allowed(constraint)).tolist() == sorted(small.ends)


def test_lark_grammars_are_followed(small, large):
    for walks in (small, large):
        for seed in range(4):
            text = walks.random_text("grammar", LARK, seed)
            assert re.fullmatch(r"[0-9()+*]+", text) and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)
        walks.follow(walks.constraint("grammar", LARK), "((1+22)*333)")
    assert not small.takes("grammar", LARK, "(1+22")


def test_gbnf_grammars_are_followed(small, large):
    item = r"([a-c]+→[\u4e00-\u4e10]|\[[\s\S]\])"
    for walks in (small, large):
        for seed in range(4):
            text = walks.random_text("grammar", GBNF, seed)
            assert re.fullmatch(f"{item}(, {item}){{1,3}}", text), text
        walks.follow(walks.constraint("grammar", GBNF), "abc→一, [\n], [é]")


def test_a_special_token_spelt_in_a_grammar_comes_as_plain_text(small, large):
    for walks, text in ((small, "<|im_start|>user<|im_end|>"), (large, "<start_of_turn>user<eos>")):
        for kind, value in (("choice", [text]), ("grammar", f'start: "{text}"'), ("regex", re.escape(text))):
            ids = walks.random_ids(walks.constraint(kind, value), 0)
            assert not set(ids) & walks.tokenizer.special_token_ids
            assert walks.tokenizer.decode(ids) == text


def test_a_token_that_ends_answers_is_never_part_of_one(smollm2):
    (word,) = smollm2.encode("yes", add_special_tokens=False)
    walks = Walks(smollm2, (word,))
    ids = walks.random_ids(walks.constraint("choice", ["yes"]), 0)
    assert word not in ids and smollm2.decode(ids) == "yes"


def test_bytes_of_tokens_are_what_the_decoder_makes_of_them(small, large):
    for walks in (small, large):
        table = grammar_module._TokenTable(walks.tokenizer, walks.vocab_size, walks.ends)
        (before,) = walks.tokenizer.encode("a", add_special_tokens=False)
        checked = 0
        for token in random.Random(0).sample(range(walks.tokenizer.vocab_size), 3000):
            if token in walks.tokenizer.special_token_ids or token in walks.ends:
                continue
            decoded = walks.tokenizer.decode([before, token])
            if "\N{REPLACEMENT CHARACTER}" not in decoded:
                assert table.tokens[token] == decoded[1:].encode()
                checked += 1
        assert checked > 2500
        assert table.tokens[walks.tokenizer.vocab_size :] == [b""] * PADDING


def test_byte_tokens_spell_characters(large):
    constraint = large.constraint("choice", ["é", "no"])
    for byte in "é".encode():
        token = large.tokenizer.token_to_id(f"<0x{byte:02X}>")
        assert large.allowed(constraint)[token]
        constraint.accept(token)
    assert constraint.is_complete


def test_a_tokenizer_from_its_file_gives_the_same_masks(small, tmp_path):
    small.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    own = GrammarCompiler(Tokenizer.from_directory(tmp_path), small.vocab_size, small.ends)
    spec = GrammarSpec.of("json_schema", PERSON)
    first, second = own.compile(spec), small.compiler.compile(spec)
    for token in small.tokenizer.encode(json.dumps(DOCUMENTS["person"]), add_special_tokens=False):
        assert np.array_equal(first.mask(), second.mask())
        first.accept(token)
        second.accept(token)


def test_a_space_that_a_tokenizer_puts_before_texts_is_not_forced(llama):
    compiler = GrammarCompiler(llama, llama.vocab_size, llama.eos_token_ids)
    constraint, ids = compiler.compile(GrammarSpec.of("choice", ["hello"])), []
    while not constraint.is_complete:
        ids.append(int(np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))[-1]))
        constraint.accept(ids[-1])
    assert [llama.id_to_token(token) for token in ids] == ["hello"]


def test_forks_go_their_own_ways(small):
    constraint = small.constraint("regex", "(ab|cd){3}")
    constraint.accept(small.tokenizer.token_to_id("a"))
    before = constraint.mask().copy()
    fork = constraint.fork()
    for letter in "bcdcd":
        fork.accept(small.tokenizer.token_to_id(letter))
    assert fork.is_complete and not constraint.is_complete
    assert np.array_equal(constraint.mask(), before)


def test_a_rollback_undoes_tokens_and_ends(small):
    constraint = small.constraint("json_schema", PERSON)
    ids = small.tokenizer.encode(json.dumps(DOCUMENTS["person"]), add_special_tokens=False)
    masks = []
    for token in ids:
        masks.append(constraint.mask().copy())
        constraint.accept(token)
    constraint.accept(small.ends[0])
    constraint.accept(small.ends[1])
    constraint.rollback(2)
    assert constraint.is_complete
    constraint.accept(small.ends[1])
    constraint.rollback(4)
    for token, mask in zip(ids[-3:], masks[-3:], strict=True):
        assert np.array_equal(constraint.mask(), mask)
        constraint.accept(token)
    constraint.rollback(len(ids))
    assert np.array_equal(constraint.mask(), masks[0])


def test_a_token_that_the_mask_forbids_is_not_accepted(small):
    constraint = small.constraint("choice", ["yes", "no"])
    for token in (small.ends[0], small.vocab_size - 1, small.tokenizer.token_to_id("z")):
        with pytest.raises(AssertionError, match="not allowed by choice"):
            constraint.accept(token)
    small.follow(constraint, "no")


@pytest.mark.parametrize(
    ("kind", "text", "reason", "remedy"),
    [
        ("json_schema", "{", "not JSON", "correct the schema"),
        ("json_schema", "[1]", "not a JSON object", "correct the schema"),
        ("json_schema", "[" * 50_000, "not JSON", "correct the schema"),
        ("json_schema", '{"type": "text"}', "Invalid type: text", "correct the schema"),
        ("json_schema", '{"not": {}}', "Unimplemented keys", "lenient"),
        ("json_schema", '{"$ref": "#/x"}', "does not exist", "correct the schema"),
        ("json_schema", '{"oneOf": [{"type": "object"}, {"required": ["a"]}]}', "oneOf", "oneOf as anyOf"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "Unsatisfiable", "correct the schema"),
        ("regex", "(a", "unclosed group", "Rust"),
        ("regex", "a(?=b)", "look-around", "without look-around"),
        ("choice", "[]", "not a list of strings", "one or more"),
        ("choice", '["a", 1]', "not a list of strings", "one or more"),
        ("grammar", "start: thing", "unknown name", "rule 'start'"),
        ("grammar", 'begin: "a"', "no start rule", "rule 'start'"),
        ("grammar", '{"grammars": []}', "", "rule 'start'"),
        ("grammar", 'root ::= "a', "Unexpected end of input", "rule 'root'"),
        ("grammar", "root ::= other", "'other' not found", "rule 'root'"),
        ("grammar", "start: " + "(" * 10_000, "too deeply nested", "rule 'start'"),
        ("regex", "a" * (MAX_TEXT + 1), str(MAX_TEXT), "simpler"),
        ("regex", "[a&&b]", "it matches nothing", "Rust"),
        ("regex", "\ud800", "surrogates", "Rust"),
        ("choice", '["\ud800"]', "", "one or more"),
        ("grammar", "\ud800", "", "rule 'start'"),
        ("json_schema", "\ud800", "", "correct the schema"),
        ("json_schema", '{"const": "\ud800"}', "", "correct the schema"),
        ("poem", "roses", "json_schema, regex, choice, grammar", "use one of them"),
    ],
)
def test_a_broken_spec_is_refused_with_the_reason_and_the_way_out(small, kind, text, reason, remedy):
    with pytest.raises(RequestError) as refusal:
        small.compiler.compile(GrammarSpec(kind, text))
    message = str(refusal.value)
    assert kind in message and reason in message and remedy in message
    assert "\n" not in message and len(message) < 700


def test_values_that_are_no_spec_are_refused():
    for kind, value in (("json_schema", {"a": object()}), ("regex", 3), ("grammar", ["a"]), ("choice", None)):
        with pytest.raises(RequestError, match=kind):
            GrammarSpec.of(kind, value)


def test_a_lenient_schema_leaves_out_what_is_not_supported(small):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert small.takes("json_schema", schema, "[1, 1]")


def test_a_model_without_an_end_is_refused(smollm2):
    with pytest.raises(RequestError, match="generation_config"):
        GrammarCompiler(smollm2, smollm2.vocab_size, ()).compile(ANY_OBJECT)


def test_a_text_that_no_token_spells_is_an_error_not_an_end():
    tokenizer = Tokenizer(Backend(models.BPE({"a": 0, "b": 1, "</s>": 2}, [])), SpecialTokens(eos_token_ids=(2,)))
    compiler = GrammarCompiler(tokenizer, 3, (2,))
    for pattern in ("a[cd]", "ac", "ab?c"):
        constraint = compiler.compile(GrammarSpec("regex", pattern))
        assert constraint.mask().tolist() == [0b001]
        constraint.accept(0)
        with pytest.raises(RequestError, match="regex cannot be followed"):
            while True:
                assert constraint.mask().tolist() == [0b010]
                constraint.accept(1)
    with pytest.raises(RequestError, match="regex='\\[cd\\]' is refused"):
        compiler.compile(GrammarSpec("regex", "[cd]"))


def test_a_place_too_complex_to_follow_is_an_error_of_the_request(small):
    schema = {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"const": i}]} for i in range(1000)}}
    schema |= {"$ref": "#/$defs/0"}
    schema["$defs"]["1000"] = {}
    constraint = small.constraint("json_schema", schema)
    with pytest.raises(RequestError, match="cannot be followed"):
        small.follow(constraint, '"some text"')


def test_a_long_chain_of_rules_does_not_overflow_the_stack(small):
    count = 5_100
    chain = "start: a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(count)) + f'\na{count}:"x"'
    links = 1_450
    nested = {"$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)} | {str(links): {}}}
    for kind, value in (("grammar", chain), ("json_schema", nested | {"$ref": "#/$defs/0"})):
        spec = GrammarSpec.of(kind, value)
        assert MAX_TEXT * 0.9 < len(spec.text) <= MAX_TEXT, len(spec.text)
        try:
            small.compiler.compile(spec).fork().mask()
        except RequestError as refusal:
            assert kind in str(refusal)


def test_compiled_grammars_are_kept_and_bounded(smollm2, monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_token_ids)
    specs = [GrammarSpec("regex", letter) for letter in "abc"]
    for spec in (specs[0], specs[1], specs[0], specs[2]):
        compiler.compile(spec)
    assert list(compiler._compiled) == [specs[0], specs[2]]


def test_constraints_of_many_threads_do_not_disturb_each_other(smollm2):
    walks = Walks(smollm2, smollm2.eos_token_ids)
    names, failures = list(SCHEMAS)[:6] * 2, []

    def work(name: str, seed: int):
        try:
            check_schema(SCHEMAS[name], walks.random_text("json_schema", SCHEMAS[name], seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name, seed)) for seed, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
