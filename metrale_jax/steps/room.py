# SPDX-License-Identifier: Apache-2.0
"""How far a run of drafts may go: host arithmetic that whoever calls `speculate` shares."""


def draft_room(num_tokens: int, tokens_left: int, recompute_len: int = 0, norm_tokens: int = 0) -> int:
    """The most drafts of a sequence of `num_tokens`, its last one not run yet, that may have `tokens_left` more.

    A run gives one token more than its drafts. It must not pass `recompute_len`, where the past is run again, nor the
    next multiple of `norm_tokens`, where a step has to end with nothing pending; 0 is for neither.
    """
    room = tokens_left - 1
    if recompute_len and num_tokens <= recompute_len:
        room = min(room, recompute_len - num_tokens)
    if norm_tokens:
        room = min(room, -num_tokens % norm_tokens - 1)
    return max(room, 0)
