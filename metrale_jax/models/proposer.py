# SPDX-License-Identifier: Apache-2.0
"""`AbstractProposer`: what drafts tokens for a model, as its steps see it.

A proposer is the static, hashable half; its weights are `DecoderParams.drafter`. What its layers keep of a sequence
lies in the model's pool under the sequence's own block tables, so that prefixes, forks and rewinds serve the drafter as
they serve the target. What else it must know of a sequence from one step to the next it carries in the pool by slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.batch import TokenBatch
from metrale_jax.core.config import ModelConfig
from metrale_jax.core.sequence import SequenceState
from metrale_jax.state.formats import StateFormats
from metrale_jax.state.pool import CarrySpec, Pool

if TYPE_CHECKING:
    from metrale_jax.models.decoder import DecoderParams, Model


@struct.dataclass
class Drafts:
    """Guesses of the tokens that follow each sequence's last one: int32 `tokens [S, J]`, of which the first `lens [S]`
    are guesses. `scores` are the float32 logits `[S, J, V]` that they were drawn from, or `()`: not asked for, or each
    was the only choice."""

    tokens: Any
    lens: Any
    scores: Any = ()


@dataclass(frozen=True)
class Wish:
    """How many drafts a row at most has room for in this program, and whether their scores are wanted."""

    num_drafts: int
    scores: bool = False


class AbstractProposer(ABC):
    """Frozen and hashable. All functions are pure and run inside a step's program; slot 0 belongs to padding."""

    captures: tuple[int, ...] = ()
    """After how many of the target's layers `observe` wants the residual stream's rows."""

    one_device: bool = False
    """Whether devices that share the model cannot run it, even where it has no layers of its own."""

    looks_back: int = 0
    """How many tokens before a sequence's last one a step may run anew: windows keep what those see too."""

    def layer_states(self, formats: StateFormats) -> tuple[tuple[Hashable, ...], ...]:
        """The states that each of the drafter's own layers keeps. They are numbered on from the target's layers."""
        return ()

    def carried(self, config: ModelConfig, num_drafts: int) -> tuple[CarrySpec, ...]:
        """What is kept of each sequence by slot beside that, in `Pool.carry`; a step has up to `num_drafts` of it.

        Zeros mean that nothing is known, as when a sequence begins; what is called `TOKENS` has its known tokens then,
        `[max_context_tokens]` by position.
        """
        return ()

    @abstractmethod
    def observe(
        self,
        model: "Model",
        params: "DecoderParams",
        pool: Pool,
        batch: TokenBatch,
        hidden: Float[Array, "T D"],
        captured: tuple[Float[Array, "T D"], ...],
    ) -> Pool:
        """The pool after the drafter took in what the target has just run: any step, of prompts or of answers.

        `hidden` are the target's final rows. Of equal rows the tokens after the first are drafts, which may be rejected
        later: what is kept of them must not be taken for part of the sequence unless its length says so.
        """

    @abstractmethod
    def propose(
        self,
        model: "Model",
        params: "DecoderParams",
        pool: Pool,
        state: SequenceState,
        limits: Int[Array, " S"],
        wish: Wish,
    ) -> tuple[Drafts, Pool]:
        """Up to `limits[s]` drafts of what follows each sequence's `last_token`, which has not been run yet.

        `state.sampling` says how the target draws, so that drafts are drawn with the same noise. Rows have blocks for
        `limits + 1` tokens more; what is written there beyond the length is overwritten by the target's own run.
        """
