# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead: the arguments of each program as shapes only, so that it can begin before the weights are there."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from metrale_jax.core.sequence import SamplingState
from metrale_jax.core.specs import ParamSpec
from metrale_jax.engine.buckets import Advance, ShapePlan, make_shape_plan
from metrale_jax.engine.device import COPIES, head_of, token_room
from metrale_jax.engine.rows import Chunks, Rows, chunk_rows, decode_rows
from metrale_jax.engine.settings import EngineConfig, blocks_for
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.models.proposer import Drafts
from metrale_jax.sampling.accept import acceptance_rule
from metrale_jax.sampling.params import MAX_LOGPROBS
from metrale_jax.sampling.rows import sampling_state
from metrale_jax.sharding.rules import named_sharding
from metrale_jax.state.pool import PoolLayout
from metrale_jax.steps.build import Steps
from metrale_jax.steps.serving import DrawRows


@dataclass(frozen=True)
class Draw:
    """A program that draws for `rows` sequences, with `extras` if any rule asks for them."""

    rows: int
    extras: bool = False
    num_logprobs: int = 0


@dataclass(frozen=True)
class Pick:
    """A program that picks `rows` of `num_ends` hidden rows."""

    num_ends: int
    rows: int


@dataclass(frozen=True)
class Keep:
    """A program that keeps the last `rows` of `num_ends` hidden rows."""

    num_ends: int
    rows: int


@dataclass(frozen=True)
class Score:
    """A program that scores `num_tokens` prompt tokens."""

    num_tokens: int
    num_logprobs: int


@dataclass(frozen=True)
class Copy:
    """The program that copies blocks."""


@dataclass(frozen=True)
class CopySlots:
    """The program that copies `count` slots."""

    count: int


@dataclass(frozen=True)
class LimitSlots:
    """The program that limits the states of `count` slots."""

    count: int


@dataclass(frozen=True)
class Draft:
    """A program that drafts and runs up to `width` tokens of each of `rows` sequences."""

    rows: int
    width: int


@dataclass(frozen=True)
class Judge:
    """A program that judges `width` drafts of each of `rows` sequences, with `extras` if any rule asks for them."""

    rows: int
    width: int
    extras: bool = False
    num_logprobs: int = 0


@dataclass(frozen=True)
class Begin:
    """The program that begins a sequence in a slot."""


# A first question under a chat template.
SHORT_PROMPT = 32
Program = Begin | Draft | Judge | Advance | Draw | Pick | Keep | Score | Copy | CopySlots | LimitSlots


def abstract_params(specs: DecoderParams, dtype: str, mesh: Mesh | None = None) -> DecoderParams:
    """Shapes, dtypes and on a mesh shardings of the params that `load_params` will make."""

    def leaf(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else named_sharding(spec.axes, spec.shape, mesh)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype_in(dtype)), sharding=sharding)

    return jax.tree.map(leaf, specs)


def first_programs(shapes: ShapePlan) -> tuple[Program, ...]:
    """What a lone short prompt needs: the first two for its first token, then one to go on."""
    return (shapes.advance(0, min(SHORT_PROMPT, shapes.prefill_tokens), 1), Draw(1), shapes.advance(1, 0, 0))


def program_kinds(layout: PoolLayout) -> tuple[bool, bool, bool]:
    """What `all_programs` has to know of a model: whether it keeps state in slots, limits it, and carries anything."""
    return bool(layout.slot_groups), bool(layout.norm_tokens), bool(layout.carried)


def all_programs(
    shapes: ShapePlan, vocab_size: int, has_slots: bool = False, limits_slots: bool = False, carries: bool = False
) -> tuple[Program, ...]:
    """What any load can need of a model whose layers keep state in slots or not, whose norm is limited or not, and
    whose proposer carries something by slot or not. Costly ones come first."""
    advances, rows = shapes.all_advances(), shapes.all_row_buckets()
    most = min(MAX_LOGPROBS, vocab_size)
    draws = [Draw(count, extras, logprobs) for count in rows for extras in (False, True) for logprobs in (0, most)]
    ends = sorted({advance.num_ends for advance in advances})
    picks = [Pick(count, size) for count in ends for size in rows]
    scores = [Score(tokens, most) for tokens in sorted({a.chunk_tokens for a in advances if a.chunk_tokens})]
    copies = (Copy(), *((CopySlots(1), CopySlots(COPIES)) if has_slots or carries else ()))
    copies += (LimitSlots(1), LimitSlots(COPIES)) if limits_slots else ()
    copies += (Begin(),) if carries else ()
    drafts = [Draft(count, width) for count in rows for width in shapes.draft_widths]
    draws += [
        Judge(count, width, extras, logprobs)
        for count in rows
        for width in shapes.draft_widths
        for extras in (False, True)
        for logprobs in (0, most)
    ]
    if has_slots and shapes.num_snapshots:
        keeps = sorted({(advance.num_ends, advance.chunk_rows) for advance in advances if advance.chunk_rows})
        copies += (*(Keep(*sizes) for sizes in keeps), *(Pick(shapes.pool_slots, size) for size in rows))
    return tuple(dict.fromkeys((*advances, *drafts, *draws, *scores, *picks, *copies)))


