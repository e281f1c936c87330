# SPDX-License-Identifier: Apache-2.0
"""The decoders of the `tokenizers` library as stages that work on a stream.

The library decodes a finished list of tokens. A stage gives the same text for the same tokens however they are cut
into pushes: it passes on what no later token can change and keeps the rest. Each `push` takes and returns a list of
token strings and `finish` returns what was kept. The cost of a token does not grow with the text before it.
"""

import codecs
import re
from typing import Any, Protocol, final

DecoderState = dict[str, Any] | None

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class AbstractStage(Protocol):
    """One decoder of a chain, on a stream."""

    def push(self, tokens: list[str]) -> list[str]:
        """What `tokens` and the ones before have settled."""
        ...

    def finish(self) -> list[str]:
        """The rest, when no more tokens come."""
        ...


def streaming_stages(state: DecoderState) -> list[AbstractStage] | None:
    """The stages that stream the decoder described by `state`, or nothing where one of its parts cannot be streamed.

    These are the decoders of byte-level BPE and of SentencePiece vocabularies; those of encoder models (WordPiece,
    CTC) and regular-expression replacements are not among them.
    """
    if state is None:
        return [_SpaceSeparated()]
    stages: list[AbstractStage] = []
    fused = False
    for part in state["decoders"] if state["type"] == "Sequence" else [state]:
        stage = _stage(part, fused)
        if stage is None:
            return None
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
        stages.append(stage)
    return stages


def _stage(part: dict[str, Any], fused: bool) -> AbstractStage | None:
    """The stage for one decoder; `fused` says that the ones before it have made a single token of the text."""
    match part["type"]:
        case "ByteLevel":
            return _ByteLevel()
        case "ByteFallback" if not fused:
            return _ByteFallback()
        case "Fuse":
            return _Pass()
        case "Replace" if "String" in part["pattern"] and (len(part["pattern"]["String"]) == 1 or not fused):
            return _Replace(part["pattern"]["String"], part["content"])
        case "Strip" if part["stop"] == 0:
            return _StripStart(part["content"], part["start"], fused)
        case "Metaspace" if not fused:
            return _Metaspace(part["replacement"], part["prepend_scheme"] != "never")
    return None


@final
class _Pass:
    def push(self, tokens: list[str]) -> list[str]:
        return tokens

    def finish(self) -> list[str]:
        return []


@final
class _SpaceSeparated:
    """What the library does with no decoder at all."""

    def __init__(self):
        self._begun = False

    def push(self, tokens: list[str]) -> list[str]:
        spaced = [f" {token}" if self._begun or index else token for index, token in enumerate(tokens)]
        self._begun = self._begun or bool(tokens)
        return spaced

    def finish(self) -> list[str]:
        return []


@final
class _ByteLevel:
    """Bytes of all tokens joined and read as UTF-8; an unfinished character waits for its other bytes."""

    def __init__(self):
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join(byte_level_bytes(token) for token in tokens))]

    def finish(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


@final
class _ByteFallback:
    """Runs of `<0xNN>` tokens read as UTF-8. A run is good or bad as a whole, so it is kept until it ends."""

    def __init__(self):
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        settled = []
        for token in tokens:
            byte = _fallback_byte(token)
            if byte is None:
                settled += self.finish()
                settled.append(token)
            else:
                self._run.append(byte)
        return settled

    def finish(self) -> list[str]:
        if not self._run:
            return []
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\N{REPLACEMENT CHARACTER}"] * len(run)


@final
class _Replace:
    def __init__(self, pattern: str, content: str):
        self._pattern = pattern
        self._content = content

    def push(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._pattern, self._content) for token in tokens]

    def finish(self) -> list[str]:
        return []


@final
class _StripStart:
    """Up to `limit` characters taken off the start: of the whole text where it is one token, else of every token."""

    def __init__(self, character: str, limit: int, fused: bool):
        self._character = character
        self._limit = limit
        self._left = limit
        self._fused = fused

    def push(self, tokens: list[str]) -> list[str]:
        return [self._stripped(token) for token in tokens]

    def finish(self) -> list[str]:
        return []

    def _stripped(self, token: str) -> str:
        if not self._fused:
            self._left = self._limit
        cut = 0
        while cut < min(self._left, len(token)) and token[cut] == self._character:
            cut += 1
        self._left = 0 if cut < len(token) else self._left - cut
        return token[cut:]


@final
class _Metaspace:
    """The replacement character becomes a space, or nothing in the first token where a prefix had been put there."""

    def __init__(self, replacement: str, prefixed: bool):
        self._replacement = replacement
        self._drop = prefixed

    def push(self, tokens: list[str]) -> list[str]:
        text = []
        for token in tokens:
            text.append(token.replace(self._replacement, "" if self._drop else " "))
            self._drop = False
        return text

    def finish(self) -> list[str]:
        return []


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's `bytes_to_unicode`)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


_BYTE_OF = {ord(character): byte for byte, character in byte_alphabet().items()}


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary spells, or its own UTF-8 where it is not in that alphabet."""
    codes = [_BYTE_OF.get(ord(character)) for character in token]
    return token.encode() if None in codes else bytes(codes)


def _fallback_byte(token: str) -> int | None:
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


def token_to_bytes(token: str, state: DecoderState) -> bytes:
    """The bytes that a token stands for inside a text, under the decoder described by `state`."""
    parts = [] if state is None else state["decoders"] if state["type"] == "Sequence" else [state]
    for part in parts:
        match part["type"]:
            case "ByteLevel":
                return byte_level_bytes(token)
            case "ByteFallback" if (byte := _fallback_byte(token)) is not None:
                return bytes([byte])
            case "Replace" if "String" in part["pattern"]:
                token = token.replace(part["pattern"]["String"], part["content"])
            case "Metaspace":
                token = token.replace(part["replacement"], " ")
    return token.encode()
