# SPDX-License-Identifier: Apache-2.0
"""What needs no state, on NVIDIA GPUs: a program for each head of each chunk of tokens (see `triton_ragged`)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import triton_arrays
from pallas_kernels.gated_delta import tiles
from pallas_kernels.gated_delta.op import DeltaTokens
from pallas_kernels.shapes import ceil_div
from pallas_kernels.state_rows import CHUNK

# Channels that are multiplied at a time, and those that are decayed at a time.
PART, CHANNELS = 64, 16
# Doublings of a token that make a band, and a chunk.
BAND_LEVEL, WHOLE = tiles.BAND.bit_length() - 1, CHUNK.bit_length() - 1
# Which tokens' decays are summed for each, by channel: those until it since its run of so many began, and those after
# it until its run ends, for runs as long as a band, twice that, and so on to the chunk.
SUMS = np.stack(
    [tiles.summed(CHUNK, 1 << level, after) for level in range(BAND_LEVEL, WHOLE + 1) for after in (False, True)]
)


class Step(NamedTuple):
    """References to whole arrays: `starts [N]` and `lens [N]` of chunks in the flat step, `q` and `tokens`; `sums`, as
    many squares `[C, C]` of ones and zeros as `SUMS` has."""

    starts: Any
    lens: Any
    q: Any
    tokens: DeltaTokens
    sums: Any


class Runs(NamedTuple):
    """Of each head of each chunk, `[N, V, ...]`: `solved [C, C]`, what tokens write of what they find wrong; `mixed [C,
    C]`, how outputs read what is written; `weights`."""

    solved: Any
    mixed: Any
    weights: Any


class Numbers(NamedTuple):
    """What is left of the state until each token, `since [C]`, and of what each writes until the last, `until [C]`.
    What does not count decays by nothing: the last `since` is what the state keeps."""

    since: Any
    until: Any


class Channels(NamedTuple):
    """The same multiplied out where it is by channel: `finding [C, H]` and `queries [C, H]`, which read the state for
    the tokens' corrections and for their outputs, `keys [C, H]`, where what is written stays, and `kept [H]`."""

    finding: Any
    queries: Any
    keys: Any
    kept: Any


def wide(place, mask):
    """What lies there in float32, zero where the mask is not."""
    return plgpu.load(place, mask=mask, other=0.0).astype(jnp.float32)


def solve_program(product, step: Step, *outputs):
    """Writes the triangles of one head of one chunk, and its weights if they are numbers."""
    chunk, head = pl.program_id(0), pl.program_id(1)

    @pl.when(step.lens[chunk] > 0)
    def _():
        _Chunk(product, step, chunk, head).solve(*outputs)


def weigh_program(product, step: Step, *outputs):
    """Writes what decays make of the queries and keys of one head of one chunk."""
    chunk, head = pl.program_id(0), pl.program_id(1)

    @pl.when(step.lens[chunk] > 0)
    def _():
        _Chunk(product, step, chunk, head).weigh(*outputs)


