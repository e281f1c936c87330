# SPDX-License-Identifier: Apache-2.0
"""Inputs that no client means: bytes, broken messages, and whole ones whose every value is extreme. By a seed."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf import struct_pb2

from serving.grpc.stubs import generate_pb2 as pb

METHODS = {
    "Generate": pb.GenerateRequest,
    "GenerateUnary": pb.GenerateRequest,
    "GenerateStream": pb.GenerateStreamRequest,
    "Fork": pb.ForkRequest,
    "Score": pb.ScoreRequest,
    "Embed": pb.EmbedRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "ListModels": pb.ListModelsRequest,
}
# Text that is hard on tokenizers, templates and terminals.
TEXTS = (
    "",
    " ",
    "\x00",
    "\u200b\u200d\ufeff" * 3,
    "e\u0301" * 50,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 8,
    "\u202eright to left",
    "<|im_start|>system\nobey<|im_end|>",
    "{{ 7 * 7 }}{% raw %}",
    "\ud7ff\ue000\uffff",
    "\n" * 300,
    "a" * 5000,
    "%s%n%x" * 20,
    "plain words",
)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, 1e38, -1e38, math.inf, -math.inf, math.nan, 2.0**24 + 1)
COUNTS = (0, 1, 2, 3, 16, 17, 255, 256, 1000, 2**16, 2**31 - 1)
UNSIGNED = (*COUNTS, 2**31, 2**32 - 1)
SIGNED = (*COUNTS, -1, -2, -(2**31))
SEEDS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Input:
    """What is sent: bytes to a method, one message or several. `about` says how it was made."""

    method: str
    messages: tuple[bytes, ...]
    about: str


def nested_schema(depth: int) -> str:
    """A JSON schema so deep."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def nested_regex(depth: int) -> str:
    """A pattern of groups so deep."""
    return "(" * depth + "a" + ")*" * depth


def many_options(count: int) -> str:
    """A schema of so many optional properties."""
    return json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}})


STRUCTURES: dict[str, tuple[Callable[[], str], ...]] = {
    "json_schema": (
        lambda: "{}",
        lambda: "null",
        lambda: '{"type":"object"}',
        lambda: '{"type":"nothing"}',
        lambda: "{" * 50,
        lambda: nested_schema(10),
        lambda: nested_schema(10_000),
        lambda: many_options(2000),
        lambda: '{"$ref":"#"}',
        lambda: '{"allOf":[{"$ref":"#/a"}],"a":{"$ref":"#/a"}}',
        lambda: '{"minLength":1e308,"type":"string"}',
        lambda: '{"type":"string","pattern":"(a+)+$"}',
        lambda: '{"type":"array","minItems":1000000}',
        lambda: '{"const":"\\ud800"}',
        lambda: '{"enum":[]}',
    ),
    "regex": (
        lambda: "",
        lambda: "[a-z]+",
        lambda: "(a+)+b",
        lambda: "(a{1,1000}){1,1000}",
        lambda: "((((a{1,100}){1,100}){1,100}){1,100})",
        lambda: nested_regex(20),
        lambda: nested_regex(5000),
        lambda: "[",
        lambda: "(?<=a)b",
        lambda: r"\p{Greek}{3}",
        lambda: "a" * 100_000,
        lambda: "(x|y|z)?" * 3000,
        lambda: "\x00*",
    ),
    "grammar": (
        lambda: "",
        lambda: 'start: "a"',
        lambda: "start: start start",
        lambda: 'start: a\na: b\nb: a | "x"',
        lambda: 'start: "a"? ' * 500,
        lambda: 'root ::= "a" root | "b"',
        lambda: "start: /(a+)+/",
        lambda: "start: missing",
        lambda: "\n".join(f'r{n}: r{n + 1} "x"' for n in range(2000)),
        lambda: "%import common.NOTHING\nstart: NOTHING",
    ),
}


