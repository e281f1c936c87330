# SPDX-License-Identifier: Apache-2.0
"""Jobs as the engine thread has them: what became of each since it was last looked at."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from serving.core.events import Delta, Embedded, Ended
from serving.core.orders import Began, EmbedOrder, Report, Vectors

if TYPE_CHECKING:
    from metrale_jax.answers import Answer
    from metrale_jax.llm import LLM


class GenerateJob:
    """Answers under way. Choice i of answer a is event index `a` where there are several answers, else `i`."""

    def __init__(self, job_id: int, answers: "Sequence[Answer]"):
        self.job_id, self.answers = job_id, answers
        self._began = False
        self._unended = dict(enumerate(answers))

    @property
    def finished(self) -> bool:
        """Whether all has been told."""
        return not self._unended

    def news(self) -> Iterator[Report]:
        """What is new."""
        if not self._began and any([answer.began for answer in self.answers]):
            self._began = True
            yield Report(self.job_id, Began())
        for place, answer in list(self._unended.items()):
            for piece in answer.new_pieces():
                index = self._index(place, piece.index)
                yield Report(self.job_id, Delta(index, piece.text, piece.token_ids, piece.logprobs, piece.usage))
            if answer.finished:
                del self._unended[place]
                choices = answer.result().choices
                for choice, result in enumerate(choices):
                    last = not self._unended and choice == len(choices) - 1
                    yield Report(self.job_id, Ended(self._index(place, choice), result), last)

    def cancel(self, llm: "LLM") -> None:
        """Gives back what it holds."""
        llm.cancel(self.answers)

    def _index(self, place: int, choice: int) -> int:
        return place if len(self.answers) > 1 else choice


class EmbedJob:
    """Vectors under way: `advance` runs one chunk, so that other requests' steps come between."""

    def __init__(self, order: EmbedOrder, llm: "LLM"):
        self.job_id = order.job_id
        self._running, self._began = _embedded(order, llm), False

    def advance(self) -> Report | None:
        """One chunk; that it began, or all of it when it is done."""
        began, self._began = self._began, True
        try:
            next(self._running)
        except StopIteration as done:
            return Report(self.job_id, Vectors(tuple(done.value)), last=True)
        return None if began else Report(self.job_id, Began())


def _embedded(order: EmbedOrder, llm: "LLM") -> Iterator[None]:
    found = []
    for tokens in order.inputs:
        vector: np.ndarray = yield from llm.embedding_chunks(tokens, order.pooling, order.normalize)
        found.append(Embedded(tuple(vector.tolist()), len(tokens)))
    return found
