# SPDX-License-Identifier: Apache-2.0
"""`SpecialTokens`: what a tokenizer's files say of its beginning, ending and padding tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers import processors


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that the engine needs, and the strings that chat templates see.

    `eos_token_ids` has every id that ends a turn, the tokenizer's own first. `strings` maps template names such as
    `bos_token` to their text.
    """

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    strings: Mapping[str, str] = field(default_factory=dict)


def framed(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.TemplateProcessing:
    """The post-processor that puts `bos` before and `eos` after a text; each is a token and its id, or nothing."""
    single = ([f"{bos[0]}:0"] if bos else []) + ["$A:0"] + ([f"{eos[0]}:0"] if eos else [])
    pair = single + ([f"{bos[0]}:1"] if bos else []) + ["$B:1"] + ([f"{eos[0]}:1"] if eos else [])
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[t for t in (bos, eos) if t])


def ids_of(backend: Backend, tokens: list[str]) -> tuple[int, ...]:
    """The ids of those `tokens` that the vocabulary has, each once, in order."""
    found = (backend.token_to_id(token) for token in tokens)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))