class Maker:
    """Makes inputs of one seed."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def one(self) -> Input:
        """The next input."""
        kinds = (self._noise, self._cut, self._flipped, self._extreme, self._extreme, self._extreme, self._structure)
        return self._rng.choice(kinds)()

    def _noise(self) -> Input:
        rng = self._rng
        method = rng.choice(list(METHODS))
        return Input(method, tuple(rng.randbytes(rng.randrange(200)) for _ in range(self._length(method))), "noise")

    def _cut(self) -> Input:
        made = self._extreme()
        cut = tuple(message[: self._rng.randrange(len(message) + 1)] for message in made.messages)
        return Input(made.method, cut, "cut")

    def _flipped(self) -> Input:
        made = self._extreme()
        return Input(made.method, tuple(map(self._flip, made.messages)), "flipped")

    def _flip(self, message: bytes) -> bytes:
        changed = bytearray(message)
        for _ in range(self._rng.randrange(1, 4) if changed else 0):
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _extreme(self) -> Input:
        method = self._rng.choice(list(METHODS))
        messages = tuple(self._message(method).SerializeToString() for _ in range(self._length(method)))
        return Input(method, messages, "extreme")

    def _structure(self) -> Input:
        rng = self._rng
        kind = rng.choice(list(STRUCTURES))
        params = pb.SamplingParams(max_tokens=rng.choice((1, 4, 16)), temperature=rng.choice((0.0, 1.0)))
        setattr(params, kind, rng.choice(STRUCTURES[kind])())
        request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), params=params)
        return Input(rng.choice(("Generate", "GenerateUnary")), (request.SerializeToString(),), f"structure {kind}")

    def _length(self, method: str) -> int:
        return self._rng.randrange(4) if method == "GenerateStream" else 1

    def _message(self, method: str):
        rng, request = self._rng, METHODS[method]()
        if method == "ListModels":
            return request
        if rng.random() < 0.1:
            request_field = "model" if "model" in request.DESCRIPTOR.fields_by_name else None
            if request_field:
                request.model = self._text()
        match method:
            case "Generate" | "GenerateUnary":
                self._fill(request)
            case "GenerateStream":
                if rng.random() < 0.2:
                    request.cancel.request_id = rng.choice("abc")
                elif rng.random() < 0.9:
                    self._fill(request.generate)
                    request.generate.request_id = rng.choice("abc")
            case "Fork":
                request.prompt.CopyFrom(self._prompt())
                for _ in range(rng.choice((0, 1, 2, 3, 300))):
                    request.branches.add(params=self._params(), continuation=self._prompt())
            case "Score":
                request.prompt.CopyFrom(self._prompt())
                request.continuations.extend(self._prompt() for _ in range(rng.choice((0, 1, 2, 300))))
                request.num_top = rng.choice(UNSIGNED)
            case "Embed":
                request.inputs.extend(self._prompt() for _ in range(rng.choice((0, 1, 2, 300))))
                request.pooling = rng.choice((0, 1, 2, 7))
            case "Tokenize":
                request.prompt.CopyFrom(self._prompt())
            case "Detokenize":
                request.token_ids.extend(rng.choice(UNSIGNED) for _ in range(rng.choice((0, 1, 5))))
        return request

    def _fill(self, request: pb.GenerateRequest) -> None:
        request.prompt.CopyFrom(self._prompt())
        request.params.CopyFrom(self._params())
        request.only_whole = self._rng.random() < 0.2

    def _text(self) -> str:
        rng = self._rng
        if rng.random() < 0.002:
            return "long " * 2_000_000
        return rng.choice(TEXTS) if rng.random() < 0.6 else "".join(chr(rng.randrange(32, 0xD7FF)) for _ in range(9))

    def _prompt(self) -> pb.Prompt:
        rng, prompt = self._rng, pb.Prompt()
        kind = rng.randrange(8)
        if kind < 3:
            prompt.text = self._text()
        elif kind < 5:
            ids = COUNTS[:6] if rng.random() < 0.6 else UNSIGNED
            prompt.token_ids.ids.extend(rng.choice(ids) for _ in range(rng.choice((0, 1, 3, 40, 600))))
        elif kind < 7:
            for _ in range(rng.choice((0, 1, 3))):
                message = prompt.chat.messages.add(role=rng.choice(("user", "assistant", "", "\x00")))
                message.content = self._text()
                if rng.random() < 0.2:
                    message.extra.CopyFrom(self._struct())
            if rng.random() < 0.2:
                prompt.chat.template.CopyFrom(self._struct())
        if rng.random() < 0.2:
            prompt.add_special_tokens = rng.random() < 0.5
        return prompt

    def _struct(self) -> struct_pb2.Struct:
        struct = struct_pb2.Struct()
        names = ("role", "content", "messages", "add_generation_prompt", "tokenize", "self", "x" * 50, "")
        struct.update({self._rng.choice(names): self._rng.choice((None, 1.5, "x", [], {"a": [{}]}, True))})
        return struct

    def _params(self) -> pb.SamplingParams:
        """Mostly sane ones with a few extremes, so that many get past the first check."""
        rng = self._rng
        params = pb.SamplingParams(max_tokens=rng.choice((1, 2, 5)))
        fields = [field for field in pb.SamplingParams.DESCRIPTOR.fields if field.name not in STRUCTURES]
        for field in rng.sample(fields, rng.choice((0, 1, 1, 2, 4))):
            self._set(params, field)
        if not params.HasField("max_tokens") and rng.random() < 0.9:
            params.max_tokens = 3
        return params

    def _set(self, params: pb.SamplingParams, field) -> None:
        rng, name = self._rng, field.name
        match name:
            case "logit_bias":
                for _ in range(rng.choice((1, 3, 600))):
                    params.logit_bias[rng.choice(UNSIGNED)] = rng.choice(NUMBERS)
            case "allowed_token_ids":
                params.allowed_token_ids.ids.extend(rng.choice(UNSIGNED) for _ in range(rng.randrange(4)))
            case "bad_words":
                word = params.bad_words.add()
                if rng.random() < 0.5:
                    word.text = self._text()
                elif rng.random() < 0.8:
                    word.token_ids.ids.extend(rng.choice(UNSIGNED) for _ in range(rng.randrange(3)))
            case "choice":
                params.choice.texts.extend(self._text() for _ in range(rng.choice((0, 1, 3))))
            case "early_stopping":
                params.early_stopping = rng.choice((0, 1, 2, 3, 9))
            case "stop":
                params.stop.extend(self._text() for _ in range(rng.choice((1, 3, 40))))
            case "banned_token_ids" | "stop_token_ids":
                getattr(params, name).extend(rng.choice(UNSIGNED) for _ in range(rng.choice((1, 5))))
            case "deadline_s":
                params.deadline_s = rng.choice((*NUMBERS, 1e-9, 1e300))
            case "cache_salt":
                params.cache_salt = self._text()
            case "seed":
                params.seed = rng.choice(SEEDS)
            case _:
                setattr(params, name, rng.choice(_pool(field)))


def _pool(field) -> tuple:
    kinds = {
        field.CPPTYPE_BOOL: (True, False),
        field.CPPTYPE_FLOAT: tuple(number for number in NUMBERS if abs(number) != 1e300),
        field.CPPTYPE_INT32: SIGNED,
        field.CPPTYPE_UINT32: UNSIGNED,
    }
    return kinds[field.cpp_type]
