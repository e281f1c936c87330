# SPDX-License-Identifier: Apache-2.0
"""Prompts as messages of the protocol: a text, token ids, a chat, or one of these with options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.grpc.stubs import generate_pb2 as pb

MESSAGE_FIELDS = frozenset({"role", "content", "name"})


@dataclass(frozen=True)
class Text:
    """A text and whether the tokenizer frames it with its special tokens."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Chat:
    """A chat's messages, whether the template opens the assistant's turn, and further variables of the template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)


# A text; token ids; the messages of a chat, each with `role` and `content`.
PromptInput = str | Sequence[int] | Sequence[Mapping[str, Any]] | Text | Chat


def prompt_message(prompt: PromptInput) -> pb.Prompt:
    """The prompt as a message. Raises `TypeError` for what is none, `ValueError` for token ids out of range."""
    if isinstance(prompt, Text):
        return pb.Prompt(text=prompt.text, add_special_tokens=prompt.add_special_tokens)
    if isinstance(prompt, Chat):
        return pb.Prompt(chat=_chat(prompt))
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
        raise TypeError(f"a prompt of type {type(prompt).__name__} is none; give a text, token ids or messages.")
    parts = list(prompt)
    if parts and isinstance(parts[0], Mapping):
        return pb.Prompt(chat=_chat(Chat(parts)))
    return pb.Prompt(token_ids=token_ids_message("prompt", parts))


def token_ids_message(name: str, ids: Sequence[int]) -> pb.TokenIds:
    """Token ids as a message. Raises `TypeError` or `ValueError` that says `name`."""
    try:
        return pb.TokenIds(ids=ids)
    except TypeError as error:
        raise TypeError(f"{name} holds something that is no token id ({error}); give whole numbers.") from error
    except ValueError as error:
        raise ValueError(f"{name} holds no possible token id ({error}); use ids of the vocabulary.") from error


def _chat(chat: Chat) -> pb.Chat:
    made = pb.Chat(messages=[_message(message) for message in chat.messages])
    if not chat.add_generation_prompt:
        made.add_generation_prompt = False
    if chat.template:
        made.template.update(chat.template)
    return made


def _message(message: Mapping[str, Any]) -> pb.Message:
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise TypeError(f"a message's {name} is {message.get(name)!r}, which is no text; give one.")
    made = pb.Message(role=message["role"], content=message["content"])
    if message.get("name") is not None:
        made.name = message["name"]
    extra = {key: value for key, value in message.items() if key not in MESSAGE_FIELDS}
    if extra:
        made.extra.update(extra)
    return made
