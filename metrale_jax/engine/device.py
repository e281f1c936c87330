# SPDX-License-Identifier: Apache-2.0
"""`Device`: the engine's programs, the pool that they update, and nothing of requests. The one engine module on JAX.

Arrays go in as numpy and results stay on the device until `fetch`. Every call returns before the device is done.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from metrale_jax.core.sequence import SamplingState
from metrale_jax.engine.buckets import Advance, ShapePlan
from metrale_jax.engine.contents import PART, as_tree, part_of, side_by_side
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.rows import Chunks, Rows, chunk_rows, decode_rows
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.proposer import Drafts
from metrale_jax.state.pool import TOKENS, PoolLayout, read_blocks, read_slots, zeros
from metrale_jax.steps.build import Steps
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates, DrawRows

# Blocks or slots copied by one call: forks copy one a sequence, and a longer list takes several calls.
COPIES = 8
FAILURES = (ArithmeticError, AssertionError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""What running a program may raise, a device's own `JaxRuntimeError` (a RuntimeError) among them."""


@dataclass(frozen=True)
class Hidden:
    """Hidden rows on the device: `ends` that tokens can be drawn from, and `chunks`, one for each prompt token run."""

    ends: Any
    chunks: Any


class Device:
    """Runs steps over one model's params and a pool of `num_blocks` blocks a group. `fill` makes the pool's arrays."""

    def __init__(self, steps: Steps, params: DecoderParams, num_blocks: int, shapes: ShapePlan, fill: Callable = zeros):
        self._steps, self._params = steps, params
        self._head = head_of(params)
        self._programs: dict[tuple, Callable] = {}
        self._zeros: dict[int, jax.Array] = {}
        layout = steps.model.layout
        self._has_slots, self._max_norms = layout.holds_slots, layout.max_norms
        self._carries = bool(layout.carried)
        self._known_tokens = token_room(layout)
        self._fresh_pool = partial(steps.make_pool, (num_blocks,) * len(layout.groups), fill, shapes.pool_slots)
        self._fresh_tokens = partial(np.zeros, shapes.num_slots + 1, np.int32)
        self._fresh_rows = partial(np.zeros, *kept_rows(shapes, params, bool(layout.slot_groups)))
        self.num_groups = len(layout.groups)
        self.reset()

    def reset(self) -> None:
        """Starts from an empty pool: what was in the old one is lost."""
        self.pool, self.last_tokens = self._fresh_pool(), jax.device_put(self._fresh_tokens())
        self._rows = jax.device_put(self._fresh_rows())

    @property
    def pool_lost(self) -> bool:
        """Whether a step took the pool and failed to give one back."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.pool))

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far."""
        return self._steps.num_compiles

    def has_run(self, sizes: Advance) -> bool:
        """Whether a step of these sizes ran before: else its program may have to be compiled first."""
        return ("advance", sizes) in self._programs

    def resident(self, arrays: Any) -> Any:
        """`arrays` on the device, for use in several steps."""
        return jax.device_put(arrays)

    def advance(self, decoding: Rows | None, chunks: Chunks | None) -> Hidden:
        """Runs the last tokens of `decoding` and the tokens of `chunks`; one of them may be None."""
        decode = () if decoding is None else decode_rows(decoding, self._none(len(decoding.seq_lens)))
        fill = () if chunks is None else chunk_rows(chunks, self._none(len(chunks.lengths)))
        sizes = Advance(
            0 if decoding is None else len(decoding.seq_lens),
            *((0, 0) if chunks is None else (len(chunks.tokens), len(chunks.lengths))),
        )
        arguments = self._params, self.pool, self.last_tokens, decode, fill
        self.pool, ends, rows = self._run("advance", sizes, *arguments)
        return Hidden(ends, rows)

    def advance_drafts(
        self, decoding: Rows, sampling: SamplingState, limits: np.ndarray, num_drafts: int
    ) -> tuple[Any, Drafts]:
        """Drafts up to `limits [S]` tokens of each row and runs them after its last token: their hidden rows, and the
        drafts. `sampling` says how they are drawn."""
        rows = decode_rows(decoding, self._none(len(decoding.seq_lens)))
        rows = rows.replace(state=rows.state.replace(sampling=sampling))
        arguments = self._params, self.pool, self.last_tokens, rows, limits
        sizes = len(limits)
        self.pool, hidden, drafts = self._run("advance_drafts", sizes, *arguments, num_drafts=num_drafts)
        return hidden, drafts

    def judge(self, hidden: Any, drafts: Drafts, rows: DrawRows, num_logprobs: int) -> StepOutput:
        """The tokens that stand after each of `rows`: drafts that are accepted, and one more."""
        sizes = *drafts.tokens.shape, isinstance(rows.sampling.extras, tuple)
        arguments = self._head, self.last_tokens, hidden, drafts, rows
        self.last_tokens, out = self._run("judge", sizes, *arguments, num_logprobs=num_logprobs)
        return out

    def begin(self, slot: int, tokens: Sequence[int], fresh: bool = True) -> None:
        """A sequence of these tokens begins in the slot, before any step that is dispatched later: nothing that a
        proposer carries there of another one is left, unless it goes on with what that one was, and is not `fresh`."""
        if self._carries:
            known = np.zeros((1, self._known_tokens), np.int32)
            known[0, : len(tokens)] = tokens[: self._known_tokens]
            where = np.asarray([slot], np.int32), known, np.asarray([fresh])
            self.pool = self._run("begin_slots", (), self.pool, *where)

    def draw(self, hidden: Hidden, picks: np.ndarray | None, rows: DrawRows, num_logprobs: int) -> StepOutput:
        """A token for each of `rows`, drawn from `hidden.ends[picks]`, or from all of them in order where None."""
        sizes = len(rows.positions), isinstance(rows.sampling.extras, tuple)
        arguments = self._head, self.last_tokens, self._picked(hidden, picks), rows
        self.last_tokens, out = self._run("finish", sizes, *arguments, num_logprobs=num_logprobs)
        return out

    def candidates(self, hidden: Hidden, picks: np.ndarray | None, rows: DrawRows, num_top: int) -> Candidates:
        """The `num_top` likeliest tokens of each of `rows`, of which none is drawn."""
        sizes = len(rows.positions), isinstance(rows.sampling.extras, tuple)
        return self._run("candidates", sizes, self._head, self._picked(hidden, picks), rows, num_top=num_top)

    def _picked(self, hidden: Hidden, picks: np.ndarray | None) -> Any:
        if picks is None:
            return hidden.ends
        return self._run("pick_rows", (len(hidden.ends), len(picks)), hidden.ends, picks)

    def score(self, hidden: Hidden, targets: np.ndarray, num_logprobs: int) -> Any:
        """Log-probabilities of `targets [T]`, one after each prompt token run, and of the likeliest tokens."""
        return self._run("prompt_scores", (len(targets),), self._head, hidden.chunks, targets, num_top=num_logprobs)

    def keep_rows(self, hidden: Hidden, units: np.ndarray) -> None:
        """Keeps rows of `hidden.ends`, the last of them, one for each of `units`; those of unit 0 are not kept."""
        sizes = len(hidden.ends), len(units)
        self._rows = self._run("keep_rows", sizes, self._rows, hidden.ends, units)

    @property
    def kept_rows(self) -> Hidden:
        """The rows kept by now, by unit: tokens can be drawn from them as from those of a step."""
        return Hidden(self._rows, ())

    def put_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Sets the tokens that `slots` run next."""
        self.last_tokens = self._run("put_tokens", (len(slots),), self.last_tokens, slots, tokens)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, before any step that is dispatched later."""
        for start in range(0, len(copies), COPIES):
            sources, targets = (tuple(np.zeros((self.num_groups, COPIES), np.int32)) for _ in range(2))
            for column, copy in enumerate(copies[start : start + COPIES]):
                sources[copy.group][column], targets[copy.group][column] = copy.source, copy.target
            self.pool = self._run("copy_blocks", (), self.pool, sources, targets)

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies what layers keep in slots, (from, to) each, before any step that is dispatched later."""
        if not self._has_slots:
            return
        for start in range(0, len(copies), COPIES):
            part = copies[start : start + COPIES]
            pairs = np.zeros((2, slot_copies(len(part))), np.int32)
            pairs[:, : len(part)] = np.transpose(part)
            self.pool = self._run("copy_slots", pairs.shape[1], self.pool, pairs[0], pairs[1])

    def limit_slots(self, slots: Sequence[int]) -> None:
        """Limits the norms of what layers keep in slots, before any step that is dispatched later."""
        for start in range(0, len(slots), COPIES):
            part = slots[start : start + COPIES]
            padding = [0] * (slot_copies(len(part)) - len(part))
            ids = np.asarray([*part, *padding], np.int32)
            self.pool = self._run("limit_slots", len(ids), self.pool, ids, self._max_norms)

    def read_blocks(self, blocks: Sequence[Sequence[int]]) -> list[Any]:
        """What is in `blocks[g]` of each group, in parts of up to `PART` blocks; to be fetched."""
        starts = range(0, max(map(len, blocks)), PART)
        return [self._run("read_blocks", (), self.pool, part_of(blocks, start)) for start in starts]

    def read_slot(self, slot: int) -> Any:
        """What is in the slot, to be fetched; `()` where no layer keeps anything there."""
        return self._run("read_slots", (), self.pool, np.asarray([slot], np.int32)) if self._has_slots else ()

    def write_state(self, blocks: Sequence[Sequence[int]], slot: int, content: tuple[Any, Any]) -> None:
        """Puts what `read_blocks` and `read_slot` gave into other blocks and another slot, before any step that is
        dispatched later. A slot's content may be missing."""
        parts, kept = content
        for index, part in enumerate(parts):
            self.pool = self._run("write_blocks", (), self.pool, part_of(blocks, index * PART), part)
        if self._has_slots and kept != ():
            self.pool = self._run("write_slots", (), self.pool, np.asarray([slot], np.int32), kept)

    def _run(self, name: str, sizes: Hashable, *arguments, **static) -> Any:
        """The results of a program, which is found by `sizes`: nothing else of its arguments' shapes varies over one
        pool, and to look at them all costs more than all that the host does for eight sequences. A program raises
        TypeError for shapes that it was not compiled for."""
        key = (name, sizes, *static.values())
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._steps.executable(name, *arguments, **static)
        return program(*arguments)

    def _none(self, size: int) -> jax.Array:
        if size not in self._zeros:
            self._zeros[size] = jax.device_put(np.zeros(size, np.int32))
        return self._zeros[size]

    def as_state(self, num_blocks: int, arrays: Sequence[np.ndarray]) -> tuple[Any, Any]:
        """What `read_blocks` gave for so many blocks of a group, and `read_slot`, of their arrays in order. Raises
        ValueError where they are not of this pool's shapes."""
        part, slot = self._shapes()
        return as_tree(([part] * -(-num_blocks // PART), slot), arrays)

    @staticmethod
    def arrays_of(content: Any) -> list[np.ndarray]:
        """The arrays of what was fetched, in the order in which `as_state` takes them."""
        return jax.tree.leaves(content)

    @staticmethod
    def split_blocks(parts: Sequence[Any], counts: Sequence[int]) -> list[list[np.ndarray]]:
        """The arrays of each block, `counts[g]` of group g after those of the groups before, of what `read_blocks`
        gave."""
        found = []
        for group, count in enumerate(counts):
            leaves = [jax.tree.leaves(part[group]) for part in parts]
            places = [divmod(index, PART) for index in range(count)]
            found += [[np.ascontiguousarray(leaf[:, i : i + 1]) for leaf in leaves[part]] for part, i in places]
        return found

    @staticmethod
    def split_slot(content: Any) -> list[list[np.ndarray]]:
        """The arrays of what `read_slot` gave."""
        return [jax.tree.leaves(content)]

    def join(self, blocks: Sequence[Sequence[Sequence[np.ndarray]]], slot: Sequence[np.ndarray]) -> tuple[list, Any]:
        """What `write_state` takes, of the arrays of single blocks of each group and of a slot, or of none. Raises
        ValueError where they are not of this pool's shapes."""
        part, kept = self._shapes()
        parts = []
        for start in range(0, max(map(len, blocks)), PART):
            wide = []
            for shapes, held in zip(part, blocks, strict=True):
                leaves, some = jax.tree.leaves(shapes), held[start : start + PART]
                columns = list(zip(*some, strict=True)) if some else [()] * len(leaves)
                wide += [side_by_side(leaf, column) for leaf, column in zip(leaves, columns, strict=True)]
            parts.append(as_tree(part, wide))
        return parts, as_tree(kept, slot) if slot else ()

    def _shapes(self) -> tuple[Any, Any]:
        """Shapes of a part of blocks and of a slot."""
        ids = part_of([[]] * self.num_groups, 0)
        part = jax.eval_shape(read_blocks, self.pool, ids)
        return part, jax.eval_shape(read_slots, self.pool, ids[0][:1]) if self._has_slots else ()

    @staticmethod
    def num_bytes(content: Any) -> int:
        """Bytes of what was fetched."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(content))

    @staticmethod
    def wait(hidden: Hidden) -> None:
        """Nothing, when the step that gave `hidden` is done. Raises what it failed with."""
        jax.block_until_ready(hidden.ends)

    @staticmethod
    def fetch(out: Any) -> Any:
        """A result as numpy arrays, once the device has it. Raises what the step that made it raised."""
        return jax.device_get(out)


def token_room(layout: PoolLayout) -> int:
    """How many tokens of a sequence are carried by slot; 0 where none are."""
    return next((one.shape[0] for one in layout.carried if one.name == TOKENS), 0)


def slot_copies(count: int) -> int:
    """How many slots a program copies where `count` are to be: states are large, and one at a time is usual."""
    return 1 if count == 1 else COPIES


def kept_rows(shapes: ShapePlan, params: DecoderParams, has_slots: bool) -> tuple[tuple[int, int], Any]:
    """Shape and dtype of the hidden rows that are kept, one for each slot of the pool if there are some to keep."""
    return (shapes.pool_slots if has_slots and shapes.num_snapshots else 0, params.embed.shape[1]), params.embed.dtype


def head_of(params: DecoderParams) -> DecoderParams:
    """The part of `params` that turns hidden rows to logits."""
    return DecoderParams(params.embed, (), (), params.head)
