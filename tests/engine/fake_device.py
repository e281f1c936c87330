# SPDX-License-Identifier: Apache-2.0
"""`FakeDevice`: an engine's device without a model, whose memory proves who wrote it.

A block's place holds, for the position that it stands for, the fingerprint of all that its keys depend on: every token
up to there, the namespace and the regime of rotary frequencies. A step checks each position that attention would read.
Nothing runs before its results are fetched, so that an array which the host changes after a dispatch shows too.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np

from metrale_jax.engine.device import COPIES, Hidden
from metrale_jax.engine.lease import BlockCopy
from metrale_jax.engine.request import Request
from metrale_jax.engine.rows import Chunks, Rows
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates

POISON = np.uint64(0xDEADBEEF)
_WORD = (1 << 64) - 1


class Violation(Exception):
    """The engine did what it must not. Of no kind that it takes for a failure of the device."""


def expect(condition: Any, message: str) -> None:
    """Nothing. Raises `Violation` where the condition is false."""
    if not condition:
        raise Violation(message)


def fingerprints(tokens: Sequence[int], salt: Hashable) -> list[int]:
    """For each token what is left of it and all before it, under `salt`; 64 bits, never POISON in practice."""
    value, out = crc32(repr(salt).encode()) | 1, []
    for token in tokens:
        value = ((value ^ (token + 1)) * 0x9E3779B97F4A7C15) & _WORD
        value ^= value >> 29
        out.append(value)
    return out


def drawn_token(hidden: int, seed: int, position: int, allowed: Sequence[int]) -> int:
    """One of `allowed`, as likely as any other."""
    return allowed[fingerprints([position, seed], hidden)[-1] % len(allowed)]


def log_probability(hidden: int, token: int) -> float:
    """A number that float32 holds exactly, other for each token and past."""
    return -float((hidden ^ token * 77) % 1024) / 64


def likeliest(hidden: int, allowed: Sequence[int], vocab_size: int) -> list[tuple[int, float]]:
    """Every token and its log-probability, best first; those that are not allowed have none."""
    pairs = [(token, log_probability(hidden, token) if token in allowed else -np.inf) for token in range(vocab_size)]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))


@dataclass(frozen=True)
class Rules:
    """What keys depend on beside tokens: `regime(length)`, and the length at which a sequence is run again."""

    regime: Callable[[int], Hashable]
    recompute_len: int
    vocab_size: int

    def regime_at(self, prompt_len: int, length: int) -> Hashable:
        """The regime in which a sequence of `length` tokens stands that began as a prompt of `prompt_len`."""
        outgrown = prompt_len <= self.recompute_len < length
        return self.regime(self.recompute_len + 1 if outgrown else prompt_len)


@dataclass
class Written:
    """What a request's tokens have to be: prompt, whole answer, and the 0 that a row runs whose rules left nothing.

    `spans` are the chunks and tokens run, in order.
    """

    tokens: list[int]
    prompt_len: int
    namespace: Hashable
    rules: Rules
    spans: list[tuple[int, int]] = field(default_factory=list)
    known: dict[Hashable, np.ndarray] = field(default_factory=dict)

    def keys(self, regime: Hashable) -> np.ndarray:
        """The fingerprints of all tokens."""
        if regime not in self.known:
            self.known[regime] = np.asarray(fingerprints(self.tokens, (self.namespace, regime)), np.uint64)
        return self.known[regime]


@dataclass
class Later:
    """A result that the device owes."""

    value: Any = None


@dataclass
class Failure:
    """The `nth` call of `name` from now raises; `takes_pool`: and the pool is gone, or where a result is awaited, the
    user interrupts."""

    name: str
    nth: int
    takes_pool: bool


@dataclass(frozen=True)
class _Owner:
    sequence: Written
    num_tokens: int


def _fetched(out: Any) -> Any:
    return tuple(map(_fetched, out)) if isinstance(out, tuple) else out.value if isinstance(out, Later) else out


class FakeDevice:
    """Runs at `fetch` what was dispatched before. `holders` gives the engine's requests that have a slot.

    `sequences` says by request id what each of them must come to.
    """

    num_compiles = 0

    def __init__(
        self,
        rules: Rules,
        windows: Sequence[int],
        block_size: int,
        num_blocks: int,
        num_slots: int,
        num_snapshots: int = 0,
        recurrent: bool = False,
        norm_tokens: int = 0,
    ):
        self.rules, self.windows, self.block_size, self.recurrent = rules, windows, block_size, recurrent
        self.sequences: dict[int, Written] = {}
        self.holders: Callable[[], Iterable[Request]] = tuple
        self.failures: list[Failure] = []
        self.broken_rows = 0
        self.num_failed = self.num_steps = self.num_copies = self.num_returns = 0
        self.num_kept_rows_used = self.num_limited = 0
        self._sizes, self._norm_tokens = (num_blocks, num_slots, num_snapshots), norm_tokens
        self.reset()

    # What the engine calls.

    def reset(self) -> None:
        """An empty pool; what was dispatched is forgotten."""
        num_blocks, num_slots, num_snapshots = self._sizes
        self._pools = [np.full((num_blocks, self.block_size), POISON) for _ in self.windows]
        self._last_tokens = [0] * (num_slots + 1)
        self._states = [(int(POISON), -1, False)] * (1 + num_slots + num_snapshots)
        self._rows = [int(POISON)] * len(self._states)
        self._queue: deque[Callable[[], None]] = deque()
        self.pool_lost = False

    def resident(self, arrays: Any) -> Any:
        """The same arrays: a CPU's device may share the host's memory."""
        return arrays

    @staticmethod
    def has_run(sizes: Any) -> bool:
        """Nothing is compiled here, so nothing has to be."""
        return True

    def advance(self, decoding: Rows | None, chunks: Chunks | None) -> Hidden:
        """Owes the fingerprint of each row's last token and of each token of the chunks."""
        self._call("advance")
        hidden, owners = Hidden(Later(), Later()), self._owners()
        self._queue.append(lambda: self._advance(decoding, chunks, owners, hidden))
        return hidden

    def draw(self, hidden: Hidden, picks: np.ndarray | None, rows: Any, num_logprobs: int) -> Any:
        """Owes a `StepOutput`."""
        self._call("draw")
        out, owners, broken = Later(), self._owners(), self.broken_rows
        self.broken_rows = 0
        self._queue.append(lambda: self._draw(hidden, picks, rows, num_logprobs, owners, broken, out))
        return out

    def candidates(self, hidden: Hidden, picks: np.ndarray | None, rows: Any, num_top: int) -> Any:
        """Owes `Candidates`."""
        self._call("candidates")
        out, owners = Later(), self._owners()

        def run():
            found = []
            for row, end in enumerate(self._picked(hidden, picks)):
                allowed = self._allowed(row, end, rows, owners) if int(rows.slots[row]) in owners else range(num_top)
                found.append(likeliest(end, allowed, self.rules.vocab_size)[:num_top])
            ids, logprobs = zip(*(zip(*row, strict=True) for row in found), strict=True)
            finite = np.ones(len(found), bool)
            out.value = Candidates(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), finite)

        self._queue.append(run)
        return out

    def score(self, hidden: Hidden, targets: np.ndarray, num_logprobs: int) -> Any:
        """Owes the log-probabilities of `targets`."""
        self._call("score")
        out = Later()

        def run():
            rows = [*hidden.chunks.value]
            out.value = SimpleNamespace(
                logprobs=np.asarray(
                    [log_probability(h, t) for h, t in zip(rows, targets.tolist(), strict=True)], np.float32
                ),
                **self._likeliest(rows, num_logprobs),
            )

        self._queue.append(run)
        return out

    def begin(self, slot: int, tokens: Sequence[int], fresh: bool = True) -> None:
        """A sequence begins in a slot; nothing is carried there."""
        expect(slot > 0 and len(tokens) > 0, "a sequence begins nowhere")

    def put_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Sets the tokens that `slots` run next."""

        def run():
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                self._last_tokens[slot] = token if slot else 0

        self._queue.append(run)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks, as many at once as the device does."""
        self._call("copy")
        copies = list(copies)

        def run():
            self.num_copies += len(copies)
            for start in range(0, len(copies), COPIES):
                batch = copies[start : start + COPIES]
                content = [self._pools[copy.group][copy.source].copy() for copy in batch]
                expect(len({(c.group, c.target) for c in batch}) == len(batch), "a block is copied over twice at once")
                for copy, block in zip(batch, content, strict=True):
                    expect(copy.source and copy.target, "the block of padding is copied")
                    self._pools[copy.group][copy.target] = block

        self._queue.append(run)

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies states, all at once."""
        if not self.recurrent or not copies:
            return
        self._call("copy_slots")
        copies = list(copies)

        def run():
            expect(all(source and target for source, target in copies), "the slot of padding is copied")
            targets = [target for _, target in copies]
            expect(len(set(targets)) == len(targets), "a slot is copied over twice at once")
            content = [self._states[source] for source, _ in copies]
            for target, state in zip(targets, content, strict=True):
                self._states[target] = state

        self._queue.append(run)

    def limit_slots(self, slots: Sequence[int]) -> None:
        """Limits the states in slots."""
        self._call("limit_slots")
        slots = list(slots)

        def run():
            self.num_limited += len(slots)
            expect(all(slots) and len(set(slots)) == len(slots), "a slot is limited twice, or that of padding")
            for slot in slots:
                key, stop, _ = self._states[slot]
                expect(not stop % self._norm_tokens, f"a state is limited after {stop} tokens")
                self._states[slot] = key, stop, True

        self._queue.append(run)

    def keep_rows(self, hidden: Hidden, units: np.ndarray) -> None:
        """Keeps the last hidden rows."""
        self._call("keep_rows")
        units = units.tolist()

        def run():
            kept = [unit for unit in units if unit]
            expect(kept and len(set(kept)) == len(kept), "a row is kept twice in one place, or none is")
            expect(len(hidden.ends.value) >= len(units), "more rows are kept than there are")
            for unit, row in zip(units, hidden.ends.value[-len(units) :], strict=True):
                self._rows[unit] = row

        self._queue.append(run)

    @property
    def kept_rows(self) -> Hidden:
        """The rows that are kept by now."""
        hidden = Hidden(Later(), ())

        def run():
            self.num_kept_rows_used += 1
            hidden.ends.value = list(self._rows)

        self._queue.append(run)
        return hidden

    def read_blocks(self, blocks: Sequence[Sequence[int]]) -> Any:
        """Owes what is in the blocks."""
        self._call("read")
        parts, blocks = Later(), [list(ids) for ids in blocks]

        def run():
            parts.value = [pool[ids].copy() for pool, ids in zip(self._pools, blocks, strict=True)]

        self._queue.append(run)
        return parts

    def read_slot(self, slot: int) -> Any:
        """Owes what is in the slot."""
        self._call("read")
        kept = Later()

        def run():
            kept.value = np.asarray(self._states[slot], object)

        self._queue.append(run)
        return kept

    @staticmethod
    def split_blocks(parts: Any, counts: Sequence[int]) -> list:
        """The places of each block of each group."""
        return [[part[index]] for part, count in zip(parts, counts, strict=True) for index in range(count)]

    @staticmethod
    def split_slot(content: Any) -> list:
        """The state."""
        return [[content]]

    @staticmethod
    def join(blocks: Sequence, slot: Sequence) -> tuple[Any, Any]:
        """What `write_state` takes."""
        return [np.asarray([places for [places] in group]) for group in blocks], slot[0] if slot else ()

    def write_state(self, blocks: Sequence[Sequence[int]], slot: int, content: Any) -> None:
        """Puts it elsewhere."""
        self._call("write_state")
        blocks = [list(ids) for ids in blocks]

        def run():
            self.num_returns += 1
            if any(blocks):
                for pool, ids, part in zip(self._pools, blocks, content[0], strict=True):
                    expect(all(ids) and len(set(ids)) == len(ids), "a block is put back to where there is none")
                    expect(len(part) == len(ids), "not as many blocks are put back as there are")
                    if ids:
                        pool[ids] = part
            if len(content[1]):
                self._states[slot] = tuple(content[1])

        self._queue.append(run)

    @staticmethod
    def num_bytes(content: Any) -> int:
        """A byte a place."""
        return sum(part.size for part in content[0])

    def wait(self, hidden: Any) -> None:
        """Runs all that was dispatched."""
        self._call("fetch")
        self._run()

    def fetch(self, out: Any) -> Any:
        """Results, after all that was dispatched has run."""
        self._call("fetch")
        self._run()
        return _fetched(out)

    # What runs later.

    def _call(self, name: str) -> None:
        expect(not self.pool_lost, f"{name} on a pool that is lost")
        for failure in list(self.failures):
            failure.nth -= failure.name == name
            if failure.nth < 0:
                self.failures.remove(failure)
                self.num_failed += 1
                if failure.name == "fetch" and failure.takes_pool:
                    raise KeyboardInterrupt
                self.pool_lost = failure.takes_pool and name != "read"  # which leaves the pool alone
                raise RuntimeError(f"INJECTED: {name} failed")

    def _run(self) -> None:
        while self._queue:
            try:
                self._queue.popleft()()
            except Violation:
                raise
            except Exception as error:  # the engine must not take it for a failure of the device
                raise Violation(f"{type(error).__name__} {error}") from error

    def _owners(self) -> dict[int, _Owner]:
        return {one.slot: _Owner(self._written(one), one.num_tokens) for one in self.holders()}

    def _written(self, request: Request) -> Written:
        if request.search is None:
            return self.sequences[request.request_id]
        # A beam waits for each of its tokens, so that the host knows them all.
        leader = self.sequences[request.search.leader.request_id]
        return Written([*request.prompt, *request.output], leader.prompt_len, leader.namespace, self.rules)

    def _advance(self, decoding, chunks, owners: dict[int, _Owner], hidden: Hidden) -> None:
        """All keys are written before any is read, as in a layer."""
        self.num_steps += 1
        reads, ends, rows = [], [], []
        if decoding is not None:
            for row, slot in enumerate(decoding.slots.tolist()):
                token = self._last_tokens[slot]
                ends.append(self._ran(decoding, row, [token], owners, reads)[-1])
        if chunks is not None:
            start = 0
            for row, length in enumerate(chunks.lengths.tolist()):
                stop = start + length
                keys = self._ran(chunks.rows, row, chunks.tokens[start:stop].tolist(), owners, reads)
                ends.append(keys[-1])
                rows += keys[:length]
                start = stop
            rows += [0] * (len(chunks.tokens) - len(rows))
        for read in reads:
            self._read(*read)
        hidden.ends.value, hidden.chunks.value = ends, rows

    def _ran(self, rows: Rows, row: int, tokens: list[int], owners, reads: list) -> list[int]:
        """Writes the keys of a row's next tokens, and gives them; what is to be read goes to `reads`."""
        slot, start = int(rows.slots[row]), int(rows.seq_lens[row])
        tables = [table[row] for table in rows.tables]
        if not slot:
            expect(not start and not any(table.any() for table in tables), "a row of padding stands somewhere")
            return [0]
        expect(slot in owners, f"nobody has slot {slot} that a step runs")
        expect(tokens, "a request's chunk is empty")
        sequence, stop = owners[slot].sequence, start + len(tokens)
        expect(sequence.tokens[start:stop] == tokens, f"{tokens} are run at {start} of {sequence.tokens}")
        regime = self.rules.regime(int(rows.known_lens[row]))
        length = max(stop, owners[slot].num_tokens)
        wanted = self.rules.regime_at(sequence.prompt_len, length)
        expect(regime == wanted, f"a sequence of {length} tokens is run in regime {regime}, not {wanted}")
        keys = sequence.keys(regime)[start:stop]
        if self.recurrent:
            every = self._norm_tokens
            found, limited = self._states[slot], bool(every and not start % every)
            before = int(sequence.keys(regime)[start - 1]), start, limited
            expect(not start or found == before, f"the state of slot {slot} is {found}, not {before}")
            expect(not every or start // every == (stop - 1) // every, f"a chunk of {start} to {stop} passes a limit")
            self._states[slot] = (int(keys[-1]), stop, False)
        sequence.spans.append((start, stop))
        positions = np.arange(start, stop)
        for pool, table in zip(self._pools, tables, strict=True):
            blocks = table[positions // self.block_size]
            expect(blocks.all(), f"tokens {start} to {stop} are written to a hole: {table}")
            pool[blocks, positions % self.block_size] = keys
        reads.append((sequence.keys(regime), tables, start, stop))
        return keys.tolist()

    def _read(self, keys: np.ndarray, tables: list, start: int, stop: int) -> None:
        for group, window in enumerate(self.windows):
            first = max(0, start + 1 - window) if window else 0
            positions = np.arange(first, stop)
            blocks = tables[group][positions // self.block_size]
            found = self._pools[group][blocks, positions % self.block_size]
            if not np.array_equal(found, keys[first:stop]) or not blocks.all():
                wrong = positions[(found != keys[first:stop]) | (blocks == 0)]
                raise Violation(
                    f"tokens {start} to {stop} of group {group} read what is not theirs at {wrong.tolist()}"
                )

    def _draw(self, hidden, picks, rows, num_logprobs: int, owners, broken: int, out: Later) -> None:
        ends = self._picked(hidden, picks)
        expect(len(ends) == len(rows.slots), "rows to draw and hidden rows differ")
        drawn, before = [self._drawn(row, end, rows, owners) for row, end in enumerate(ends)], self._last_tokens
        self._last_tokens = before.copy()
        for slot, (token, _) in zip(rows.slots.tolist(), drawn, strict=True):
            self._last_tokens[slot] = token if slot else 0
        tokens = np.asarray([token for token, _ in drawn], np.int32)
        finite = np.asarray([not broken >> row & 1 for row in range(len(ends))])
        more = {}
        if num_logprobs:
            chosen = [log_probability(end, int(token)) for end, token in zip(ends, tokens, strict=True)]
            more = {name: value[:, None] for name, value in self._likeliest(ends, num_logprobs).items()}
            more["logprobs"] = np.asarray(chosen, np.float32)[:, None]
        out.value = StepOutput(
            tokens=tokens[:, None],
            num_tokens=np.ones(len(ends), np.int32),
            finite=finite,
            drawable=np.asarray([[allowed] for _, allowed in drawn]),
            **more,
        )

    def _drawn(self, row: int, hidden: int, rows, owners: dict[int, _Owner]) -> tuple[int, bool]:
        slot, position = int(rows.slots[row]), int(rows.positions[row])
        if slot not in owners:
            return 0, True  # padding, or a row whose answer ended after its step was under way
        allowed, sequence = self._allowed(row, hidden, rows, owners), owners[slot].sequence
        if not allowed:
            return 0, False
        token = drawn_token(hidden, int(rows.sampling.seed[row]), position, allowed)
        ended = position >= len(sequence.tokens) - 1
        expect(ended or token == sequence.tokens[position], f"{token} is drawn at {position} of {sequence.tokens}")
        return token, True

    @staticmethod
    def _picked(hidden: Hidden, picks: np.ndarray | None) -> list[int]:
        ends = hidden.ends.value
        return ends if picks is None else [ends[pick] for pick in picks.tolist()]

    def _allowed(self, row: int, hidden: int, rows, owners: dict[int, _Owner]) -> list[int]:
        """What may follow in a row, whose `hidden` is seen to be its own."""
        slot, position = int(rows.slots[row]), int(rows.positions[row])
        sampling, sequence = rows.sampling, owners[slot].sequence
        end = sequence.keys(self.rules.regime_at(sequence.prompt_len, position))[position - 1]
        expect(int(end) == hidden, f"a token of {sequence.tokens} is drawn at {position}, from another's row")
        allowed = list(range(self.rules.vocab_size))
        if position < sampling.min_len[row]:
            allowed = [token for token in allowed if token not in sampling.stop_ids[row]]
        if not isinstance(sampling.extras, tuple):
            words, history = sampling.extras.mask[row], sampling.extras.history[row].copy()
            allowed = [token for token in allowed if words[token >> 5] >> (token & 31) & 1]
            if rows.pending[row]:
                history[position - 1] = self._last_tokens[slot]
            penalised = sampling.extras.repetition_penalty[row] != 1
            expect(
                not penalised or history[:position].tolist() == sequence.tokens[:position], "the history is another's"
            )
        return allowed

    def _likeliest(self, rows: Sequence[int], count: int) -> dict[str, np.ndarray]:
        ids = [[(hidden + place) % self.rules.vocab_size for place in range(count)] for hidden in rows]
        values = [[-place - hidden % 7 for place in range(count)] for hidden in rows]
        return {"top_ids": np.asarray(ids, np.int32), "top_logprobs": np.asarray(values, np.float32)}
