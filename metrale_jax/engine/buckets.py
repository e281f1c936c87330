# SPDX-License-Identifier: Apache-2.0
"""`ShapePlan`: the only source of shapes, so that the set of executables is finite and known."""

from dataclasses import dataclass

from pallas_kernels.shapes import ceil_div, next_power_of_two

# Fewer prompt tokens are padded to this: what is left of a prompt after a prefix hit is often less than a block.
SMALLEST_PREFILL = 16
# Above this, rows of padding cost more than another executable.
MANY_ROWS = 16
# A step that decodes and prefills comes in few sizes, since each has both forms of attention to compile.
SMALLEST_MIXED_TOKENS, SMALLEST_MIXED_ROWS = 128, 8


@dataclass(frozen=True)
class Advance:
    """Sizes of a step over the layers: rows that decode, prompt tokens and the rows that share them; 0 for none."""

    decode_rows: int
    chunk_tokens: int
    chunk_rows: int

    @property
    def num_ends(self) -> int:
        """Hidden rows that tokens can be drawn from."""
        return self.decode_rows + self.chunk_rows


@dataclass(frozen=True)
class ShapePlan:
    """Bucketed sizes of steps. `table_width` is M, block ids a row; slots are numbered from 1.

    Without `mixes`, decoding and prefill are launched apart, each with fitting sizes. `step_tokens` prompt tokens take
    as long as the rest of a step. Beside the slots of sequences the pool has some for `num_snapshots`. Steps that draft
    have one of `draft_widths`, the most drafts of a row.
    """

    num_slots: int
    table_width: int
    prefill_tokens: int
    prefill_rows: int
    stop_ids: int
    mixes: bool = True
    step_tokens: int = 0
    num_snapshots: int = 0
    draft_widths: tuple[int, ...] = ()

    @property
    def pool_slots(self) -> int:
        """Slots of the pool: that of padding, one a sequence, and one a snapshot."""
        return 1 + self.num_slots + self.num_snapshots

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """What the tokens of a step that only prefills are padded to, in ascending order."""
        sizes = {self.advance(0, count, 1).chunk_tokens for count in range(1, self.prefill_tokens + 1)}
        return tuple(sorted(sizes))

    def row_bucket(self, count: int) -> int:
        """Rows of a step or draw over `count` sequences: the next power of two or, of many, three quarters of it."""
        assert 0 < count <= self.num_slots, f"{count} sequences do not fit {self.num_slots} rows"
        size = next_power_of_two(count)
        if size > MANY_ROWS and count <= size * 3 // 4:
            size = size * 3 // 4
        return min(size, self.num_slots)

    def advance(self, num_decoding: int, num_tokens: int, num_chunks: int) -> Advance:
        """Sizes of a step over so many decoding sequences and `num_tokens` tokens of `num_chunks` prompts."""
        assert num_tokens <= self.prefill_tokens, f"{num_tokens} tokens do not fit a step of {self.prefill_tokens}"
        if not num_chunks:
            return Advance(self.row_bucket(num_decoding), 0, 0)
        smallest = SMALLEST_MIXED_TOKENS if num_decoding else SMALLEST_PREFILL
        tokens = min(max(next_power_of_two(num_tokens), smallest), self.prefill_tokens)
        if not num_decoding:
            return Advance(0, tokens, 1 if num_chunks == 1 else self.prefill_rows)
        # Tokens in two sizes and rows in two: a short chunk costs little more than a decode step anyway.
        tokens = tokens if tokens == smallest else self.prefill_tokens
        few = min(SMALLEST_MIXED_ROWS, self.num_slots)
        return Advance(few if num_decoding <= few else self.num_slots, tokens, self.prefill_rows)

    def all_advances(self) -> tuple[Advance, ...]:
        """Every size that `advance` can give."""
        rows, tokens = range(1, self.num_slots + 1), range(1, self.prefill_tokens + 1)
        sizes = {self.advance(count, 0, 0) for count in rows}
        sizes |= {self.advance(0, count, chunks) for count in tokens for chunks in (1, self.prefill_rows)}
        if self.mixes:
            sizes |= {self.advance(count, size, 1) for count in (1, self.num_slots) for size in tokens}
        return tuple(sorted(sizes, key=lambda a: (a.chunk_tokens, a.chunk_rows, a.decode_rows)))

    def all_row_buckets(self) -> tuple[int, ...]:
        """Every size that `row_bucket` can give."""
        return tuple(sorted({self.row_bucket(count) for count in range(1, self.num_slots + 1)}))


def make_shape_plan(config, num_eos_ids: int) -> ShapePlan:
    """The shapes of an engine with `config`, whose requests may add stop ids to the model's own."""
    return ShapePlan(
        num_slots=config.max_sequences,
        table_width=ceil_div(config.max_context_tokens, config.block_size),
        prefill_tokens=config.prefill_tokens,
        prefill_rows=min(config.prefill_rows, config.max_sequences),
        stop_ids=next_power_of_two(max(8, num_eos_ids)),
        mixes=config.mixed_steps,
        step_tokens=config.step_tokens,
        num_snapshots=config.num_snapshots,
        draft_widths=config.draft_widths,
    )
