# SPDX-License-Identifier: Apache-2.0
"""Named shapes of the gated delta rule, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """For each sequence what it had taken in, its new tokens and what is pending in its slot; 0 new tokens is padding.

    `pending` is how many tokens a slot holds, `decay` the magnitude of the strongest decays' logarithm.
    """

    name: str
    starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_pending: tuple[int, ...]
    key_heads: int = 2
    heads: int = 4
    rows: int = 8
    columns: int = 12
    per_channel: bool = False
    pending: int = 0
    decay: float = 1.0


CASES = (
    Case("fresh", (0, 0, 0), (5, 1, 130), (0, 0, 0)),
    Case("fresh-by-channel", (0, 0, 0), (5, 1, 130), (0, 0, 0), per_channel=True, heads=2),
    Case("continued-padding", (64, 0, 7), (64, 0, 2), (0, 0, 0), decay=0.1),
    Case("strong-decay", (64, 0, 7), (64, 100, 2), (0, 0, 0), decay=300.0),
    Case("strong-decay-by-channel", (64, 0, 7), (64, 100, 2), (0, 0, 0), per_channel=True, decay=300.0),
    Case("pending", (9, 3, 5, 7, 0), (1, 4, 2, 9, 0), (3, 1, 0, 2, 0), pending=3),
    Case("pending-by-channel", (9, 3, 5, 7, 0), (1, 4, 2, 9, 0), (3, 1, 0, 2, 0), pending=3, per_channel=True),
)


@dataclass(frozen=True)
class Size:
    """Heads and widths that a model decodes with."""

    name: str
    key_heads: int
    heads: int
    rows: int
    columns: int
    per_channel: bool


SIZES = (
    Size("qwen3-next", 16, 32, 128, 128, False),
    Size("qwen3.5-27b", 16, 48, 128, 128, False),
    Size("olmo-hybrid-7b", 30, 30, 96, 192, False),
    Size("kimi-linear", 32, 32, 128, 128, True),
)
