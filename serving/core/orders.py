# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine thread and comes out of it: plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.core.errors import ServiceError
from serving.core.events import Embedded, Event

if TYPE_CHECKING:
    from metrale_jax.answers import Prepared


@dataclass(frozen=True)
class GenerateOrder:
    """Answers to queue under `job_id`, each with as many choices as its params say. With `shared_tokens` they are
    branches of a prompt of so many tokens, which runs once; else they have nothing to do with each other."""

    job_id: int
    prepared: "tuple[Prepared, ...]"
    shared_tokens: int = 0


@dataclass(frozen=True)
class EmbedOrder:
    """Vectors wanted, of each list of token ids."""

    job_id: int
    inputs: tuple[Sequence[int], ...]
    pooling: str
    normalize: bool


@dataclass(frozen=True)
class CancelOrder:
    """The job is wanted no more: what it holds is given back before the next step."""

    job_id: int


@dataclass(frozen=True)
class StopOrder:
    """The thread ends; what still runs is dropped."""


Order = GenerateOrder | EmbedOrder | CancelOrder | StopOrder


@dataclass(frozen=True)
class Began:
    """The first prompt of a job is being run."""


@dataclass(frozen=True)
class Vectors:
    """What an `EmbedOrder` asked for."""

    embedded: tuple[Embedded, ...]


@dataclass(frozen=True)
class Report:
    """News of one job. A `ServiceError` ends it, and so does the last `Ended` or the `Vectors`, told by `last`."""

    job_id: int
    news: Event | Began | Vectors | ServiceError
    last: bool = False
