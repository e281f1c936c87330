# SPDX-License-Identifier: Apache-2.0
"""The word splits that GGUF files name in `tokenizer.ggml.pre`.

A byte-level vocabulary's merges were learned inside words, and a GGUF file says how to cut these only by a name that
llama.cpp gave to the model's own pre-tokenizer (`src/llama-vocab.cpp`). Patterns and normalizers are those of the
models' `tokenizer.json`, and so go beyond llama.cpp, which composes no characters (NFC).
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class WordSplit:
    """How one named pre-tokenizer cuts a text, and what comes with the name.

    `patterns` are applied one after the other; `then_gpt2` adds GPT-2's own. `whole_words_first` looks a word up
    before it is merged, `adds_bos` is the default where the file has no `add_bos_token`, `composes` applies NFC.
    """

    patterns: tuple[str, ...] = ()
    then_gpt2: bool = False
    whole_words_first: bool = False
    adds_bos: bool = False
    composes: bool = False

    def apply_to(self, backend: Backend) -> None:
        """Sets the normalizer and pre-tokenizer of `backend`."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.then_gpt2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        if self.composes:
            backend.normalizer = normalizers.NFC()


_SHARED = (
    (WordSplit(then_gpt2=True), "default gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling roberta-bpe"),
    (
        WordSplit((r"\p{N}",), then_gpt2=True),
        "smollm starcoder refact codeshell exaone minerva-7b mellum2",
    ),
    (WordSplit((r"\p{N}",), then_gpt2=True, composes=True), "command-r"),
    (
        WordSplit((_LLAMA3,), whole_words_first=True, adds_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (WordSplit((_LLAMA3,)), "dbrx smaug-bpe"),
    (WordSplit((_QWEN2,), composes=True), "qwen2"),
    (WordSplit((_QWEN2,)), "deepseek-r1-qwen stablelm2 megrez kormo"),
    (WordSplit((_QWEN35,), composes=True), "qwen35"),
    (WordSplit((_TEKKEN,), whole_words_first=True, adds_bos=True), "tekken"),
    (WordSplit((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (WordSplit(_DEEPSEEK3), "deepseek-v3"),
)

WORD_SPLITS: dict[str, WordSplit] = {name: split for split, names in _SHARED for name in names.split()}
