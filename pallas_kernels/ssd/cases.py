# SPDX-License-Identifier: Apache-2.0
"""Named shapes of state space duality, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What each sequence has taken in, its new tokens (0 for padding) and its pending rows, and static sizes.

    `row_width` is the width of equal rows, 0 for ragged ones; `room` how many pending rows a slot can hold.
    """

    name: str
    starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_pending: tuple[int, ...] = ()
    row_width: int = 0
    room: int = 0
    num_heads: int = 4
    num_groups: int = 2
    head_dim: int = 16
    state_dim: int = 8


CASES = (
    Case("decode-S1", (5,), (1,), row_width=1),
    Case("decode-S4-padding", (1, 0, 0, 64), (1, 0, 1, 1), row_width=1),
    Case("decode-N6-K1-H12-Z20", (9, 2), (1, 1), row_width=1, num_heads=6, num_groups=1, head_dim=12, state_dim=20),
    Case("decode-pending", (9, 0, 30, 7), (1, 0, 1, 1), (2, 0, 3, 0), row_width=1, room=3),
    Case("verify-J3", (9, 70, 0, 8), (4, 2, 0, 1), (3, 0, 0, 1), row_width=4, room=3),
    Case("verify-J2-room-5", (9, 70, 3), (3, 2, 1), (5, 1, 0), row_width=3, room=5, num_heads=3, num_groups=3),
    Case("prefill-fresh", (0, 0, 0), (33, 7, 1)),
    Case("prefill-long", (0, 0), (200, 70), num_heads=6, num_groups=2),
    Case("prefill-past", (90, 0, 64, 0), (17, 0, 65, 130)),
    Case("prefill-past-pending", (90, 0, 64, 3), (17, 3, 65, 130), (2, 0, 1, 0), room=2),
    Case("prefill-N5-K5-H7-Z3", (1, 63, 130), (64, 2, 1), num_heads=5, num_groups=5, head_dim=7, state_dim=3),
)

# Sizes that models use, for targets: heads, groups, head widths and state widths. Every backend serves all of them.
SIZES = ((24, 1, 64, 128), (80, 1, 64, 128), (128, 8, 64, 128), (112, 8, 80, 128), (128, 1, 64, 256), (96, 8, 80, 128))
DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "float16")
