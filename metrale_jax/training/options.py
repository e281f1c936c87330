# SPDX-License-Identifier: Apache-2.0
"""`TrainOptions`: what of a drafter's training a user may choose. Imports nothing heavy."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.option_types import refuse_wrong_types

# Kinds of heads, and the share of steps that trains one turn alone. An MTP head's output is like what it reads, so that
# further turns follow; what an EAGLE-3 head goes on with has to be learnt in those: by a share of 0.88 one in eight of
# its second guesses came right.
SHARES = {"eagle3": 0.55, "mtp": 0.88}
KIND_NAMES = tuple(SHARES)
# The value of `prompts` that stands for the built-in ones alone.
BUILT_IN = "built-in"
# What a run may be gone on with under another value of.
FREE = ("data", "checkpoint_minutes", "measured_rows")


@dataclass(frozen=True)
class TrainOptions:
    """How a drafter is trained. Raises `ConfigError` for values out of range.

    `kind` is `mtp` or `eagle3`. The model answers `answers` prompts, by up to `answer_tokens` tokens each, which are
    learnt from, and `held_out` others, which the drafter is measured by. Prompts are those of the file `prompts`, of
    whose first `held_out` none is learnt from; by default they are what a model that chats makes up itself, and some
    built-in ones, which are all for other models and for `prompts="built-in"`. The head scores `draft_vocab_size`
    tokens (0 is all). Training takes `steps` steps of `step_rows` rows of `row_tokens` tokens, drafts `turns` turns
    ahead, and is saved every `checkpoint_minutes`. The first `single_share` of the steps train the first turn alone, in
    a third of the time; None is what suits the kind (`SHARES`). `data` is where answers and the model's rows are kept
    for further runs; without it they are in the output directory until the end. `measured_rows` rows of held-out texts
    are measured by.
    """

    kind: str = "mtp"
    prompts: str | Path | None = None
    data: str | Path | None = None
    answers: int = 600
    held_out: int = 48
    answer_tokens: int = 256
    draft_vocab_size: int = 8192
    steps: int = 2000
    step_rows: int = 1
    row_tokens: int = 512
    turns: int = 3
    single_share: float | None = None
    learning_rate: float = 1e-3
    seed: int = 0
    checkpoint_minutes: float = 3.0
    measured_rows: int = 16

    def __post_init__(self):
        refuse_wrong_types(self)
        if self.kind not in KIND_NAMES:
            raise ConfigError(f"kind={self.kind!r} is not one of {', '.join(KIND_NAMES)}; choose one.")
        least = {"answers": 1, "held_out": 1, "answer_tokens": 2, "steps": 1, "step_rows": 1, "turns": 1, "seed": 0}
        least |= {"row_tokens": 16, "draft_vocab_size": 0, "measured_rows": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name}={getattr(self, name)} is below {lowest}; give an integer from {lowest}.")
        if self.single_share is None:
            object.__setattr__(self, "single_share", SHARES[self.kind])
        if not 0 <= self.single_share <= 1:
            raise ConfigError(f"single_share={self.single_share} is not a share; give a number from 0 to 1.")
        for name in ("learning_rate", "checkpoint_minutes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number above 0; give one.")

    def identity(self) -> dict[str, Any]:
        """What a run must have in common with the one that it goes on with, as plain values."""
        chosen = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in FREE}
        return {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}
