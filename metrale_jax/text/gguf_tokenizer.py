# SPDX-License-Identifier: Apache-2.0
"""Builds a tokenizer from the metadata of a GGUF file, which holds a vocabulary but no `tokenizer.json`.

Two kinds are known: `gpt2`, byte-level BPE with its merges in the file, and `llama`, a SentencePiece vocabulary with
scores, whose merges are recovered from the vocabulary: every cut of a token into two other tokens is a merge, the best
token's first. Ids equal those of transformers' reader of these files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from metrale_jax.core.errors import TextError
from metrale_jax.text.gguf_pre_tokenizers import WORD_SPLITS
from metrale_jax.text.merges import merges_from_scores
from metrale_jax.text.special_tokens import SpecialTokens, framed
from metrale_jax.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"


@dataclass(frozen=True)
class _Vocabulary:
    """The `tokenizer.ggml.*` fields that both kinds read."""

    fields: Mapping[str, Any]
    tokens: list[str]
    kinds: Sequence[int]

    def get(self, name: str, default: Any = None) -> Any:
        """The field `tokenizer.ggml.<name>`."""
        return self.fields.get(f"tokenizer.ggml.{name}", default)

    def of_kind(self, kind: int) -> list[str]:
        """The tokens that the file marks as `kind`."""
        return [token for token, marked in zip(self.tokens, self.kinds, strict=False) if marked == kind]


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata describes. `fields` maps full names (`tokenizer.ggml.tokens`) to values.

    Raises `TextError` for a vocabulary kind, a word split or a special id that is missing or not known.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise TextError(
            f"tokenizer.ggml.model={kind!r} is not one of {sorted(_BUILDERS)}. "
            "Point to a directory with tokenizer.json, or work with token ids."
        )
    if not len(fields.get("tokenizer.ggml.tokens", ())):
        raise TextError("tokenizer.ggml.tokens is missing. Convert the checkpoint again, or work with token ids.")
    vocabulary = _Vocabulary(
        fields, list(fields["tokenizer.ggml.tokens"]), list(fields.get("tokenizer.ggml.token_type", ()))
    )
    backend, adds_bos = _BUILDERS[kind](vocabulary)
    bos = _named_token(vocabulary, "bos_token_id")
    eos = _named_token(vocabulary, "eos_token_id")
    backend.post_processor = framed(
        bos if vocabulary.get("add_bos_token", adds_bos) else None,
        eos if vocabulary.get("add_eos_token", False) else None,
    )
    template = fields.get("tokenizer.chat_template")
    return Tokenizer(backend, _special_tokens(vocabulary), {"default": template} if template else {})


def _named_token(vocabulary: _Vocabulary, name: str) -> tuple[str, int] | None:
    """The token and id that a field names, or nothing where the file does not have it."""
    token_id = vocabulary.get(name)
    if token_id is None:
        return None
    token_id = int(token_id)
    if not 0 <= token_id < len(vocabulary.tokens):
        raise TextError(
            f"tokenizer.ggml.{name}={token_id} is outside the vocabulary of {len(vocabulary.tokens)} tokens. "
            "Convert the checkpoint again."
        )
    return vocabulary.tokens[token_id], token_id


def _special_tokens(vocabulary: _Vocabulary) -> SpecialTokens:
    """What the file says of special ids; the ends of a turn and of a message count as eos, as in llama.cpp."""
    fields = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    named = {name: _named_token(vocabulary, field) for name, field in fields.items()}
    ends = [_named_token(vocabulary, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    bos, pad = named["bos_token"], named["pad_token"]
    return SpecialTokens(
        bos_token_id=bos[1] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(end[1] for end in ends if end)),
        pad_token_id=pad[1] if pad else None,
        strings={name: token[0] for name, token in named.items() if token},
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """A byte-level BPE backend, and whether such a vocabulary adds bos where the file does not say."""
    name = vocabulary.get("pre", "default")
    if name not in WORD_SPLITS:
        raise TextError(
            f"tokenizer.ggml.pre={name!r} is not one of {', '.join(sorted(WORD_SPLITS))}. "
            "Point to a directory with tokenizer.json, or work with token ids."
        )
    split = WORD_SPLITS[name]
    backend = Backend(_bpe(vocabulary.tokens, _checked_merges(vocabulary), ignore_merges=split.whole_words_first))
    split.apply_to(backend)
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(backend, vocabulary, vocabulary.of_kind(_USER_DEFINED))
    return backend, split.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """A BPE backend with byte fallback that merges as SentencePiece does, which adds bos where nothing is said."""
    dialect = _DIALECTS.get(vocabulary.fields.get("general.architecture", ""), _Dialect())
    tokens, scores = vocabulary.tokens, vocabulary.get("scores")
    if dialect.ranks_by_position:
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = range(0, -len(tokens), -1)
    if scores is None or len(scores) != len(tokens):
        raise TextError(
            f"tokenizer.ggml.scores has {0 if scores is None else len(scores)} entries for {len(tokens)} tokens. "
            "Convert the checkpoint again, or work with token ids."
        )
    unknown = _named_token(vocabulary, "unknown_token_id")
    backend = Backend(
        _bpe(
            tokens,
            merges_from_scores(tokens, scores),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefixed = dialect.prefixes_space and bool(vocabulary.get("add_space_prefix", True))
    if prefixed and dialect.prefixes_every_part:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    elif prefixed:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence(to_text + ([decoders.Strip(" ", 1, 0)] if prefixed else []))
    known = set(tokens)
    _add_marked_tokens(backend, vocabulary, [token for token in vocabulary.of_kind(_USER_DEFINED) if token in known])
    return backend, True


@dataclass(frozen=True)
class _Dialect:
    """What an architecture's SentencePiece vocabulary means beyond the fields of the file.

    `ranks_by_position`: the order of the vocabulary, not the scores, is the order of merging, and runs of spaces are
    merged like other tokens. `prefixes_every_part`: the space before a text is put even before one that begins with
    a space, and after special tokens. `prefixes_space`: a text gets a space before it at all.
    """

    ranks_by_position: bool = False
    prefixes_every_part: bool = False
    prefixes_space: bool = True


_GEMMA = _Dialect(ranks_by_position=True, prefixes_space=False)
_DIALECTS = {"gemma": _GEMMA, "gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _Dialect(prefixes_every_part=True)}


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    return models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges, **options)


def _checked_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of the file as pairs, each of two tokens that join to a third."""
    listed = vocabulary.get("merges")
    if listed is None:
        raise TextError("tokenizer.ggml.merges is missing. Convert the checkpoint again, or work with token ids.")
    known = set(vocabulary.tokens)
    merges = []
    for merge in listed:
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise TextError(
                f"tokenizer.ggml.merges has {merge!r}, which is not two tokens that join to a third. "
                "Convert the checkpoint again, or work with token ids."
            )
        merges.append((left, right))
    return merges


def _add_marked_tokens(backend: Backend, vocabulary: _Vocabulary, user_defined: list[str]) -> None:
    """Makes control and user-defined tokens match as wholes wherever they stand in a text."""
    control = [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_kind(_CONTROL) if token]
    backend.add_special_tokens(control)
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined if token])


_BUILDERS: dict[str, Callable[[_Vocabulary], tuple[Backend, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}
