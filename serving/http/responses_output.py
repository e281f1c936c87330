# SPDX-License-Identifier: Apache-2.0
"""`Output`: the items of a response, and the events that tell of them."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from serving.chat.dialects.api import Messages
from serving.chat.messages import arguments_of, call_message
from serving.chat.parts import CallArguments, CallBegun, CallEnded, Content, Part, Reasoning, is_whole
from serving.http.sse import named

# What events of an item's text are called, by what it is of.
_TEXTS = {Content: "output_text", Reasoning: "reasoning_text", CallArguments: "function_call_arguments"}


class Output:
    """`items` are those so far; one is open at a time. Events are numbered in their order. Items take
    their `ids`, and get fresh ones where there are none."""

    def __init__(self, ids: Iterable[str] = ()):
        self._ids = iter(ids)
        self.items: list[dict[str, Any]] = []
        self._kind: type | None = None
        self._text: list[str] = []
        self._number = -1
        # Of the text that is open: all, and those that no event has told of.
        self._logprobs: list[dict[str, Any]] = []
        self._untold: list[dict[str, Any]] = []

    def give(self, logprobs: Mapping[str, Any] | None) -> None:
        """Takes OpenAI's logprobs object of tokens whose text comes next."""
        self._untold += logprobs["content"] if logprobs else ()

    def event(self, kind: str, **fields: Any) -> bytes:
        """The next event."""
        self._number += 1
        return named(kind, {"type": kind, **fields, "sequence_number": self._number})

    def of(self, parts: list[Part], status: str = "completed") -> Iterator[bytes]:
        """The events of these parts; calls that end among them have this status."""
        for part in parts:
            if isinstance(part, CallEnded):
                yield from self.closed(status)
                continue
            kind = CallArguments if isinstance(part, CallBegun) else type(part)
            if kind is not self._kind:
                yield from self.closed("completed")
                yield from self._opened(part, kind)
            if not isinstance(part, CallBegun):
                self._text.append(part.text)
                logprobs = {"logprobs": self._told_now()} if kind is Content else {}
                yield self._told(f"response.{_TEXTS[kind]}.delta", delta=part.text, **logprobs)

    def again(self, item: dict[str, Any]) -> Iterator[bytes]:
        """The events of an item that is whole."""
        if item["type"] == "function_call":
            parts = [CallBegun(0, item["call_id"], item["name"]), CallArguments(0, item["arguments"])]
        else:
            kind = Reasoning if item["type"] == "reasoning" else Content
            parts = [kind(part["text"]) for part in item["content"]]
            self.give({"content": [one for part in item["content"] for one in part.get("logprobs", ())]})
        yield from self.of(parts)
        yield from self.closed(item["status"])

    def closed(self, status: str) -> Iterator[bytes]:
        """The end of the item that is open, if one is: it is whole, or broke off."""
        if self._kind is None:
            return
        item, text, kind = self.items[-1], "".join(self._text), self._kind
        self._kind, self._text = None, []
        name = f"response.{_TEXTS[kind]}.done"
        # A stop may have come amid a call.
        item["status"] = "incomplete" if kind is CallArguments and not is_whole(text) else status
        if kind is CallArguments:
            item["arguments"] = text
            yield self._told(name, arguments=text, name=item["name"], of=kind)
        else:
            part = _text_part(kind, text)
            logprobs = {}
            if kind is Content:
                self._told_now()
                logprobs = {"logprobs": self._logprobs}
                self._logprobs = []
            item["content"] = [part | logprobs]
            yield self._told(name, text=text, of=kind, **logprobs)
            yield self._told("response.content_part.done", part=item["content"][0], of=kind)
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=dict(item))

    def _told_now(self) -> list[dict[str, Any]]:
        untold, self._untold = self._untold, []
        self._logprobs += untold
        return untold

    def _opened(self, part: Part, kind: type) -> Iterator[bytes]:
        self._kind = kind
        item = _item(part)
        self.items.append(item | {"id": next(self._ids, item["id"])})
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(self.items[-1]))
        if kind is not CallArguments:
            yield self._told("response.content_part.added", part=_text_part(kind, ""))

    def _told(self, name: str, /, of: type | None = None, **fields: Any) -> bytes:
        """An event within the last item."""
        place = {} if (of or self._kind) is CallArguments else {"content_index": 0}
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self.event(name, **where, **place, **fields)


def messages_of(items: list[dict[str, Any]]) -> Messages:
    """What the model said, as a message of the chat."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        if item["type"] == "function_call":
            call = call_message(item["call_id"], item["name"], arguments_of(item["arguments"], "arguments"))
            message["tool_calls"] = [*message.get("tool_calls", ()), call]
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            text = "".join(part["text"] for part in item["content"])
            message[name] = "\n".join(filter(None, (message.get(name), text)))
    return [message]


def _item(part: Part) -> dict[str, Any]:
    """The item that begins with this part, still empty."""
    number = uuid.uuid4().hex
    if isinstance(part, CallBegun):
        call = {"call_id": part.id, "name": part.name, "arguments": ""}
        return {"id": f"fc_{number}", "type": "function_call", "status": "in_progress", **call}
    if isinstance(part, Reasoning):
        return {"id": f"rs_{number}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    head = {"id": f"msg_{number}", "type": "message", "status": "in_progress"}
    return {**head, "role": "assistant", "content": []}


def _text_part(kind: type, text: str) -> dict[str, Any]:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
