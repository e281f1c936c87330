# SPDX-License-Identifier: Apache-2.0
"""`SpokenAnswer`: the parts of an answer as OpenAI's messages and deltas have them."""

from typing import Any

from serving.chat.parser import AnswerParser
from serving.chat.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning, is_whole, whole


class SpokenAnswer:
    """One answer as it is read. A `legacy` one has a function_call in the place of tool_calls."""

    def __init__(self, parser: AnswerParser, legacy: bool):
        self._parser, self._legacy = parser, legacy
        self._calls = False
        # Of the last call: a stop may have come amid it.
        self._arguments: list[str] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas of what is new by `text`."""
        return self._deltas(self._parser.feed(text))

    def end(self, cut: bool) -> list[dict[str, Any]]:
        """The deltas of what is left; nothing more comes, perhaps since it was `cut` off."""
        return self._deltas(self._parser.end(cut))

    def message(self, text: str, cut: bool) -> dict[str, Any]:
        """The message of an answer in one piece, to its end or to where it was `cut` off."""
        said = whole(self._parser.feed(text) + self._parser.end(cut))
        self._calls = bool(said.calls)
        self._arguments = [call.arguments for call in said.calls[-1:]]
        # Of a call that was cut off before its name there is nothing to tell.
        content = None if cut and text and not said.content else said.content
        message = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if not said.calls:
            return message
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
        message["content"] = said.content or None
        return message | ({"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls})

    def reason(self, reason: str) -> str:
        """Why it ended, where the model's own end has this `reason`. What ends amid a call has not called."""
        if reason != "stop" or not self._calls or not is_whole("".join(self._arguments)):
            return reason
        return "function_call" if self._legacy else "tool_calls"

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        for part in parts:
            if isinstance(part, CallBegun):
                self._calls, self._arguments = True, []
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
        return [self._delta(part) for part in parts if not isinstance(part, CallEnded)]

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        if isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            named = {"index": part.index, "id": part.id, "type": "function", "function": function}
        else:
            assert isinstance(part, CallArguments), part
            function = {"arguments": part.text}
            named = {"index": part.index, "function": function}
        return {"function_call": function} if self._legacy else {"tool_calls": [named]}
