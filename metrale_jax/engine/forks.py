# SPDX-License-Identifier: Apache-2.0
"""Branches: requests that share the beginning of their prompts, which one of them runs for all.

The others follow it, with slots of their own, until it stands at their `fork_len`: there a chunk of its prompt ends,
and each goes on from it with what else its prompt has. Whoever cannot fork is queued like any other request.
"""

from collections.abc import Sequence
from typing import Any

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import Admitted, Limits
from metrale_jax.engine.moves import Copies
from metrale_jax.engine.request import Request


def check_forks(parts: Sequence[Admitted], shared_tokens: int, limits: Limits) -> None:
    """Nothing. Raises `RequestError` for requests that cannot be branches of one prompt of `shared_tokens`."""
    if not 1 <= len(parts) <= limits.max_sequences:
        raise RequestError(
            f"{len(parts)} branches are not from 1 to the {limits.max_sequences} sequences that run at once; ask for "
            "fewer, or raise max_sequences.",
            "branches",
        )
    first = parts[0]
    for index, part in enumerate(parts):
        params = part.ask.params
        if params.n != 1 or params.beam_width:
            raise RequestError(
                f"branch {index} asks for n={params.n} with beam_width={params.beam_width}, a branch is one answer "
                "that is drawn; add branches instead.",
                "beam_width" if params.beam_width else "n",
            )
        if not 1 <= shared_tokens <= len(part.prompt) or part.prompt[:shared_tokens] != first.prompt[:shared_tokens]:
            raise RequestError(
                f"branch {index} of {len(part.prompt)} tokens does not begin with the {shared_tokens} tokens of the "
                "first; give each the whole shared prompt.",
                "prompt",
            )
        if (part.ask.namespace, params.cache_salt) != (first.ask.namespace, first.ask.params.cache_salt):
            raise RequestError(
                f"branch {index} has another cache_salt than the first, so that they share no cache; give all one.",
                "cache_salt",
            )


def led(requests: Sequence[Request], fork_len: int) -> list[Request]:
    """Those of `requests`, branches that part after `fork_len` tokens, that are to be queued; others follow the first.

    One whose whole prompt is scored runs all of it.
    """
    leader, *others = requests
    alone = [one for one in others if one.params.prompt_logprobs is not None]
    leader.followers = [one for one in others if one.params.prompt_logprobs is None]
    for one in leader.followers:
        one.fork_len = fork_len
    return [leader, *alone]


def forked(engine: Any, request: Request, copies: Copies) -> list[Request]:
    """Lets the branches of a request go on by themselves if it stands where they part; those that have nothing left to
    run draw from the row that it ends in. What has to be copied first is added to `copies`."""
    branches = [one for one in request.followers if one.fork_len and not one.finished]
    if not branches or request.seq_len < branches[0].fork_len:
        return []
    roster = engine.roster
    request.followers = [one for one in request.followers if not one.fork_len]
    done = []
    for one in branches:
        if not _forks(engine, request, one, copies):
            roster.leave(one)
        elif not roster.take(one):
            done.append(one)
    # Whoever shared the block that it goes on writing to has another by now.
    grown = roster.memory.grow(request, request.num_tokens)
    assert grown == [], "a request whose branches have left writes to blocks of its own"
    engine.draws.slots_changed()
    return done


def _forks(engine: Any, request: Request, branch: Request, copies: Copies) -> bool:
    memory, length = engine.memory, request.seq_len
    same_keys = memory.regime(request.known_len) == memory.regime(len(branch.prompt))
    if length != branch.fork_len or not same_keys:
        return False
    branch.lease, branch.seq_len, branch.known_len = request.lease.fork(length), length, len(branch.prompt)
    grown = memory.grow(branch, branch.num_tokens)
    if grown is None:
        memory.end(branch, keep=False)
        return False
    copies.blocks |= {(copy.group, copy.target): copy for copy in grown}
    copies.slots[branch.slot] = request.slot
    copies.begun.append(branch)
    engine.slots.write(branch.slot, branch.lease)
    return True
