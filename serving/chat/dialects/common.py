# SPDX-License-Identifier: Apache-2.0
"""What dialects share: calls that are JSON objects, ids, and tools as JSON lines."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from serving.chat.lark import either, json_of, literal
from serving.chat.tools import Tool


def json_calls(tools: Sequence[Tool], arguments: str) -> tuple[str, tuple[str, ...]]:
    """The name of a rule for a JSON object with the name and the arguments of one of the tools, and all it needs."""
    rules = []
    for index, tool in enumerate(tools):
        opening = literal(f'{{"name": "{tool.name}", "{arguments}": ')
        rules.append(f"object_{index}: {opening} args_{index} {literal('}')}")
    names = [f"object_{index}" for index in range(len(tools))]
    return "object", (f"object: {either(names)}", *rules, *argument_rules(tools))


def argument_rules(tools: Sequence[Tool]) -> tuple[str, ...]:
    """A rule `args_i` for the arguments of each tool, as JSON."""
    return tuple(f"args_{index}: {json_of(tool.held, tool.strict)}" for index, tool in enumerate(tools))


def call_object(call: Mapping[str, Any], arguments: str) -> str:
    """A call of a message as a JSON object with its name and arguments."""
    function = call["function"]
    return json.dumps({"name": function["name"], arguments: function["arguments"]}, ensure_ascii=False)


def tool_lines(tools: Sequence[Tool]) -> str:
    """The tools as JSON, one a line."""
    return "\n".join(json.dumps(tool.shown, ensure_ascii=False) for tool in tools)


def long_id() -> str:
    """An id as OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"
