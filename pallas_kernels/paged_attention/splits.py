# SPDX-License-Identifier: Apache-2.0
"""Where a long past is cut for programs that share it: at positions that depend on nothing but the kind of step.

Cutting by how many sequences there are would keep a machine as busy with less to weigh together, but then the order of
a sequence's sums, and in the end its tokens, would depend on its neighbours. The first splits are short, so that a few
sequences of a few thousand tokens occupy a machine; later ones are longer, so that a long past has not too many.
"""

# Splits of one size before those of the next, how much longer these are, and how many sizes there are.
EACH, LONGER, SIZES = 16, 4, 6
# Tokens of the first splits, for so many rows of queries: writing and reading what a split leaves then costs a few
# hundredths of reading its keys and values.
LEAST_TOKENS, LEAST_ROWS = 512, 8


def split_tokens_for(num_rows: int) -> int:
    """Tokens of the first splits for so many rows of queries on each kv head."""
    return LEAST_TOKENS * (1 << max(0, (num_rows - 1) // LEAST_ROWS).bit_length())


def split_start(index, split_tokens: int):
    """The first position of split `index`, which is an int or a traced int32."""
    start, tokens = 0, split_tokens
    for size in range(SIZES):
        start = start + _between(index - size * EACH, EACH) * tokens
        tokens *= LONGER
    return start


def num_splits(num_tokens: int, split_tokens: int) -> int:
    """How many splits a past of up to `num_tokens` has."""
    limit = split_start(SIZES * EACH, split_tokens)
    assert num_tokens <= limit, f"a past of {num_tokens} tokens is above the {limit} that splits reach"
    return next(count for count in range(1, SIZES * EACH + 1) if split_start(count, split_tokens) >= num_tokens)


def _between(value, most: int):
    return min(max(value, 0), most) if isinstance(value, int) else value.clip(0, most)
