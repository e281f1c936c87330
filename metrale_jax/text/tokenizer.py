# SPDX-License-Identifier: Apache-2.0
"""`Tokenizer`: text to ids and back, with the special tokens and the chat template that belong to it."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

from tokenizers import Tokenizer as Backend

from metrale_jax.core.errors import RequestError
from metrale_jax.text.chat_template import ChatTemplate
from metrale_jax.text.decoder_stages import DecoderState, token_to_bytes
from metrale_jax.text.special_tokens import SpecialTokens
from metrale_jax.text.text_bounds import TextBound, text_bound
from metrale_jax.text.tokenizer_files import read_tokenizer_directory

_LONG_TEXT = 1 << 12


@final
class Tokenizer:
    """A `tokenizers` backend with what its files say around it. Holds no state of a request; share it freely.

    The backend is the tokenizer's own from here on: its truncation and padding are switched off.
    """

    def __init__(
        self, backend: Backend, special_tokens: SpecialTokens, chat_templates: Mapping[str, str] | None = None
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = special_tokens
        self._chat_template = ChatTemplate(chat_templates or {}, special_tokens.strings)

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """The tokenizer of a checkpoint directory: `tokenizer.json` and the files that go with it.

        `add_bos_token` and `add_eos_token` of tokenizer_config.json are not read: as in transformers 5, the
        post-processor stored in `tokenizer.json` alone says which tokens frame a text. Raises `TextError`.
        """
        backend, special_tokens, chat_templates = read_tokenizer_directory(Path(path))
        return cls(backend, special_tokens, chat_templates)

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with `template` (Jinja source) in the place of its own chat templates."""
        return Tokenizer(self._backend, self._special_tokens, {"default": template})

    def save(self, directory: Path) -> None:
        """Nothing; `directory` holds the files from which `from_directory` reads this tokenizer.

        Ids that end a turn beyond the tokenizer's own eos belong in a generation_config.json, which is the model's.
        """
        directory = Path(directory)
        self._backend.save(str(directory / "tokenizer.json"))
        text = json.dumps(self.config, indent=2) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        self._chat_template.save(directory)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens spelt out in it become their ids, in every case.

        `add_special_tokens` says whether the framing tokens (bos, eos) of the model are put around it.
        """
        try:
            if len(text) > _LONG_TEXT:
                # Unlike the other, this one lets other threads run meanwhile.
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _no_unicode(text) from error

    def least_tokens(self, text: str) -> int:
        """So many tokens `text` has at least, framing ones aside, told without tokenising it. Raises `RequestError` for
        one with lone surrogates."""
        try:
            return self._bound.least_tokens(text.encode())
        except UnicodeEncodeError as error:
            raise _no_unicode(text) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, equal to transformers' with `clean_up_tokenization_spaces=False`.

        Bytes that are no UTF-8 come out as U+FFFD; ids past the vocabulary give no text.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or nothing for an id past the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, or nothing."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for inside a text: part of a character, perhaps; empty past the vocabulary."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_token_ids:
            return token.encode()
        return token_to_bytes(token, self.decoder_state)

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, or nothing where the model has none."""
        return self._special_tokens.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn, the tokenizer's own eos first."""
        return self._special_tokens.eos_token_ids

    @property
    def pad_token_id(self) -> int | None:
        """The id that the model was padded with in training, or nothing."""
        return self._special_tokens.pad_token_id

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. The model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def decoder_state(self) -> DecoderState:
        """The description of the backend's decoder as its library serialises it, or nothing where it has none."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @property
    def config(self) -> dict[str, Any]:
        """What tokenizer_config.json holds for it: the special tokens by their names."""
        named = dict(self._special_tokens.strings)
        extra = {name: named.pop(name) for name in list(named) if not name.endswith("_token")}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
        return config | ({"extra_special_tokens": extra} if extra else {})

    @property
    def default_chat_template(self) -> str | None:
        """The source of the chat template that serves where none is named, or nothing."""
        return self._chat_template.default

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template to work with."""
        return self._chat_template.exists

    @property
    def chat_template_source(self) -> str:
        """The sources of its chat templates, one behind the other."""
        return self._chat_template.source

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`, as templates write their own.
        `template_kwargs` are variables of the template, or what else `ChatTemplate.render` takes.

        Raises `RequestError` for malformed messages and `TextError` where there is no template or it fails.
        """
        return self._chat_template.render(messages, add_generation_prompt, tools, **template_kwargs)

    @cached_property
    def _bound(self) -> TextBound:
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return text_bound(self._backend, map(self.token_bytes, ids))

    @cached_property
    def _added_token_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())


def _no_unicode(text: Any) -> RequestError:
    return RequestError(
        f"text of type {type(text).__name__} cannot be encoded: it must be a str of valid Unicode without lone "
        "surrogates; decode it with errors='replace' first.",
        "prompt",
    )
