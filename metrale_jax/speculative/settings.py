# SPDX-License-Identifier: Apache-2.0
"""`PolicySettings`: what `DraftPolicy` is tuned by."""

from dataclasses import dataclass

from metrale_jax.core.errors import MetraleError


@dataclass(frozen=True)
class PolicySettings:
    """Settings of `DraftPolicy`; the defaults suit any drafter. Losses are counted in plain decode steps.

    `margin`: how much faster another width must promise to be than the one in use before it replaces it.
    `skill_decay`, `proposes_decay`: weight of the newest draft in what is known of a sequence.
    `first_skill`: acceptance that is expected of a drafter nobody has seen.
    `patience`: misses in a row after which a sequence pauses if less than `pause_below` drafts are expected to be
    accepted of its first; first for one step, twice as long after each further miss, up to `max_pause` steps.
    `calm`: steps after which a switch of widths is forgotten; each that is not widens the margin by itself once more.
    `loss_share`: share of all steps that drafts may lose against plain decoding over time; `loss_start` may be lost
    at once, and of what drafts have gained, up to `loss_cap` may be lost again. Nothing is drafted beyond that.
    `min_gap`, `max_gap`: steps between trials of what does not seem to pay; each that loses doubles the gap.
    `plain_gap`: drafting steps after which a plain one is run to see what it costs now.
    `unevenness`: share of a step that drafts must bring more the more rows there are, up to this: rows get ahead of one
    another by them, so that at the end of a batch few rows have the machine to themselves.
    `draft_cost`: share of a plain step that a further draft is thought to add while no step has shown it.
    """

    margin: float = 0.05
    skill_decay: float = 0.06
    proposes_decay: float = 0.15
    first_skill: float = 0.6
    patience: int = 4
    pause_below: float = 0.15
    max_pause: int = 8
    calm: int = 200
    loss_share: float = 0.015
    loss_start: float = 1.0
    loss_cap: float = 8.0
    min_gap: int = 4
    max_gap: int = 64
    plain_gap: int = 256
    unevenness: float = 0.08
    draft_cost: float = 0.1

    def __post_init__(self):
        shares = ("margin", "skill_decay", "proposes_decay", "first_skill", "pause_below", "loss_share", "unevenness")
        for name in shares:
            value = getattr(self, name)
            if not 0 < value < 1:
                raise MetraleError(
                    f"{name}={value} is not between 0 and 1; the default is {type(self).__dict__[name]}."
                )
        for name in ("patience", "max_pause", "calm", "min_gap", "plain_gap"):
            value = getattr(self, name)
            if value < 1:
                raise MetraleError(f"{name}={value} is less than 1 step; the default is {type(self).__dict__[name]}.")
        if self.max_gap < self.min_gap:
            raise MetraleError(f"max_gap={self.max_gap} is less than min_gap={self.min_gap}; raise it.")
