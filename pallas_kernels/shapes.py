# SPDX-License-Identifier: Apache-2.0
"""The legend of axis letters, and small pure functions on sizes.

T  tokens in a step (flat, padded)     S  sequences in a step      R  rows wanting logits
D  model width                         F  ffn width                V  vocabulary
N  query heads                         K  kv heads                 H  head width
L  layers in a state group             P  blocks in a pool         B  tokens a block
M  blocks a sequence row               U  state slots              W  conv window
J  drafted tokens                      E  experts                  Q  query tokens a sequence row, padded

There is no batch axis: steps are ragged, so `B` is free to mean the block.
"""


def ceil_div(value: int, divisor: int) -> int:
    """How many `divisor`s cover `value`."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def next_power_of_two(value: int) -> int:
    """The least power of two that is at least `value` (1 for anything below 1)."""
    return 1 << max(0, value - 1).bit_length()
