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

    def encode(self, text: str) -> list[int]:
        """An id for each byte."""
        return [byte % self.vocab_size for byte in text.encode()][:12]

    def __bool__(self) -> bool:
        """False: answers are not turned into text."""
        return False


@pytest.fixture(scope="package")
def tiny():
    """`tiny(name)`: a stored model as an `LLM`."""

    def load(name: str) -> LLM:
        llm = LLM(GOLDENS / name, max_sequences=4, kv_cache_mib=4)
        llm.loaded = replace(llm.loaded, tokenizer=Bytes(llm.loaded.config.vocab_size))
        return llm

    return load
