# SPDX-License-Identifier: Apache-2.0
"""Named shapes of the causal convolution, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """For each sequence what it had taken in, its new tokens and what is pending in its slot; 0 new tokens is padding.

    `pending` is how many a slot holds.
    """

    name: str
    starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_pending: tuple[int, ...]
    channels: int = 12
    width: int = 4
    pending: int = 0
    bias: bool = True
    silu: bool = True


CASES = (
    Case("fresh", (0, 0, 0), (5, 1, 130), (0, 0, 0)),
    Case("shorter-than-the-taps", (0, 1, 2, 0), (1, 1, 2, 3), (0, 0, 0, 0)),
    Case("continued-padding", (64, 0, 7), (64, 0, 2), (0, 0, 0), bias=False),
    Case("two-taps", (3, 9), (1, 70), (0, 0), width=2, silu=False),
    Case("pending", (9, 3, 5, 7), (1, 4, 2, 9), (3, 1, 0, 2), pending=3),
)
# Channels, taps and rows that models decode with.
SIZES = ((8192, 4, 1), (8192, 4, 4), (12288, 4, 1))
