# SPDX-License-Identifier: Apache-2.0
"""`ShapePlan`: the only source of shapes, so that the set of executables is finite and known."""

from dataclasses import dataclass

from pallas_kernels.shapes import ceil_div, next_power_of_two

# Shorter prompts are padded to this: one executable serves them all, for some 50 ms of a CPU at worst.
SMALLEST_PREFILL = 64


@dataclass(frozen=True)
class ShapePlan:
    """Bucketed sizes of steps. `table_width` is M, block ids a row."""

    max_sequences: int
    table_width: int
    prefill_tokens: int
    prefill_rows: int
    stop_ids: int

    def decode_rows(self, count: int) -> int:
        """Rows of a decode step over `count` sequences: the next power of two, or the maximum."""
        assert 0 < count <= self.max_sequences, f"{count} sequences do not fit {self.max_sequences} rows"
        return min(next_power_of_two(count), self.max_sequences)

    def prefill_shape(self, num_tokens: int, count: int) -> tuple[int, int]:
        """Tokens and rows of a prefill step over `num_tokens` new tokens of `count` prompts."""
        assert num_tokens <= self.prefill_tokens, f"{num_tokens} tokens do not fit a step of {self.prefill_tokens}"
        tokens = min(max(next_power_of_two(num_tokens), SMALLEST_PREFILL), self.prefill_tokens)
        return tokens, 1 if count == 1 else self.prefill_rows

    def all_decode_rows(self) -> tuple[int, ...]:
        """Every size that `decode_rows` can give."""
        return tuple(sorted({self.decode_rows(n) for n in range(1, self.max_sequences + 1)}))

    def all_prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """Every shape that `prefill_shape` can give."""
        rows = {1, self.prefill_rows}
        tokens = {self.prefill_shape(n, 1)[0] for n in range(1, self.prefill_tokens + 1)}
        return tuple(sorted((t, r) for t in tokens for r in rows))


def make_shape_plan(config, num_eos_ids: int) -> ShapePlan:
    """The shapes of an engine with `config`, whose requests may add stop ids to the model's own."""
    return ShapePlan(
        max_sequences=config.max_sequences,
        table_width=ceil_div(config.max_context_tokens, config.block_size),
        prefill_tokens=config.prefill_tokens,
        prefill_rows=min(config.prefill_rows, config.max_sequences),
        stop_ids=next_power_of_two(max(8, num_eos_ids)),
    )
