# SPDX-License-Identifier: Apache-2.0
"""A tiny model that answers, with a tokenizer of one token a byte."""

from dataclasses import replace

import pytest

from metrale_jax.llm import LLM
from tests.conftest import GOLDENS


class Bytes:
    """A tokenizer that is enough to ask by."""

    has_chat_template = False
    eos_token_ids = ()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """An id for each byte."""
        return [byte % self.vocab_size for byte in text.encode()][:12]

    def __bool__(self) -> bool:
        """False: answers are not turned into text."""
        return False


class ChatBytes(Bytes):
    """One of a model that chats."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """An id for each byte, of however many."""
        return [byte % self.vocab_size for byte in text.encode()]

    def apply_chat_template(self, messages, continue_final_message: bool = False) -> str:
        """A turn in brackets, which the assistant's follows."""
        [message] = messages
        return f"[{message['content']}" if continue_final_message else f"[{message['content']}]"

    def least_tokens(self, text: str) -> int:
        """As many as bytes."""
        return len(text.encode())

    def decode(self, ids) -> str:
        """A letter for each id."""
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.fixture(scope="package")
def tiny():
    """`tiny(name, chat=False)`: a stored model as an `LLM`."""

    def load(name: str, chat: bool = False) -> LLM:
        llm = LLM(GOLDENS / name, max_sequences=4, kv_cache_mib=4)
        llm.loaded = replace(llm.loaded, tokenizer=(ChatBytes if chat else Bytes)(llm.loaded.config.vocab_size))
        return llm

    return load