def compile_programs(
    steps: Steps, params: Any, config: EngineConfig, wanted: Sequence[Program]
) -> list[Future[Program]]:
    """The wanted programs as they will be compiled, two at a time in this order; `params` may be shapes only.

    Most of a compile runs on one core, so that two take little longer than one. It goes on after this returns: whoever
    needs a program before it is done waits for it.
    """
    plan = _Plan(steps, params, config)

    def compiled(program: Program) -> Program:
        plan.compile(program)
        return program

    workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compile")
    promised = [workers.submit(compiled, program) for program in wanted]
    workers.shutdown(wait=False)
    return promised


class _Plan:
    """Arguments of every program of one engine."""

    def __init__(self, steps: Steps, params: Any, config: EngineConfig):
        self.steps, self.params, self.config = steps, params, config
        model = steps.model
        self.shapes = make_shape_plan(config, len(model.config.eos_token_ids))
        self.num_groups = len(model.layout.groups)
        num_blocks = (blocks_for(model.layout, config),) * self.num_groups
        self.pool = steps.abstract_pool(num_blocks, self.shapes.pool_slots)
        self.last_tokens = np.zeros(self.shapes.num_slots + 1, np.int32)

    def compile(self, program: Program) -> None:
        """Compiles one program."""
        head, model = head_of(self.params), self.steps.model.config
        match program:
            case Advance(rows, tokens, chunks):
                decoding = decode_rows(self._rows(rows), _ints(rows)) if rows else ()
                filling = _ints(tokens), _ints(chunks)
                fill = chunk_rows(Chunks(self._rows(chunks), *filling), _ints(chunks)) if chunks else ()
                self.steps.executable("advance", self.params, self.pool, self.last_tokens, decoding, fill)
            case Draw(rows, extras, num_logprobs):
                draw = DrawRows(_ints(rows), _ints(rows), np.zeros(rows, bool), self._sampling(rows, extras))
                arguments = head, self.last_tokens, self._hidden(rows), draw
                self.steps.executable("finish", *arguments, num_logprobs=num_logprobs)
            case Draft(rows, width):
                decoding = decode_rows(self._rows(rows), _ints(rows))
                decoding = decoding.replace(state=decoding.state.replace(sampling=self._sampling(rows)))
                arguments = self.params, self.pool, self.last_tokens, decoding, _ints(rows)
                self.steps.executable("advance_drafts", *arguments, num_drafts=width)
            case Judge(rows, width, extras, num_logprobs):
                scored = acceptance_rule(self.steps.model.acceptance).needs_scores
                scores = np.zeros((rows, width, model.vocab_size), np.float32) if scored else ()
                drafts = Drafts(np.zeros((rows, width), np.int32), _ints(rows), scores)
                draw = DrawRows(_ints(rows), _ints(rows), np.zeros(rows, bool), self._sampling(rows, extras, width + 1))
                arguments = head, self.last_tokens, self._hidden(rows * (width + 1)), drafts, draw
                self.steps.executable("judge", *arguments, num_logprobs=num_logprobs)
            case Begin():
                known = np.zeros((1, token_room(self.steps.model.layout)), np.int32)
                self.steps.executable("begin_slots", self.pool, _ints(1), known, np.zeros(1, bool))
            case Pick(num_ends, rows):
                self.steps.executable("pick_rows", self._hidden(num_ends), _ints(rows))
            case Keep(num_ends, rows):
                kept = self._hidden(self.shapes.pool_slots)
                self.steps.executable("keep_rows", kept, self._hidden(num_ends), _ints(rows))
            case Score(tokens, num_logprobs):
                arguments = head, self._hidden(tokens), _ints(tokens)
                self.steps.executable("prompt_scores", *arguments, num_top=num_logprobs)

            case Copy():
                blocks = tuple(_ints(COPIES) for _ in range(self.num_groups))
                self.steps.executable("copy_blocks", self.pool, blocks, blocks)
            case LimitSlots(count):
                norms = self.steps.model.layout.max_norms
                self.steps.executable("limit_slots", self.pool, _ints(count), norms)
            case CopySlots(count):
                self.steps.executable("copy_slots", self.pool, _ints(count), _ints(count))

    def _sampling(self, rows: int, extras: bool = False, positions: int = 0) -> SamplingState:
        """Rows of padding; with `extras`, masks are for each of so many `positions`, or one for all where 0."""
        history_len = self.config.max_context_tokens if extras else 0
        vocab_size = self.steps.model.config.vocab_size
        state = sampling_state([None] * rows, vocab_size, self.shapes.stop_ids, history_len)
        if not extras or not positions:
            return state
        mask = np.repeat(state.extras.mask[:, None], positions, axis=1)
        return state.replace(extras=state.extras.replace(mask=mask))

    def _rows(self, count: int) -> Rows:
        tables = tuple(np.zeros((count, self.shapes.table_width), np.int32) for _ in range(self.num_groups))
        return Rows(_ints(count), _ints(count), _ints(count), tables)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.steps.model.config.hidden_dim), self.params.embed.dtype)


def _ints(size: int) -> np.ndarray:
    return np.zeros(size, np.int32)
