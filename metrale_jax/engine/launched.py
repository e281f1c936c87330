# SPDX-License-Identifier: Apache-2.0
"""`Launched`: a step that is under way and what is to be read of it."""

from dataclasses import dataclass

from metrale_jax.engine.drafting import Timing
from metrale_jax.engine.request import Request
from metrale_jax.engine.roster import Chunk
from metrale_jax.engine.search import Search


@dataclass(frozen=True)
class Launched:
    """A step that the host has not read: what it drew and the requests that have a token in it, by row; the scores of
    its prompt tokens and the chunks that they belong to; and searches with the candidates of their beams. One that only
    runs prompts has nothing to read, and is waited for by its `mark`: so the host is never more than a step ahead."""

    out: object
    rows: tuple[tuple[int, Request], ...]
    scores: object = None
    chunks: tuple[Chunk, ...] = ()
    searches: tuple[tuple[Search, list[Request], object], ...] = ()
    timing: Timing | None = None
    mark: object = None

    @property
    def drafted(self) -> bool:
        """Whether it is to be seen how far its requests got."""
        return self.timing is not None and self.timing.width > 0
