# SPDX-License-Identifier: Apache-2.0
"""The host loop over a device of the imagination: no arithmetic, but every row must find its own past in the pool.

A stored key is the whole sequence of tokens up to its own, each with the rotary regime that it was run under. A step
reads what attention would read and raises where that is not the row's past, so that thousands of loads with all that
can befall a request run in seconds.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.engine.admission import Ask, Limits
from metrale_jax.engine.beam import BeamSearch
from metrale_jax.engine.buckets import make_shape_plan
from metrale_jax.engine.device import Hidden
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.memory import Memory
from metrale_jax.sampling.params import SamplingParams, seed_bits
from metrale_jax.steps.outcome import StepOutput
from metrale_jax.steps.serving import Candidates
from tests.engine.conftest import CONFIG

VOCAB, BLOCK = 64, CONFIG.block_size


class Wrong(BaseException):
    """A row does not find its own past. Nothing in the engine catches it."""


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies that follow the length: at `switch` for all tokens, or above it from token to token."""

    switch: int = 0
    follows: bool = False

    @property
    def recompute_len(self):
        return 0 if self.follows else self.switch

    def regime(self, length):
        if not self.switch:
            return ()
        return ((length if length > self.switch else 0) if self.follows else int(length > self.switch),)


def drawn(past, seed, allowed=None):
    """The token that follows `past`."""
    token = hash((past, seed)) % VOCAB
    while allowed is not None and not allowed[token // 32] >> (token % 32) & 1:
        token = (token + 1) % VOCAB
    return token


def likeliest(past, count):
    """The `count` likeliest tokens after `past`, and their log-probabilities."""
    found = sorted((-(hash((past, token)) % 997) / 100, token) for token in range(VOCAB))[::-1][:count]
    return [token for _, token in found], [logprob for logprob, _ in found]


class PaperDevice:
    """What `Device` is to the engine. `faults` picks a mishap of those it is given, or none."""

    num_compiles = 0

    def __init__(self, windows, num_blocks, num_slots, rope, faults):
        self._windows, self._size, self._rope, self._faults = windows, (num_blocks, BLOCK), rope, faults
        self._num_slots = num_slots
        self.reset()

    def reset(self):
        self.pool = [np.full(self._size, None, object) for _ in self._windows]
        self.last_tokens = np.zeros(self._num_slots + 1, np.int64)
        self.pool_lost = False

    def resident(self, arrays):
        return arrays

    def advance(self, decoding, chunks):
        fault = self._faults("refused", "lost")
        if fault:
            self.pool_lost = fault == "lost"
            raise RuntimeError("a step that failed")
        ends, pasts, start = [], [], 0
        for row, length in enumerate(() if decoding is None else decoding.seq_lens):
            token = int(self.last_tokens[decoding.slots[row]])
            ends.append(self._run(decoding, row, [token])[-1] if length else ())
        for row, length in enumerate(() if chunks is None else chunks.lengths):
            pasts += self._run(chunks.rows, row, chunks.tokens[start : start + length].tolist())
            ends.append(pasts[-1])
            start += length
        return Hidden(ends, pasts)

    def _run(self, rows, row, tokens):
        """The sequences up to each of `tokens`, which the row adds to its past."""
        start, known = int(rows.seq_lens[row]), int(rows.known_lens[row])
        past = None
        for group, window in enumerate(self._windows):
            first = max(0, start - window + 1) if window else 0
            seen = [self._at(group, rows.tables, row, place) for place in range(first, start)]
            for place, key in enumerate(seen, start=first):
                if key is None or len(key) != place + 1 or key != seen[-1][: place + 1]:
                    raise Wrong(f"token {start} sees {key} at {place}")
            if past is not None and seen and seen[-1] != past:
                raise Wrong("the groups hold different sequences")
            past = seen[-1] if seen else past
        past = past or ()
        if len(past) != start:
            raise Wrong(f"{len(past)} tokens stand before token {start}")
        out = []
        for place, token in enumerate(tokens, start=start):
            past = (*past, (token, self._rope.regime(max(known, place + 1))))
            out.append(past)
            for group, pool in enumerate(self.pool):
                block = rows.tables[group][row][place // BLOCK]
                if not block:
                    raise Wrong(f"token {place} has no block")
                pool[block, place % BLOCK] = past
        return out

    def _at(self, group, tables, row, place):
        block = tables[group][row][place // BLOCK]
        return self.pool[group][block, place % BLOCK] if block else None

    def draw(self, hidden, picks, rows, num_logprobs):
        count = len(rows.slots)
        ends = hidden.ends if picks is None else [hidden.ends[pick] for pick in picks]
        tokens = np.zeros((count, 1), np.int64)
        for row, slot in enumerate(rows.slots):
            if slot and rows.positions[row]:  # or it has ended since, and nobody will look
                past = ends[row]
                if len(past) != rows.positions[row]:
                    raise Wrong(f"a token is drawn for place {rows.positions[row]} after {len(past)}")
                tokens[row] = drawn(past, int(rows.sampling.seed[row]), self._allowed(rows, row, past))
        self.last_tokens = self.last_tokens.copy()
        self.last_tokens[rows.slots] = tokens[:, 0]
        ones = np.ones(count, np.int64)
        return StepOutput(tokens, ones, ones.astype(bool), ones[:, None].astype(bool))

    def candidates(self, hidden, picks, rows, num_top):
        ends = hidden.ends if picks is None else [hidden.ends[pick] for pick in picks]
        found = [likeliest(past, num_top) for past in ends[: len(rows.slots)]]
        for row, slot in enumerate(rows.slots):
            if slot and len(ends[row]) != rows.positions[row]:
                raise Wrong(f"a beam goes on at place {rows.positions[row]} after {len(ends[row])}")
        ids, logprobs = (np.asarray(column) for column in zip(*found, strict=True))
        return Candidates(ids, logprobs, np.ones(len(found), bool))

    def put_tokens(self, slots, tokens):
        self.last_tokens = self.last_tokens.copy()
        self.last_tokens[slots] = tokens

    def _allowed(self, rows, row, past):
        extras = rows.sampling.extras
        if isinstance(extras, tuple):
            return None
        history = extras.history[row].copy()
        if rows.pending[row]:
            history[rows.positions[row] - 1] = self.last_tokens[rows.slots[row]]
        if history[: len(past)].tolist() != [token for token, _ in past]:
            raise Wrong("the history is not the row's")
        return extras.mask[row]

    def score(self, hidden, targets, num_logprobs):
        scores = [hash((past, int(target))) % 1000 for past, target in zip(hidden.chunks, targets, strict=False)]
        none = np.zeros((len(scores), 0))
        return SimpleNamespace(logprobs=scores, top_ids=none, top_logprobs=none)

    def copy_blocks(self, copies):
        held = [self.pool[copy.group][copy.source].copy() for copy in copies]
        for copy, block in zip(copies, held, strict=True):
            self.pool[copy.group][copy.target] = block

    def fetch(self, out):
        if self._faults("unread"):
            raise RuntimeError("a result that failed")
        return out


class Turns:
    """A constraint: even and odd tokens take turns."""

    def __init__(self, parity=0):
        self._parity = parity

    def mask(self):
        return np.full(VOCAB // 32, (0x55555555, 0xAAAAAAAA)[self._parity], np.uint32)

    def accept(self, token):
        if token % 2 != self._parity:
            raise Wrong("the mask was not kept to")
        self._parity = 1 - self._parity

    def fork(self):
        return Turns(self._parity)


def alone(ask, sample, max_tokens, rope):
    """The answer that a request has by itself."""
    prompt, seed, turns = ask.prompt, ask.seeds[sample], ask.structure and ask.structure.fork()
    known, answer = len(prompt), []
    while not answer or (len(answer) < max_tokens and answer[-1] not in ask.params.stop_token_ids):
        tokens = [*prompt, *answer]
        if known <= rope.recompute_len < len(tokens):
            known = len(tokens)
        answer.append(drawn(past_of(tokens, known, rope), seed, None if turns is None else turns.mask()))
        if turns is not None:
            turns.accept(answer[-1])
    return answer


def past_of(tokens, known, rope):
    return tuple((token, rope.regime(max(known, place + 1))) for place, token in enumerate(tokens))


def searched(request, rope):
    """The hypotheses that a beam search has by itself."""
    params, prompt = request.params, request.prompt
    stop_ids = frozenset(params.stop_token_ids)
    beams = BeamSearch(params.beam_width, params.n, request.max_tokens, stop_ids, params.length_penalty, False)
    while not beams.done:
        pasts = [past_of([*prompt, *beam.tokens], len(prompt), rope) for beam in beams.live]
        beams.advance(*zip(*(likeliest(past, VOCAB) for past in pasts), strict=True))
    return beams.hypotheses


def scores_of(prompt, rope):
    known = tuple((token, rope.regime(len(prompt))) for token in prompt)
    return [hash((known[:place], prompt[place])) % 1000 for place in range(1, len(prompt))]


class Load:
    """An engine on paper, and everything that was ever asked of it."""

    def __init__(self, seed, windows, rope, usable_blocks, chunk, faulty):
        self.rng, self.rope, self.now = np.random.default_rng(seed), rope, 1.0
        # Half of the loads decode and prefill apart, and cut prompts where padding costs more than a step.
        apart = seed % 2 == 1
        steps = {"prefill_tokens": chunk, "mixed_steps": not apart, "step_tokens": int(apart)}
        config = SimpleNamespace(**vars(CONFIG) | steps)
        shapes = make_shape_plan(config, 1)
        memory = Memory(usable_blocks + 1, windows, BLOCK, rope.regime, keep=True)
        limits = Limits(64, 8, VOCAB, BLOCK, usable_blocks, shapes.stop_ids, rope.recompute_len)
        faults = partial(self.fault, 0.03 if faulty else 0)
        device = PaperDevice(windows, usable_blocks + 1, 8, rope, faults)
        self.engine = Engine(device, memory, shapes, limits, lambda: self.now)
        self.texts = [self.rng.integers(0, VOCAB, 60).tolist() for _ in range(3)]
        self.asked = []

    def fault(self, chance, *kinds):
        return str(self.rng.choice(kinds)) if self.rng.random() < chance else ""

    def submit(self):
        """Asks for something: prompts begin alike, and anything may be combined."""
        rng = self.rng
        length = int(rng.choice([1, 7, 8, 9, 16, 17, 24, 30, 31, 32, 33, 45]))
        prompt = self.texts[rng.integers(3)][:length]
        if rng.random() < 0.3:
            prompt = [*prompt[: length - 1], int(rng.integers(VOCAB))]
        params = SamplingParams(
            n=int(rng.choice([1, 1, 1, 2, 3, 4])),
            max_tokens=int(rng.integers(1, 18)),
            stop_token_ids=rng.integers(0, VOCAB, 2).tolist() if rng.random() < 0.3 else (),
            repetition_penalty=1.5 if rng.random() < 0.2 else 1.0,
            prompt_logprobs=0 if rng.random() < 0.15 else None,
            priority=int(rng.choice([0, 0, 0, 1, -1])),
            deadline_s=float(rng.integers(5, 60)) if rng.random() < 0.1 else None,
            cache_salt="salt" if rng.random() < 0.1 else "",
        )
        structure = Turns() if rng.random() < 0.15 else None
        if rng.random() < 0.1:
            params, structure = replace(params, beam_width=max(params.n, int(rng.integers(1, 5)))), None
        seeds = [seed_bits(int(rng.integers(1 << 20)), sample) for sample in range(params.n)]
        ask = Ask(prompt, params, seeds, structure=structure)
        # A search may be too large for so few blocks, or pass the length where its past would be run again.
        with contextlib.suppress(RequestError):
            self.asked += [(ask, sample, request) for sample, request in enumerate(self.engine.submit(ask))]

    def cancel(self):
        """Ends a request, whatever became of it."""
        if self.asked:
            self.engine.cancel(self.asked[self.rng.integers(len(self.asked))][2])

    def check(self):
        """Asserts that all that was answered is what is answered alone."""
        for ask, sample, request in self.asked:
            if request.search:
                assert request.hypotheses in ((), searched(request, self.rope))
                assert request.hypotheses or request.finish_reason in ("abort", "error")
                continue
            wanted = alone(ask, sample, request.max_tokens, self.rope)
            if request.finish_reason in ("abort", "error"):
                wanted = wanted[: len(request.output)]
            assert request.output == wanted, (request, request.error)
            if sample == 0 and ask.params.prompt_logprobs is not None and request.output:
                found = [int(entry.logprob) for entry in request.prompt_logprobs]
                assert found == scores_of(request.prompt, self.rope)


ROPES = {"plain": Rope(), "long": Rope(32), "dynamic": Rope(32, follows=True)}


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("windows", [(0,), (20, 0), (12,)], ids=str)
def test_every_row_finds_its_own_past_whatever_befalls_it(windows, rope, faulty):
    preempted = hit = searches = 0
    for seed in range(10):
        load = Load(seed, windows, ROPES[rope], int(9 + seed % 4 * 4), (8, 16, 64)[seed % 3], faulty)
        for _ in range(120):
            what = load.rng.random()
            if what < 0.25:
                load.submit()
            elif what < 0.3:
                load.cancel()
            else:
                load.now += 1.0
                load.engine.step()
            load.engine.check()
        for _ in range(3000):
            load.now += 0.01
            if not load.engine.step():
                break
        assert not load.engine.has_work
        load.engine.check()
        load.check()
        assert load.engine.slots.num_free == 8, "an idle engine holds no slot"
        preempted += load.engine.counters.num_preemptions
        hit += load.engine.counters.cached_tokens
        searches += sum(len(request.hypotheses) > 0 for _, _, request in load.asked)
    assert preempted and hit and searches
