# SPDX-License-Identifier: Apache-2.0
"""Bodies that no client means, for each method that takes one: bytes, odd JSON, whole ones of extremes. By a seed."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metrale_jax.sampling.params import SamplingParams
from tests.serving.fuzz.inputs import STRUCTURES, TEXTS

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SANE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    TEXT: {"prompt": "x", "max_tokens": 2},
    EMBED: {"input": ["x", "y"]},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": "tiny", "messages": HELLO},
    RESPONSES: {"input": HELLO, "max_output_tokens": 2},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [1, 2, 3]},
}
SAMPLING = sorted(SamplingParams.__dataclass_fields__)
SHARED = (
    *(
        "model",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "seed",
        "stop",
        "n",
        "logprobs",
    ),
    *("response_format", "structured_outputs", "guided_json", "guided_choice", "return_token_ids", "suffix"),
    *("logprobs", "best_of"),
)
FIELDS = {
    CHAT: (
        *SHARED,
        *SAMPLING,
        *("messages", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "top_logprobs"),
        *("reasoning_effort", "enable_thinking", "chat_template_kwargs", "add_generation_prompt", "modalities"),
        *("max_completion_tokens", "continue_final_message", "audio", "prediction"),
    ),
    TEXT: (*SHARED, *SAMPLING, "prompt", "add_special_tokens", "echo"),
    MESSAGES: (
        *("model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_k", "top_p"),
        *("tools", "tool_choice", "thinking", "metadata", "service_tier", "output_config", "cache_control", "speed"),
    ),
    COUNT: ("model", "messages", "system", "tools", "tool_choice", "thinking"),
    RESPONSES: (
        *("model", "input", "instructions", "max_output_tokens", "stream", "store", "previous_response_id", "text"),
        *(
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "reasoning",
            "temperature",
            "top_p",
            "top_logprobs",
            "include",
        ),
        *("metadata", "truncation", "background", "user", "service_tier", "conversation", "prompt", "max_tool_calls"),
    ),
    EMBED: ("input", "model", "encoding_format", "dimensions", "pooling", "normalize", "add_special_tokens", "user"),
    TOKENIZE: ("prompt", "messages", "model", "add_special_tokens", "return_token_strs", "chat_template_kwargs"),
    DETOKENIZE: ("tokens", "model", "skip_special_tokens"),
}
# Only what is dear by nature stays small: answers by prompts.
COUNTED = ("n", "best_of", "beam_width")
VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda value=value: value for value in (None, True, False, 0, 1, -1, 2, 5, 256, 2**31, 2**63, 2**64, 10**30)),
    *(lambda value=value: value for value in (0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e300, 1e38)),
    *(lambda value=value: value for value in TEXTS),
    *(lambda value=value: copy.deepcopy(value) for value in ([], [[]], [None], {}, {"": {}}, {"a": [1]}, [{}], [[1]])),
    lambda: [1, 2, 3],
    lambda: ["a", "b"],
    lambda: {"65": 100, "66": -100},
    lambda: {"type": "json_object"},
    lambda: {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    lambda: nested(60),
    lambda: [{"role": role, "content": text} for role in ("user", "system", "tool", "") for text in ("a", None)],
    lambda: [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    lambda: "{{ ''.__class__.__mro__ }}",
)
MANY: tuple[tuple[str, str, Callable[[int], Any]], ...] = (
    (TEXT, "stop", lambda count: [f"s{place}" for place in range(count)]),
    (TEXT, "stop_token_ids", lambda count: list(range(count))),
    (TEXT, "logit_bias", lambda count: {str(place): 1 for place in range(count)}),
    (TEXT, "allowed_token_ids", lambda count: [place % 263 for place in range(count)]),
    (TEXT, "banned_token_ids", lambda count: [place % 200 for place in range(count)]),
    (TEXT, "bad_words", lambda count: [f"bad{place}" for place in range(count)]),
    (TEXT, "choice", lambda count: [f"choice {place}" for place in range(count)]),
    (TEXT, "prompt", lambda count: ["x"] * count),
    (TEXT, "prompt", lambda count: [7] * count),
    (TEXT, "prompt", lambda count: "long " * count),
    (TEXT, "regex", lambda count: "(a|b)?" * count),
    (CHAT, "messages", lambda count: HELLO * count),
    (CHAT, "messages", lambda count: [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]),
    (CHAT, "tools", lambda count: [{**TOOL, "function": {"name": f"f{place}"}} for place in range(count)]),
    (CHAT, "tools", lambda count: [{**TOOL, "function": {"name": "f", "parameters": wide(count)}}]),
    (CHAT, "json_schema", lambda count: wide(count)),
    (CHAT, "chat_template_kwargs", lambda count: {f"v{place}": place for place in range(count)}),
    (CHAT, "metadata", lambda count: {f"v{place}": "x" for place in range(count)}),
    (MESSAGES, "messages", lambda count: [{"role": "user", "content": [{"type": "text", "text": "x"}] * count}]),
    (MESSAGES, "tools", lambda count: [{"name": f"f{place}", "input_schema": {}} for place in range(count)]),
    (MESSAGES, "stop_sequences", lambda count: [f"s{place}" for place in range(count)]),
    (RESPONSES, "input", lambda count: HELLO * count),
    (RESPONSES, "metadata", lambda count: {f"v{place}": "x" for place in range(count)}),
    (EMBED, "input", lambda count: ["x"] * count),
    (EMBED, "input", lambda count: [[1]] * count),
    (TOKENIZE, "prompt", lambda count: "é" * count),
    (DETOKENIZE, "tokens", lambda count: [7] * count),
)


@dataclass(frozen=True)
class Case:
    """What is sent where; `about` says how it was made."""

    path: str
    body: bytes
    about: str


def nested(depth: int) -> Any:
    """A list in a list, so deep."""
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


def wide(count: int) -> dict[str, Any]:
    """A schema of so many properties that may be left out."""
    return {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(count)}}


def odd_texts() -> list[str]:
    """Texts that readers of JSON disagree about, around a field."""
    values = (
        *(
            "NaN",
            "-Infinity",
            "1e999",
            "-1e999",
            "9" * 5000,
            "1" + "0" * 4000,
            "0.1" + "0" * 9000,
            "01",
            "+1",
            ".5",
            "1.",
        ),
        *(
            '"\\ud800"',
            '"\\udc00\\ud800"',
            '"\\u0000"',
            '"\\x41"',
            "'a'",
            "tru",
            "undefined",
            "[1,]",
            "{,}",
            "//",
            '"a',
        ),
        *("[" * 900 + "]" * 900, "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000),
        *('{"a":1,"a":2}', '{"\\ud800":1}', '"' + "\t" + '"', "-", "--1", "1e", "0x10", "Infinity", "1_000", "\u0661"),
    )
    texts = [f'{{"FIELD": {value}}}' for value in values]
    whole = (
        "",
        " ",
        "null",
        "[]",
        "1",
        '"x"',
        "{",
        "}",
        "{}{}",
        "{} x",
        "\ufeff{}",
        "\x00",
        "{'a': 1}",
        "[" * 1_000_000,
    )
    return [*texts, *whole]


ODD = odd_texts()


class Maker:
    """Makes cases of one seed."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)

    def one(self) -> Case:
        """The next case."""
        kinds = (self._noise, self._broken, self._odd, self._extreme, self._extreme, self._extreme, self._deep)
        return self._rng.choice((*kinds, self._structure))()

    def _path(self) -> str:
        # What generates has the most to say.
        return self._rng.choice((CHAT, CHAT, TEXT, TEXT, MESSAGES, RESPONSES, *SANE))

    def _noise(self) -> Case:
        return Case(self._path(), self._rng.randbytes(self._rng.randrange(200)), "noise")

    def _broken(self) -> Case:
        rng, case = self._rng, self._extreme()
        changed = bytearray(case.body)
        if rng.random() < 0.5:
            del changed[rng.randrange(len(changed)) :]
        else:
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return Case(case.path, bytes(changed), "broken")

    def _odd(self) -> Case:
        path, text = self._path(), self._rng.choice(ODD)
        body = text.replace("FIELD", self._rng.choice(FIELDS[path])).encode("utf-8", "surrogatepass")
        return Case(path, self._rng.choice((body, body, body, body.decode().encode("utf-16"))), "odd")

    def _extreme(self) -> Case:
        """A sane body with a few fields of any value."""
        rng, path = self._rng, self._path()
        body = copy.deepcopy(SANE[path])
        for name in rng.sample(FIELDS[path], rng.choice((0, 1, 1, 2, 3))):
            body[name] = rng.choice(VALUES)()
        return _case(path, body, "extreme")

    def _deep(self) -> Case:
        """A body with one value somewhere inside exchanged for another."""
        rng, path = self._rng, self._rng.choice((CHAT, CHAT, TEXT, EMBED, MESSAGES, RESPONSES, TOKENIZE))
        body = copy.deepcopy(SANE[path])
        if path == CHAT:
            body |= {"tools": [copy.deepcopy(TOOL)], "tool_choice": {"type": "function", "function": {"name": "f"}}}
            body |= {"stream": True, "stream_options": {"include_usage": True}, "response_format": {"type": "text"}}
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            body["messages"] = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
            body["messages"] += [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]}]
        elif path == MESSAGES:
            block = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
            body["messages"] = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "a"}, block]}]
            result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]}
            body["messages"] += [{"role": "user", "content": [result]}]
            body |= {
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "system": [{"type": "text", "text": "c"}],
            }
            body |= {"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stream": True}
        elif path == RESPONSES:
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            body["input"] = [*HELLO, call, {"type": "function_call_output", "call_id": "c", "output": "a"}]
            body |= {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "stream": True}
            body |= {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}}
        elif path == TOKENIZE:
            body = {"messages": copy.deepcopy(HELLO)}
        holder, key = rng.choice(list(_places(body)))
        holder[key] = rng.choice(VALUES)()
        return _case(path, body, "deep")

    def _structure(self) -> Case:
        rng, path = self._rng, self._rng.choice((CHAT, TEXT))
        kind = rng.choice(list(STRUCTURES))
        given: Any = rng.choice(STRUCTURES[kind])()
        body = copy.deepcopy(SANE[path]) | {"temperature": rng.choice((0, 1)), "max_tokens": rng.choice((1, 16))}
        if kind == "json_schema":
            # As text it is held to be a schema too; nested too deeply for a body, it stays one.
            given = rng.choice((given, _parsed(given)))
        match rng.randrange(4):
            case 0 if kind == "json_schema":
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": given}}
            case 1 if kind == "json_schema" and path == CHAT:
                body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": given}}]
                body["tool_choice"] = rng.choice(("auto", "required"))
            case 2:
                body["structured_outputs"] = {kind.removesuffix("_schema"): given}
            case _:
                body[kind] = given
        return _case(path, body, f"structure {kind}")


def crowds(count: int) -> list[Case]:
    """Bodies that have a very great number of something."""
    return [_case(path, SANE[path] | {name: many(count)}, f"{count} of {name}") for path, name, many in MANY]


def _case(path: str, body: dict[str, Any], about: str) -> Case:
    for name in COUNTED:
        if isinstance(body.get(name), int) and not isinstance(body[name], bool) and 8 < body[name] <= 256:
            body[name] = 8
    return Case(path, json.dumps(body).encode(), about)


def _places(value: Any):
    """Where something could be exchanged: a holder and a key."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