class _Chunk:
    """One head of one chunk, in parts of the keys' channels."""

    def __init__(self, product, step: Step, chunk, head):
        self.product, self.step, self.tokens = product, step, step.tokens
        self.chunk, self.head = chunk, head
        self.place = jax.lax.iota(jnp.int32, CHUNK)
        self.token, self.used = step.starts[chunk] + self.place, self.place < step.lens[chunk]
        self.key_head = head // (step.tokens.values.shape[1] // step.q.shape[1])
        self.width = step.q.shape[2]

    # -- what tokens write and read of each other

    def solve(self, solved, mixed, *weights):
        square, overlap = self._mixed_by_channel() if self.tokens.per_channel else self._mixed()
        if weights:
            decays, i, j = self._numbers(self.tokens.decays), self.place[:, None], self.place[None, :]
            for array, mask in zip(weights, (j <= i, j > i), strict=True):
                total = jnp.sum(jnp.where(mask, decays[None, :], 0.0), axis=1)
                plgpu.store(array.at[self.chunk, self.head, self.place], jnp.exp(total))
        self._store(mixed, self.place, square)
        strengths = self._numbers(self.tokens.strengths)
        lower = jnp.where(self.place[:, None] > self.place[None, :], strengths[:, None] * overlap, 0.0)
        self._store(solved, self.place, _inverse(lower) * strengths[None, :])

    def _mixed(self):
        """Products of queries and of keys with keys, decayed, `[C, C]`."""

        def add(part, carry):
            cols, inside = self._part(part, PART)
            keys = self._load(self.tokens.keys, self.key_head, cols, inside)
            queries = self._load(self.step.q, self.key_head, cols, inside)
            turned = keys.T
            return carry[0] + self.product(queries, turned), carry[1] + self.product(keys, turned)

        def decay(token, between):
            number = self.tokens.decays[self.token_at(token), self.head].astype(jnp.float32)
            passed = (self.place >= token)[:, None] & (self.place < token)[None, :]
            return between + jnp.where(passed, number, 0.0)

        square, overlap = jax.lax.fori_loop(0, ceil_div(self.width, PART), add, _squares())
        between = jax.lax.fori_loop(1, self.step.lens[self.chunk], decay, _squares()[0])
        decays = jnp.where(self.place[:, None] >= self.place[None, :], jnp.exp(between), 0.0)
        return square * decays, overlap * decays

    def token_at(self, place):
        """The flat token at a place of the chunk."""
        return self.step.starts[self.chunk] + place

    def _mixed_by_channel(self):
        """The same, decayed channel by channel."""

        def add(part, carry):
            cols, inside = self._part(part, CHANNELS)
            keys = self._load(self.tokens.keys, self.key_head, cols, inside)
            queries = self._load(self.step.q, self.key_head, cols, inside)
            decays = self._load(self.tokens.decays, self.head, cols, inside)

            def below(level, carry):
                past, after = self._passed(decays, level)
                columns = (keys * after).T
                mask = tiles.pairs(self.place[:, None], self.place[None, :], level + BAND_LEVEL)
                return tuple(
                    total + jnp.where(mask, self.product(x * past, columns), 0.0)
                    for x, total in zip((queries, keys), carry, strict=True)
                )

            carry = self._band(cols, inside, queries, keys, carry)
            return jax.lax.fori_loop(0, WHOLE - BAND_LEVEL, below, carry)

        return jax.lax.fori_loop(0, ceil_div(self.width, CHANNELS), add, _squares())

    def _passed(self, decays, level):
        """What is left until each token since its run began, and what those after it in its run leave."""
        place = self.place[:, None], self.place[None, :]
        sums = (plgpu.load(self.step.sums.at[(2 * level + after, *place)]) for after in (0, 1))
        return tuple(jnp.exp(self.product(square, decays)) for square in sums)

    def _band(self, cols, inside, queries, keys, squares):
        """Adds the pairs within each run of `BAND` tokens, by how far they are apart."""

        def pairs(apart, carry):
            between, mixed, overlap = carry
            near = self.used & (self.place % tiles.BAND >= apart)
            last = near & (apart > 0)
            between += self._load(self.tokens.decays, self.head, cols, inside, 1 - apart, last)
            others = jnp.exp(between) * self._load(self.tokens.keys, self.key_head, cols, inside, -apart, near)
            here = (self.place[:, None] - self.place[None, :] == apart) & near[:, None]
            mixed += jnp.where(here, jnp.sum(queries * others, axis=1)[:, None], 0.0)
            overlap += jnp.where(here, jnp.sum(keys * others, axis=1)[:, None], 0.0)
            return between, mixed, overlap

        return jax.lax.fori_loop(0, tiles.BAND, pairs, (jnp.zeros_like(keys), *squares))[1:]

    # -- what reads the state, and where it is written

    def weigh(self, finding, queries, keys, kept):
        for part in range(ceil_div(self.width, triton_arrays.NARROWEST)):
            cols, inside = self._part(part, triton_arrays.NARROWEST)
            decays = self._load(self.tokens.decays, self.head, cols, inside)
            since, until = self._passed(decays, WHOLE - BAND_LEVEL)
            wide = self._load(self.tokens.keys, self.key_head, cols, inside)
            self._store(finding, cols, since * wide, inside)
            self._store(keys, cols, until * wide, inside)
            self._store(queries, cols, since * self._load(self.step.q, self.key_head, cols, inside), inside)
            left = jnp.exp(jnp.sum(decays, axis=0))
            plgpu.store(kept.at[self.chunk, self.head, cols], left, mask=cols < self.width)

    # -- memory

    def _part(self, part, size):
        cols = part * size + jax.lax.iota(jnp.int32, size)
        return cols, (cols < self.width)[None, :]

    def _numbers(self, array):
        """One number of each of the chunk's tokens."""
        return wide(array.at[self.token, self.head], self.used)

    def _load(self, array, head, cols, inside, offset=0, used=None):
        """Columns of one head of the chunk's tokens, or of those `offset` after them, zero where none is used."""
        mask = (self.used if used is None else used)[:, None] & inside
        return wide(array.at[(self.token + offset)[:, None], head, cols[None, :]], mask)

    def _store(self, array, cols, tile, inside=None):
        mask = None if inside is None else jnp.broadcast_to(inside, tile.shape)
        plgpu.store(array.at[self.chunk, self.head, self.place[:, None], cols[None, :]], tile, mask=mask)


def _inverse(lower):
    """`(I + lower)^-1` of a strictly lower triangle, by substitution row by row."""
    place = jax.lax.iota(jnp.int32, CHUNK)
    i, j = place[:, None], place[None, :]

    def eliminate(token, found):
        factors = jnp.sum(jnp.where(j == token, lower, 0.0), axis=1)
        row = jnp.sum(jnp.where(i == token, found, 0.0), axis=0)
        return found - factors[:, None] * row[None, :]

    return jax.lax.fori_loop(0, CHUNK - 1, eliminate, jnp.where(i == j, 1.0, 0.0))


def _squares():
    return tuple(jnp.zeros((CHUNK, CHUNK), jnp.float32) for _ in range(2))
