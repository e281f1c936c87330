# SPDX-License-Identifier: Apache-2.0
"""`DraftingDevice`: a `FakeDevice` that drafts, rightly or wrongly by chance, and proves what drafts must not do.

A draft's keys are fingerprints of the sequence as it would be with it, so that one that was rejected is not taken for
part of the sequence by whoever reads its place later. A slot's state waits, after a step that drafts, to be told how
many drafts stand: it is a tuple of fingerprints then, of which the first is that after the last token before them.
What a drafter knows of a sequence by slot is its tokens by position.
"""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from metrale_jax.engine.buckets import Advance
from metrale_jax.engine.device import Hidden
from metrale_jax.engine.request import Request
from metrale_jax.engine.rows import Chunks, Rows
from metrale_jax.models.proposer import Drafts
from metrale_jax.steps.outcome import StepOutput
from tests.engine.fake_device import (
    FakeDevice,
    Later,
    Written,
    drawn_token,
    expect,
    fingerprints,
    log_probability,
)


class DraftingDevice(FakeDevice):
    """Drafts by the chance of `guesses`. `references(group, block)` counts who holds a block."""

    def __init__(self, *sizes: Any, guesses: random.Random):
        self.references: Callable[[int, int], int] = lambda group, block: 1
        self.num_accepted = self.num_proposed = self.num_past_ends = 0
        self._guesses = guesses
        self._ran_sizes: set[Any] = set()
        self.skills: Sequence[float] = (0.0, 0.5, 0.8, 1.0, 1.0)
        super().__init__(*sizes)

    # What the engine calls.

    def reset(self) -> None:
        super().reset()
        self._known: list[dict[int, int]] = [{} for _ in self._states]

    @property
    def num_compiles(self) -> int:
        """Sizes of steps that were met so far: the first step of each has to be compiled."""
        return len(self._ran_sizes)

    def has_run(self, sizes: Advance) -> bool:
        return sizes in self._ran_sizes

    def advance(self, decoding: Rows | None, chunks: Chunks | None) -> Hidden:
        """Owes what steps without drafts do."""
        filling = (0, 0) if chunks is None else (len(chunks.tokens), len(chunks.lengths))
        hidden = super().advance(decoding, chunks)
        self._ran_sizes.add(Advance(0 if decoding is None else len(decoding.slots), *filling))
        return hidden

    def begin(self, slot: int, tokens: Sequence[int], fresh: bool = True) -> None:
        super().begin(slot, tokens, fresh)
        self._call("begin")
        known = dict(enumerate(tokens))

        def run():
            self._known[slot] = known

        self._queue.append(run)

    def advance_drafts(self, decoding: Any, sampling: Any, limits: np.ndarray, num_drafts: int) -> tuple[Any, Drafts]:
        """Owes the fingerprint of each row's last token and of each of its drafts; and the drafts."""
        self._call("advance_drafts")
        expect(isinstance(sampling.extras, tuple), "drafts are drawn by rules that only the target keeps")
        expect(0 < limits.max() <= num_drafts and limits.min() >= 0, f"limits {limits} of a step of {num_drafts}")
        holders = {one.slot: one for one in self.holders()}
        for row, slot in enumerate(decoding.slots.tolist()):
            if slot:
                expect(slot in holders, f"nobody has slot {slot} that is to be drafted")
                self._check_room(holders[slot], int(limits[row]), [table[row] for table in decoding.tables])
            else:
                expect(not limits[row], "padding is drafted")
        hidden, drafts, owners = Later(), Drafts(Later(), Later()), self._owners()
        self._ran_sizes.add((len(limits), num_drafts))
        self._queue.append(lambda: self._advance_drafts(decoding, sampling, limits, num_drafts, owners, hidden, drafts))
        return hidden, drafts

    def judge(self, hidden: Later, drafts: Drafts, rows: Any, num_logprobs: int) -> Any:
        """Owes a `StepOutput`."""
        self._call("judge")
        out, owners, broken = Later(), self._owners(), self.broken_rows
        self.broken_rows = 0
        self._queue.append(lambda: self._judge(hidden, drafts, rows, num_logprobs, owners, broken, out))
        return out

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies states, and what the drafter knows."""
        super().copy_slots(copies)
        if copies and not self.recurrent:
            self._call("copy_slots")
        copies = list(copies)

        def run():
            content = [self._known[source] for source, _ in copies]
            for (_, target), known in zip(copies, content, strict=True):
                self._known[target] = dict(known)

        self._queue.append(run)

    def limit_slots(self, slots: Sequence[int]) -> None:
        """Limits states, of which none may wait for its drafts."""
        slots = list(slots)

        def run():
            for slot in slots:
                key, stop, limited = self._states[slot]
                if isinstance(key, tuple):
                    expect(len(key) == 1, f"a state is limited that waits for drafts after {stop} tokens")
                    self._states[slot] = key[0], stop, limited

        self._queue.append(run)
        super().limit_slots(slots)

    def read_slot(self, slot: int) -> Any:
        """Owes a state and what the drafter knows."""
        self._call("read")
        kept = Later()

        def run():
            kept.value = np.empty(4, object)
            for place, value in enumerate((*self._states[slot], dict(self._known[slot]))):
                kept.value[place] = value

        self._queue.append(run)
        return kept

    def write_state(self, blocks: Sequence[Sequence[int]], slot: int, content: Any) -> None:
        super().write_state(blocks, slot, content)

        def run():
            if len(content[1]):
                *state, known = content[1]
                self._states[slot], self._known[slot] = tuple(state), dict(known)

        self._queue.append(run)

    # What must hold when a step that drafts is dispatched.

    def _check_room(self, request: Request, limit: int, tables: list[np.ndarray]) -> None:
        expect(request.search is None, "a beam is drafted")
        expect(not request.in_flight, "drafts follow a token that the host does not know")
        expect(request.seq_len == request.num_tokens - 1, "more is to be run than the last token")
        past_end = len(request.output) + limit + 1 - request.max_tokens
        expect(past_end <= 0, f"{limit} drafts pass the limit of {request.max_tokens} tokens")
        start, stop = request.seq_len, request.seq_len + 1 + limit
        for group, table in enumerate(tables):
            for block in table[start // self.block_size : (stop - 1) // self.block_size + 1].tolist():
                expect(block, f"no room for drafts from {start} to {stop}: {table}")
                held = self.references(group, block)
                expect(held == 1, f"drafts are written to block {block}, which {held} hold")

    # What runs later.

    def _advance_drafts(self, decoding, sampling, limits, width: int, owners, hidden: Later, drafts: Drafts) -> None:
        self.num_steps += 1
        size = len(limits)
        tokens = np.asarray([[self._guess() for _ in range(width)] for _ in range(size)], np.int32)
        lens, ends, reads = np.zeros(size, np.int32), [], []
        for row, slot in enumerate(decoding.slots.tolist()):
            guesses: list[int] = []
            keys = [0]
            if slot:
                expect(slot in owners, f"nobody has slot {slot} that a step drafts")
                start, sequence = int(decoding.seq_lens[row]), owners[slot].sequence
                regime = self._regime_of(sequence, int(decoding.known_lens[row]), start, int(limits[row]))
                guesses = self._guessed(sequence, slot, start, int(limits[row]), int(sampling.seed[row]), regime)
                path = [*sequence.tokens[:start], self._last_tokens[slot], *guesses]
                tables = [table[row] for table in decoding.tables]
                keys = self._written_drafts(sequence, slot, start, path, (regime, tables, int(limits[row])), reads)
            tokens[row, : len(guesses)], lens[row] = guesses, len(guesses)
            ends.append(keys)
        for read in reads:
            self._read(*read)
        hidden.value, drafts.tokens.value, drafts.lens.value = ends, tokens, lens

    def _regime_of(self, sequence: Written, known_len: int, start: int, limit: int):
        regime = self.rules.regime(known_len)
        for length in (start + 1, start + 1 + limit):
            wanted = self.rules.regime_at(sequence.prompt_len, length)
            expect(regime == wanted, f"drafts up to {length} tokens are run in regime {regime}, not {wanted}")
        return regime

    def _guess(self) -> int:
        return self._guesses.randrange(self.rules.vocab_size)

    def _guessed(self, sequence: Written, slot: int, start: int, limit: int, seed: int, regime) -> list[int]:
        """Up to `limit` drafts after position `start`: as many of them right as chance has it, past the end too."""
        known = [self._known[slot].get(place) for place in range(start)]
        expect(known == sequence.tokens[:start], f"the drafter knows {known}, and drafts after {sequence.tokens}")
        skill = self._guesses.choice(self.skills)
        count = self._guesses.choice((0, limit, limit, limit, self._guesses.randint(0, limit)))
        path = sequence.tokens[: start + 1]
        for position in range(start + 1, start + 1 + count):
            if self._guesses.random() >= skill:
                path.append(self._guess())
            elif position < len(sequence.tokens) - 1:
                path.append(sequence.tokens[position])
            else:
                end = fingerprints(path, (sequence.namespace, regime))[-1]
                path.append(drawn_token(end, seed, position, range(self.rules.vocab_size)))
        return path[start + 1 :]

    def _written_drafts(self, sequence: Written, slot: int, start: int, path: list[int], row, reads: list) -> list[int]:
        """Writes the keys of a row's last token and its drafts, and gives them; what is to be read goes to `reads`."""
        regime, tables, limit = row
        expect(path[start] == sequence.tokens[start], f"{path[start]} is run at {start} of {sequence.tokens}")
        keys = np.asarray(fingerprints(path, (sequence.namespace, regime)), np.uint64)
        stop = start + 1 + limit
        if self.recurrent:
            every = self._norm_tokens
            self._settle(slot, start)
            found, before = self._states[slot], (int(keys[start - 1]), start, bool(every and not start % every))
            expect(found == before, f"the state of slot {slot} is {found}, not {before}, when it is drafted")
            within = not every or (start // every == (stop - 1) // every and (not limit or stop % every))
            expect(within, f"drafts from {start} to {stop} pass a limit")
            self._states[slot] = tuple(keys[start:].tolist()), start + 1, False
        positions = np.arange(start, len(path))
        for pool, table in zip(self._pools, tables, strict=True):
            pool[table[positions // self.block_size], positions % self.block_size] = keys[start:]
        self._known[slot].update(zip(positions.tolist(), path[start:], strict=True))
        reads.append((keys, tables, start, len(path)))
        return keys[start:].tolist()

    def _settle(self, slot: int, length: int) -> None:
        """A state that waits for its drafts is told that the sequence has `length` tokens."""
        key, first, limited = self._states[slot]
        if isinstance(key, tuple):
            expect(0 <= length - first < len(key), f"a state of {first} tokens and drafts is taken for one of {length}")
            self._states[slot] = key[length - first], length, limited

    def _ran(self, rows, row: int, tokens: list[int], owners, reads: list) -> list[int]:
        slot, start = int(rows.slots[row]), int(rows.seq_lens[row])
        if slot and start and self.recurrent:
            self._settle(slot, start)
        keys = super()._ran(rows, row, tokens, owners, reads)
        if slot:
            self._known[slot].update(enumerate(tokens, start))
        return keys

    def _judge(self, hidden, drafts, rows, num_logprobs: int, owners, broken: int, out: Later) -> None:
        size, width = drafts.tokens.value.shape
        shape, before = (size, width + 1), self._last_tokens
        tokens, num_tokens, drawable = np.zeros(shape, np.int32), np.ones(size, np.int32), np.ones(shape, bool)
        self._last_tokens = before.copy()
        for row, slot in enumerate(rows.slots.tolist()):
            if not slot:
                continue
            expect(slot in owners, f"nobody has slot {slot} whose drafts are judged")
            expect(not rows.pending[row], "drafts are judged after a token that the host does not know")
            guesses = drafts.tokens.value[row, : drafts.lens.value[row]].tolist()
            sequence, stood = owners[slot].sequence, []
            for column, end in enumerate(hidden.value[row]):
                token, allowed = self._stands(row, end, stood, rows, sequence, owners)
                tokens[row, column], drawable[row, column] = token, allowed
                stood.append(token)
                if guesses[column : column + 1] != [token]:
                    break
            start, num_tokens[row], self._last_tokens[slot] = int(rows.positions[row]) - 1, len(stood), stood[-1]
            self.num_accepted += len(stood) - 1
            self.num_proposed += len(guesses)
            self.num_past_ends += start + len(stood) >= len(sequence.tokens)
            sequence.spans.append((start, start + len(stood)))
        finite = np.asarray([not broken >> row & 1 for row in range(size)])
        more = self._logprobs_of(hidden.value, tokens, num_logprobs) if num_logprobs else {}
        lens = drafts.lens.value
        out.value = StepOutput(tokens, num_tokens, finite, drawable, num_drafts=lens, **more)

    def _stands(self, row: int, end: int, stood: list[int], rows, sequence: Written, owners) -> tuple[int, bool]:
        """The token drawn after those that stand in a row, and whether any was allowed."""
        position = int(rows.positions[row]) + len(stood)
        column = self._column(rows, row, stood)
        if position < len(sequence.tokens):
            return self._drawn(row, end, column, owners)
        allowed = list(range(self.rules.vocab_size))  # of what comes after an answer nothing is promised
        return drawn_token(end, int(rows.sampling.seed[row]), position, allowed), True

    @staticmethod
    def _column(rows, row: int, stood: list[int]) -> Any:
        """`rows` as they draw the token after those that stand in `row`."""
        sampling, extras, start = rows.sampling, rows.sampling.extras, int(rows.positions[row])
        if not isinstance(extras, tuple):
            history = np.array(extras.history)
            if extras.repetition_penalty[row] != 1:
                history[row, start : start + len(stood)] = stood
            sampling = sampling.replace(extras=extras.replace(mask=extras.mask[:, len(stood)], history=history))
        return SimpleNamespace(
            slots=rows.slots, positions=rows.positions + len(stood), pending=rows.pending, sampling=sampling
        )

    def _logprobs_of(self, ends: list[list[int]], tokens: np.ndarray, count: int) -> dict[str, np.ndarray]:
        size, width = tokens.shape
        wide = [[*row, *[0] * (width - len(row))] for row in ends]
        chosen = [
            [log_probability(*one) for one in zip(*pair, strict=True)]
            for pair in zip(wide, tokens.tolist(), strict=True)
        ]
        likeliest = self._likeliest([end for row in wide for end in row], count)
        shaped = {name: value.reshape(size, width, count) for name, value in likeliest.items()}
        return {"logprobs": np.asarray(chosen, np.float32), **shaped}
