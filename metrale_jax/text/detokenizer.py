# SPDX-License-Identifier: Apache-2.0
"""`Detokenizer`: the text of a growing stream of tokens, piece by piece."""

from collections.abc import Sequence
from typing import final

from metrale_jax.text.decoder_stages import streaming_stages
from metrale_jax.text.tokenizer import Tokenizer


@final
class Detokenizer:
    """One stream. All pieces from `push`, and then `finish`, joined are `tokenizer.decode` of all the ids.

    A piece never ends inside a character, and text once given is never taken back: what a later token may change is
    kept, which is the tail of an unfinished character or a run of SentencePiece byte tokens (valid or not as a whole).
    The cost of a token is constant. A decoder that cannot be streamed (`streaming_stages`) gives all text at the end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._stages = streaming_stages(tokenizer.decoder_state)
        self._unstreamed: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens have settled, which may be empty or include text of earlier ones."""
        if self._stages is None:
            self._unstreamed.extend(token_ids)
            return ""
        spellings = (self._tokenizer.id_to_token(int(i)) for i in token_ids if i not in self._skipped)
        tokens = [token for token in spellings if token is not None]
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        """The rest of the text, an unfinished character as U+FFFD. Nothing may be pushed afterwards."""
        if self._stages is None:
            return self._tokenizer.decode(self._unstreamed, skip_special_tokens=self._skip_special_tokens)
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.push(tokens) + stage.finish()
        return "".join(tokens)
