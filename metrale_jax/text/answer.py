# SPDX-License-Identifier: Apache-2.0
"""`AnswerText`: the text of an answer as its tokens come, stop strings included."""

from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.detokenizer import Detokenizer
from metrale_jax.text.stops import StopMatcher, StopPatterns
from metrale_jax.text.tokenizer import Tokenizer


class AnswerText:
    """Text decided so far. It never shows half a character, nor anything that may yet turn out to be a stop string.

    `stops` are those of `params`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopPatterns):
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(stops, params.include_stop_str_in_output)
        self._free_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._shown = 0
        self._closed = False

    def push(self, token_ids: list[int]) -> bool:
        """Takes tokens that stand; true once a stop string is complete, which the first `min_tokens` cannot make it."""
        for token_id in token_ids:
            piece = self._detokenizer.push([token_id])
            released, stop = self._matcher.push(piece, may_stop=self._free_tokens == 0)
            self._free_tokens = max(0, self._free_tokens - 1)
            self._pieces.append(released)
            if stop is not None:
                self._closed = True
                return True
        return False

    def take(self) -> str:
        """The text decided since the last call."""
        new = self._pieces[self._shown :]
        self._shown = len(self._pieces)
        return "".join(new)

    @property
    def whole(self) -> str:
        """All text decided so far."""
        return "".join(self._pieces)

    def close(self) -> None:
        """Decides what is left: the answer has ended."""
        if not self._closed:
            self._closed = True
            released, stop = self._matcher.push(self._detokenizer.finish(), may_stop=self._free_tokens == 0)
            self._pieces.append(released if stop is not None else released + self._matcher.finish())
