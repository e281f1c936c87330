# SPDX-License-Identifier: Apache-2.0
"""Sequences that branch: forks, rewinding and search over tokens, as values.

    live = start(steps, params)
    live, root = live.begin(prompt, SamplingParams(temperature=0))
    live, (kept,) = live.fork(root)                          # rewinding is to have kept a fork
    live, (root,) = live.advance([root])                     # draws one token
    live, pair = live.fork(root, tokens=root.likeliest[:2])  # the same past, the last token another
    live, pair = live.advance(pair)                          # both in one step

A `Branch` is a value. A `Live` is one too, but for its pool, which every call that runs something takes: go on from the
`Live` that comes back, in the same statement. A branch that was advanced or dropped is none of the pool's any more.

A fork shares the full blocks of its past; the block that is filled in part and the slot of recurrent state are copied.
So nothing that a branch does can be seen by another, whatever kinds of state the model's layers keep.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from metrale_jax.branches import Branch, ids
from metrale_jax.core.errors import RequestError
from metrale_jax.core.sequence import stack_states
from metrale_jax.generate import first_state, limited_spans
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.rows import check_token_ids, needs_extras
from metrale_jax.state.pool import Pool
from metrale_jax.steps.build import Steps
from metrale_jax.steps.outcome import StepOutput
from pallas_kernels.shapes import ceil_div

CHUNK_TOKENS = 64

__all__ = ["Branch", "Limits", "Live", "start"]


@dataclass(frozen=True)
class Limits:
    """`max_branches` at a time, of up to `max_tokens` each, in `num_blocks` blocks. A step advances `rows` of them and
    tells the `num_likeliest` likeliest tokens of each."""

    max_branches: int
    max_tokens: int
    num_blocks: int
    rows: int
    num_likeliest: int


def start(
    steps: Steps,
    params: DecoderParams,
    max_branches: int = 16,
    max_tokens: int = 256,
    rows: int = 4,
    num_likeliest: int = 8,
    num_blocks: int | None = None,
) -> "Live":
    """No branches yet, and a pool with room for them: by default for `max_branches` that share nothing.

    The programs are compiled when first used: one for prompts, one to advance and one or two to fork.
    """
    layout = steps.model.layout
    num_blocks = max_branches * ceil_div(max_tokens, layout.block_size) if num_blocks is None else num_blocks
    num_likeliest = min(num_likeliest, steps.model.config.vocab_size)
    limits = Limits(max_branches, max_tokens, num_blocks, rows, num_likeliest)
    wrong = [f"{name}={value}" for name, value in vars(limits).items() if value < 1]
    if wrong:
        raise RequestError(f"{', '.join(wrong)} is below 1; give a count.")
    pool = steps.make_pool((num_blocks + 1,) * len(layout.groups), num_slots=max_branches + 1)
    return Live(steps, params, limits, pool)


@dataclass(frozen=True, eq=False)
class Live:
    """Branches over a pool of their own; `start` makes one."""

    steps: Steps
    params: DecoderParams
    limits: Limits
    pool: Pool
    branches: tuple[Branch, ...] = ()

    def begin(self, prompt: Sequence[int], sampling: SamplingParams, seed: int = 0) -> tuple["Live", Branch]:
        """A branch of `prompt`, of which all tokens but the last have run: nothing is drawn yet.

        Of `sampling` only what chooses the next token by its logits applies. Raises `RequestError` for rules that need
        a history of tokens.
        """
        self._check([])
        config, layout = self.steps.model.config, self.steps.model.layout
        check_token_ids(sampling, config.vocab_size)
        if needs_extras(sampling):
            raise RequestError(
                "penalties, biases and masks need a history of tokens, which branches have none of; leave them out."
            )
        if not len(prompt):
            raise RequestError("prompt of 0 tokens has nothing to go on from; give at least one.")
        width = ceil_div(self.limits.max_tokens, layout.block_size)
        state = first_state(layout, len(prompt), width, sampling, seed, (), config.vocab_size)
        (slot,) = self._free_slots(1)
        return self._extended(Branch((), len(prompt), state).placed((), slot), prompt, ())

    def extend(self, branch: Branch, tokens: Sequence[int]) -> tuple["Live", Branch]:
        """The branch with `tokens` given after its last one; nothing is drawn. It takes the place of `branch`."""
        self._check([branch])
        return self._extended(branch, tokens, (0.0,) * len(tokens))

    def advance(self, branches: Sequence[Branch]) -> tuple["Live", tuple[Branch, ...]]:
        """Each branch with one more token drawn, in order; as many as `rows` by one step. They take the places of
        `branches`: what is wanted again is to be forked before."""
        self._check(branches)
        grown = self._grown(branches, [1] * len(branches))
        pool, advanced = self.pool, {}
        # A row of no past is padding to a step that decodes.
        for index in [index for index, branch in enumerate(grown) if not branch.num_run]:
            pool, out = self._prefilled(pool, grown[index], grown[index].tokens)
            advanced[index] = grown[index].drawn(out, 0)
        others = [index for index in range(len(grown)) if index not in advanced]
        for first in range(0, len(others), self.limits.rows):
            some = others[first : first + self.limits.rows]
            pool, out = self._decoded(pool, [grown[index] for index in some])
            advanced |= {index: grown[index].drawn(out, row) for row, index in enumerate(some)}
        new = tuple(advanced[index] for index in range(len(grown)))
        return self._with(pool, branches, new), new

    def fork(
        self,
        branch: Branch,
        count: int = 1,
        *,
        tokens: Sequence[int] = (),
        seeds: Sequence[int] = (),
        length: int | None = None,
    ) -> tuple["Live", tuple[Branch, ...]]:
        """`count` more branches like `branch`, which stays; or one for each of `tokens`, in the place of the last token
        and among the `likeliest` there, or for each of `seeds`, which it draws by from now on.

        With `length` they have only so many of the tokens, which a recurrent state cannot be taken back to.
        """
        self._check([branch])
        if len(tokens) and len(seeds) and len(tokens) != len(seeds):
            raise RequestError(f"{len(tokens)} tokens and {len(seeds)} seeds do not go in pairs; give one a fork.")
        origin = branch if length is None else self._shortened(branch, length)
        count = len(tokens) or len(seeds) or count
        forks = [origin] * count
        if len(tokens):
            forks = [fork.choosing(int(token)) for fork, token in zip(forks, tokens, strict=True)]
        if len(seeds):
            forks = [fork.drawing_by(int(seed)) for fork, seed in zip(forks, seeds, strict=True)]
        full, some = divmod(origin.num_run, self.steps.model.layout.block_size)
        shared, tail = origin.blocks[:full], origin.blocks[full : full + 1] if some else ()
        slots, blocks = self._free_slots(count), self._free_blocks(count * len(tail))
        own = [blocks[index : index + len(tail)] for index in range(count)]
        forks = tuple(fork.placed((*shared, *ours), slot) for fork, ours, slot in zip(forks, own, slots, strict=True))
        pool = self._copied("copy_blocks", self.pool, tail * count, blocks)
        if self.steps.model.layout.holds_slots:
            pool = self._copied("copy_slots", pool, [branch.slot] * count, slots)
        return self._with(pool, [], forks), forks

    def drop(self, branches: Iterable[Branch]) -> "Live":
        """The pool without these branches: what no other holds is free."""
        branches = list(branches)
        self._check(branches)
        return self._with(self.pool, branches, ())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no branch holds."""
        return self.limits.num_blocks - len({block for branch in self.branches for block in branch.blocks})

    def _with(self, pool: Pool, old: Sequence[Branch], new: Sequence[Branch]) -> "Live":
        stay = [one for one in self.branches if not any(one is gone for gone in old)]
        return replace(self, pool=pool, branches=(*stay, *new))

    def _check(self, branches: Sequence[Branch]) -> None:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool)):
            raise RequestError("this Live's pool was given to a step; go on from the Live that came back from it.")
        for index, branch in enumerate(branches):
            if not any(branch is one for one in self.branches):
                raise RequestError(
                    f"a branch of {len(branch.tokens)} tokens was advanced or dropped; keep a fork of what is wanted "
                    "again."
                )
            if any(branch is one for one in branches[:index]):
                raise RequestError(f"a branch of {len(branch.tokens)} tokens is named twice; fork it before.")

    def _shortened(self, branch: Branch, length: int) -> Branch:
        layout = self.steps.model.layout
        if layout.holds_slots and length != len(branch.tokens):
            raise RequestError(
                f"length={length} is not this branch's {len(branch.tokens)}, and this model keeps recurrent state, "
                "which knows no way back; keep a fork where you will want to go on from."
            )
        return branch.shortened(length)

    def _free_blocks(self, count: int) -> list[int]:
        held = {block for branch in self.branches for block in branch.blocks}
        free = [block for block in range(1, self.limits.num_blocks + 1) if block not in held]
        if len(free) < count:
            raise RequestError(
                f"{count} blocks are above the {len(free)} that are free of {self.limits.num_blocks}; drop branches, "
                "or start with more num_blocks."
            )
        return free[:count]

    def _free_slots(self, count: int) -> list[int]:
        held, most = {branch.slot for branch in self.branches}, self.limits.max_branches
        free = [slot for slot in range(1, most + 1) if slot not in held]
        if len(free) < count:
            raise RequestError(
                f"{len(held) + count} branches are above max_branches={most}; drop some, or start with more."
            )
        return free[:count]

    def _grown(self, branches: Sequence[Branch], counts: Sequence[int]) -> list[Branch]:
        """The branches with blocks for so many more tokens of each, which are about to be run."""
        size, config = self.steps.model.layout.block_size, self.steps.model.config
        most, wanted = min(self.limits.max_tokens, config.max_context_tokens - 1), []
        for branch, count in zip(branches, counts, strict=True):
            length = branch.num_run + count
            if length > most:
                raise RequestError(f"a branch of {length} tokens is above max_tokens={most}; start with more.")
            if branch.prompt_len <= config.recompute_len < length:
                raise RequestError(
                    f"a branch of {length} tokens is above {config.recompute_len}, where this model's past is run "
                    "again; begin another with all of its tokens as the prompt."
                )
            wanted.append(ceil_div(length, size) - len(branch.blocks))
        fresh = iter(self._free_blocks(sum(wanted)))
        tables = [(*one.blocks, *(next(fresh) for _ in range(n))) for one, n in zip(branches, wanted, strict=True)]
        return [one.placed(table, one.slot) for one, table in zip(branches, tables, strict=True)]

    def _extended(self, branch: Branch, tokens: Sequence[int], logprobs: tuple) -> tuple["Live", Branch]:
        run = [*branch.tokens[-1:], *map(int, tokens)][:-1]
        vocab = self.steps.model.config.vocab_size
        wrong = [int(token) for token in tokens if not 0 <= token < vocab]
        if wrong:
            raise RequestError(f"token id {wrong[0]} is not from 0 to {vocab - 1}; use ids of the model's vocabulary.")
        pool, (grown,) = self.pool, self._grown([branch], [len(run)])
        if run:
            pool, _ = self._prefilled(pool, grown, run)
        new = grown.given(tokens, logprobs)
        return self._with(pool, [branch], [new]), new

    def _prefilled(self, pool: Pool, branch: Branch, tokens: Sequence[int]) -> tuple[Pool, StepOutput]:
        """The pool after these tokens of the branch, from where it stands, and what was drawn last."""
        first, state = branch.num_run, branch.state
        for start in range(0, len(tokens), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(tokens))
            for begin, stop in limited_spans(self.steps.model.layout, first + start, first + end):
                chunk = np.zeros(CHUNK_TOKENS, np.int32)
                chunk[: stop - begin] = tokens[begin - first : stop - first]
                pool, state, out = self._run("prefill", pool, state, chunk, ids([stop - begin]))
                pool = self._limited(pool, {branch.slot: stop})
        return pool, jax.device_get(out)

    def _decoded(self, pool: Pool, branches: Sequence[Branch]) -> tuple[Pool, StepOutput]:
        """The pool after each branch's last token, and what was drawn."""
        padding = jax.tree.map(np.zeros_like, branches[0].state)
        state = stack_states([*(one.state for one in branches), *[padding] * (self.limits.rows - len(branches))])
        pool, _, out = self._run("decode", pool, state)
        return self._limited(pool, {one.slot: len(one.tokens) for one in branches}), jax.device_get(out)

    def _run(self, name: str, pool: Pool, *arguments):
        return self.steps.run(name, self.params, pool, *arguments, num_logprobs=self.limits.num_likeliest)

    def _limited(self, pool: Pool, lengths: dict[int, int]) -> Pool:
        """The pool with the recurrent states limited that are due at their lengths."""
        layout = self.steps.model.layout
        due = [slot for slot, length in lengths.items() if layout.norm_tokens and length % layout.norm_tokens == 0]
        for slot in due:
            pool = self.steps.run("limit_slots", pool, ids([slot]), layout.max_norms)
        return pool

    def _copied(self, name: str, pool: Pool, sources: Sequence[int], targets: Sequence[int]) -> Pool:
        """The pool with blocks or slots copied, `rows` by one call; those of padding onto themselves."""
        groups, rows = len(self.steps.model.layout.groups), self.limits.rows
        for start in range(0, len(targets), rows):
            pair = np.zeros((2, rows), np.int32)
            pair[:, : len(targets[start : start + rows])] = sources[start : start + rows], targets[start : start + rows]
            each = [(one,) * groups for one in pair] if name == "copy_blocks" else pair
            pool = self.steps.run(name, pool, *each)
        return pool
