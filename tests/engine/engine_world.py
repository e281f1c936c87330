# SPDX-License-Identifier: Apache-2.0
"""An engine over a `FakeDevice`, loads for it, the answer that each request has alone, and what must always hold."""

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine.admission import Ask, Limits, admitted
from metrale_jax.engine.beam import BeamSearch, Hypothesis
from metrale_jax.engine.buckets import ShapePlan
from metrale_jax.engine.drafting import Drafting
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.memory import Memory
from metrale_jax.engine.request import Request, TokenLogprob
from metrale_jax.engine.snapshots import SnapshotPolicy, Snapshots
from metrale_jax.engine.spill import Spill
from metrale_jax.engine.tiers import Tier
from metrale_jax.sampling.constraints import mask_of
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.speculative.policy import DraftPolicy
from tests.engine.drafting_device import DraftingDevice
from tests.engine.fake_device import (
    Failure,
    FakeDevice,
    Rules,
    Written,
    drawn_token,
    expect,
    fingerprints,
    likeliest,
    log_probability,
)

BLOCK, CONTEXT, VOCAB, LIMIT = 4, 40, 13, 14
EOS = (0, 1)
# All prompts begin like one of these, so that they meet in the cache.
STEMS = tuple([2 + (place * step + step) % (VOCAB - 2) for place in range(CONTEXT)] for step in (1, 2, 5))
WINDOWS = ((0,), (0, 6), (5,), (9, 0, 4))
# What a model makes of lengths: nothing, frequencies that a prompt's length picks for good, or that change on the way.
REGIMES: tuple[tuple[Callable[[int], Hashable], int], ...] = (
    (lambda length: (), 0),
    (lambda length: length if length > LIMIT else 0, 0),
    (lambda length: length > LIMIT, LIMIT),
)
DRAFT_WIDTHS = ((1,), (1, 3), (1, 3, 7), (2, 5), (1, 2, 4), (8, 16))
Choose = Callable[[int, int], int]
"""`choose(low, high)` picks an integer, both ends included."""


class Picky:
    """Forbids a third of the tokens, other ones after each; at its `nth` it allows none, is stuck, or raises."""

    def __init__(self, kind: str, nth: int):
        self._kind, self._nth, self._count = kind, nth, 0

    def allowed(self) -> list[int]:
        if self._kind in ("empty", "stuck") and self._count == self._nth:
            return []
        return [token for token in range(VOCAB) if (token + self._count) % 3]

    def mask(self) -> np.ndarray:
        if self._kind == "stuck" and self._count == self._nth:
            raise RequestError("the constraint is stuck")
        return mask_of(self.allowed(), VOCAB)

    def accept(self, token: int) -> None:
        expect(token in self.allowed(), f"token {token} was not allowed")
        if self._kind == "raises" and self._count == self._nth:
            raise RequestError("the constraint is broken")
        self._count += 1

    def fork(self) -> "Picky":
        forked = Picky(self._kind, self._nth)
        forked._count = self._count
        return forked


class Watch:
    """Sees tokens; at the `nth` it ends the answer, raises, or fails."""

    def __init__(self, kind: str, nth: int):
        self._kind, self._nth, self.seen = kind, nth, []

    def __call__(self, tokens: list[int]) -> bool:
        self.seen += tokens
        if self._kind == "raises" and len(self.seen) == self._nth:
            raise MetraleError("the watch is broken")
        if self._kind == "fails" and len(self.seen) == self._nth:
            return {}[self._nth]
        return self._kind == "ends" and len(self.seen) == self._nth


@dataclass(frozen=True)
class Job:
    """What is submitted; the watch and the constraint as the arguments that make them."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    watch: tuple[str, int] = ("none", 0)
    constraint: tuple[str, int] | None = None

    @property
    def stop_ids(self) -> set[int]:
        """Ids that end an answer."""
        return {*self.params.stop_token_ids, *(() if self.params.ignore_eos else EOS)}

    @property
    def room(self) -> int:
        """Most tokens of an answer."""
        return min(self.params.max_tokens or CONTEXT, CONTEXT - len(self.prompt))


def random_job(choose: Choose, max_sequences: int, earlier: Sequence[tuple[int, ...]] = ()) -> Job:
    """Any request, now and then with a prompt of `earlier`; the plainest where `choose` picks the lowest."""
    stem = STEMS[choose(0, len(STEMS) - 1)]
    own = [2 + (choose(0, VOCAB - 3))] * choose(0, 3)
    prompt = (*stem[: choose(1 - bool(own), 34)], *own) or (2,)
    if earlier and choose(0, 2) == 2:
        prompt = earlier[choose(0, len(earlier) - 1)]
    if choose(0, 19) == 19:
        return search_job(choose, prompt)
    rare = choose(0, 15)
    constraint = (("plain", "empty", "stuck", "raises")[choose(0, 3)], choose(0, 6)) if rare in (1, 2) else None
    max_tokens = choose(1, 24)
    params = SamplingParams(
        n=choose(1, min(3, max_sequences)) if rare in (3, 4, 5) else 1,
        max_tokens=None if rare == 6 else max_tokens,
        min_tokens=choose(0, max_tokens) if rare in (7, 8) else 0,
        ignore_eos=constraint is None and choose(0, 3) > 0,
        stop_token_ids=(5,) if rare == 9 else (),
        banned_token_ids=(3, 4) if rare in (2, 10) else (),
        repetition_penalty=1.5 if rare in (6, 11) else 1.0,  # which the device ignores, but for the history's sake
        bad_words=[[7, 8], [2]] if rare == 11 else (),
        regex="any" if constraint else None,
        logprobs=choose(0, 2) if rare in (5, 8, 12) else None,
        prompt_logprobs=choose(0, 2) if rare in (4, 12, 13) else None,
        priority=choose(0, 2) - 1 if rare in (3, 14) else 0,
        deadline_s=choose(1, 60) if rare == 15 else None,
        cache_salt="other" if choose(0, 7) == 7 else "",
    )
    watch = (("none", "none", "none", "ends", "raises", "fails")[choose(0, 5)], choose(1, 9))
    return Job(prompt, params, tuple(choose(0, 5) for _ in range(params.n)), watch, constraint)


def random_forks(choose: Choose, max_sequences: int, earlier: Sequence[tuple[int, ...]] = ()) -> tuple[list[Job], int]:
    """Branches of a prompt, and how many tokens they share: now and then all of them, or of one that was met before."""
    count = choose(1, min(4, max_sequences))
    jobs = [random_job(choose, 1) for _ in range(count)]
    jobs = [job for job in jobs if not job.params.beam_width] or [random_job(lambda low, high: low, 1)]
    stem = (2, *STEMS[choose(0, len(STEMS) - 1)][: choose(0, 27)])
    if earlier and choose(0, 3) == 3:
        stem = earlier[choose(0, len(earlier) - 1)][:28]
    salt = jobs[0].params.cache_salt
    return [
        replace(
            job,
            prompt=(*stem, *(2 + choose(0, VOCAB - 3) for _ in range((0, 0, 1, 3, 7)[choose(0, 4)]))),
            params=replace(job.params, cache_salt=salt),
        )
        for job in jobs
    ], len(stem)


def search_job(choose: Choose, prompt: tuple[int, ...]) -> Job:
    """A beam search."""
    width = choose(1, 4)
    params = SamplingParams(
        beam_width=width,
        n=choose(1, width),
        max_tokens=choose(1, 9),
        early_stopping=(True, False, "never")[choose(0, 2)],
        length_penalty=float(choose(-1, 2)),
        ignore_eos=choose(0, 1) > 0,
        banned_token_ids=(3, 4) if choose(0, 3) == 3 else (),
        prompt_logprobs=1 if choose(0, 7) == 7 else None,
    )
    return Job(prompt, params, (0,) * params.n)


def solo_search(job: Job, rules: Rules) -> tuple[Hypothesis, ...]:
    """What a beam search finds alone."""
    params = job.params
    search = BeamSearch(
        params.beam_width, params.n, job.room, job.stop_ids, params.length_penalty, params.early_stopping
    )
    allowed = [token for token in range(VOCAB) if token not in params.banned_token_ids]
    salt = params.cache_salt, rules.regime(len(job.prompt))
    while not search.done:
        ends = [fingerprints([*job.prompt, *beam.tokens], salt)[-1] for beam in search.live]
        ids, logprobs = zip(*(zip(*likeliest(end, allowed, VOCAB), strict=True) for end in ends), strict=True)
        search.advance(ids, logprobs)
    return search.hypotheses


def solo(job: Job, sample: int, rules: Rules) -> tuple[list[int], str]:
    """The tokens of one answer to `job`, and why they end; a pure function."""
    output: list[int] = []
    constraint, watch = Picky(*job.constraint) if job.constraint else None, Watch(*job.watch)
    while True:
        tokens = [*job.prompt, *output]
        hidden = fingerprints(tokens, (job.params.cache_salt, rules.regime_at(len(job.prompt), len(tokens))))[-1]
        banned = {*job.params.banned_token_ids, *(job.stop_ids if len(output) < job.params.min_tokens else ())}
        banned |= {word[-1] for word in job.params.bad_words if output[len(output) - len(word) + 1 :] == [*word[:-1]]}
        allowed = [t for t in (constraint.allowed() if constraint else range(VOCAB)) if t not in banned]
        if not allowed:
            return output, "error"
        output.append(drawn_token(hidden, job.seeds[sample], len(tokens), allowed))
        try:
            if constraint:
                constraint.accept(output[-1])
            if output[-1] in job.stop_ids or watch([output[-1]]):
                return output, "stop"
        except (MetraleError, LookupError):
            return output, "error"
        if len(output) == job.room:
            return output, "length"


@dataclass
class Sent:
    """A request, what it was made of, and what is known of its way. `orphan`: its leader ended before the fork."""

    request: Request
    job: Job
    sample: int
    answer: list[int]
    reason: str
    watch: Watch
    sent_at: int
    leader: Request | None
    first_at: int = 0
    orphan: bool = False
    branch: bool = False


class World:
    """One engine and all that was ever asked of it. With `drafts` it drafts, and a step takes time by chance."""

    def __init__(self, choose: Choose, drafts: bool = False):
        self.choose = choose
        windows = WINDOWS[choose(0, len(WINDOWS) - 1)]
        regime, recompute_len = REGIMES[choose(0, len(REGIMES) - 1)]
        self.num_blocks, self.num_slots = choose(5, 24), choose(1, 6)
        sizes = choose(3, 24), choose(1, self.num_slots), 8
        self.keep, mixes, step_tokens = choose(0, 3) > 0, choose(0, 1) > 0, choose(0, 4)
        # Layers with recurrent state, and how many snapshots of it there is room for.
        recurrent = choose(0, 1) > 0
        num_snapshots = choose(0, 8) if recurrent else 0
        self.shapes = ShapePlan(self.num_slots, -(-CONTEXT // BLOCK), *sizes, mixes, step_tokens, num_snapshots)
        snapshots = Snapshots(self.num_slots + 1, num_snapshots) if recurrent else None
        decode_blocks = choose(0, 2) if recurrent else 0
        flags = [choose(0, 3) > 0 for _ in range(3)] if recurrent else [True] * 3
        cuts = decode_blocks, choose(0, 2 * BLOCK) if recurrent else 0
        policy = SnapshotPolicy(*flags, *cuts, whole_prompts=choose(0, 3) > 0 if recurrent else True)
        norm_tokens = (0, 0, 8, 6)[choose(0, 3)] if recurrent else 0
        swap_bytes = (0, 0, 60, 400)[choose(0, 3)]
        self.rules = Rules(regime, recompute_len, VOCAB)
        memory = Memory(self.num_blocks + 1, windows, BLOCK, regime, self.keep, snapshots, policy, swap_bytes)
        limits = Limits(CONTEXT, self.num_slots, VOCAB, BLOCK, memory.num_usable, 8, recompute_len, norm_tokens)
        sizes = self.num_blocks + 1, self.num_slots, num_snapshots
        device = self.rules, windows, BLOCK, *sizes, recurrent, norm_tokens
        self.tier = Tier((0, 0, 40, 2000)[choose(0, 3)] * 8) if choose(0, 2) == 2 else None
        self.drafting, self._chance = None, random.Random(choose(0, 10**6) if drafts else 0)
        if drafts:
            widths, mode = DRAFT_WIDTHS[choose(0, len(DRAFT_WIDTHS) - 1)], ("always", "auto")[choose(0, 2) == 2]
            self.shapes = replace(self.shapes, draft_widths=widths)
            self.drafting = Drafting(DraftPolicy(widths, mode), limits, self.shapes)
            self.device = DraftingDevice(*device, guesses=self._chance)
            self.device.references = lambda group, block: memory.allocators[group]._references[block]
        else:
            self.device = FakeDevice(*device)
        if self.tier is not None and self.keep:
            memory.attach(Spill(self.tier, self.device, BLOCK, windows, recurrent))
        self.now = 1.0
        self.engine = Engine(self.device, memory, self.shapes, limits, self._clock, drafting=self.drafting)
        self.device.holders = lambda: [*self.engine.filling, *self.engine.running.values()]
        self.sent: list[Sent] = []
        self.live: list[Sent] = []
        self.steps = self.num_broken = 0

    def _clock(self) -> float:
        if self.drafting is not None:
            self.now += self._chance.choice((0.0, 1e-4, 1e-3, 2e-3))
        return self.now

    @property
    def earlier(self) -> list[tuple[int, ...]]:
        """The last prompts."""
        return [one.job.prompt for one in self.sent[-8:]]

    def submit(self, job: Job) -> bool:
        """Whether the request was taken; one that can never be served is not."""
        watches = [Watch(*job.watch) for _ in job.seeds]
        structure = Picky(*job.constraint) if job.constraint else None
        ask = Ask(job.prompt, job.params, job.seeds, EOS, job.params.bad_words, structure)
        too_long = -(-(len(job.prompt) + job.room) // BLOCK) + 1 > self.num_blocks
        try:
            requests = self.engine.submit(ask, watches)
        except RequestError as error:
            beams = job.params.beam_width and ("beam" in str(error) or "run at once" in str(error))
            expect(beams or (too_long and "KV blocks" in str(error)), f"refused: {error}")
            return False
        expect(not too_long, "what needs more blocks than there are was taken")
        for sample, request in enumerate(requests):
            self._note(request, job, sample, watches[sample], requests[0] if sample else None)
        return True

    def submit_forks(self, jobs: Sequence[Job], shared_tokens: int) -> bool:
        """Whether branches of a prompt were taken."""
        watches = [Watch(*job.watch) for job in jobs]
        try:
            parts = [
                admitted(
                    Ask(
                        job.prompt,
                        job.params,
                        job.seeds,
                        EOS,
                        job.params.bad_words,
                        Picky(*job.constraint) if job.constraint else None,
                    ),
                    self.engine.limits,
                )
                for job in jobs
            ]
            requests = self.engine.enqueue_forks(parts, shared_tokens, watches)
        except RequestError as error:
            expect("KV blocks" in str(error) or "branches" in str(error), f"refused: {error}")
            return False
        for job, request, watch in zip(jobs, requests, watches, strict=True):
            self._note(request, job, 0, watch, None if request is requests[0] else requests[0])
            self.sent[-1].orphan = self.sent[-1].branch = True
        return True

    def _note(self, request: Request, job: Job, sample: int, watch: Watch, leader: Request | None) -> None:
        answer, reason = ([], "") if job.params.beam_width else solo(job, sample, self.rules)
        # A row whose rules leave nothing runs the token 0 before the host has seen that.
        tokens = [*job.prompt, *answer, 0]
        self.device.sequences[request.request_id] = Written(tokens, len(job.prompt), job.params.cache_salt, self.rules)
        one = Sent(request, job, sample, answer, reason, watch, self.steps, leader)
        self.sent.append(one)
        self.live.append(one)

    def step(self) -> bool:
        """One step; whether work is left."""
        self.steps += 1
        try:
            left = self.engine.step()
            expect(left == self.engine.has_work, "a step says wrongly whether work is left")
        except KeyboardInterrupt:
            left = True
        for one in self.live:
            if one.request.output and not one.first_at:
                one.first_at = self.steps
        return left

    def cancel(self, index: int) -> None:
        """Ends one of the last requests, finished or not."""
        if self.sent:
            self.engine.cancel(self.sent[-1 - index % min(12, len(self.sent))].request)

    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now += seconds

    def fail(self, name: str, nth: int, takes_pool: bool) -> None:
        """Lets a later call of the device fail."""
        self.device.failures.append(Failure(name, nth, takes_pool))

    def break_rows(self, rows: int) -> None:
        """The next draw finds logits that are not finite in the rows whose bits are set."""
        self.device.broken_rows = rows
        self.num_broken += 1

    def check(self) -> None:
        """All that holds between any two calls."""
        engine = self.engine
        engine.check()
        busy = [*engine.filling, *engine.running.values()]
        waiting = list(engine.waiting)
        ids = [request.request_id for request in (*busy, *waiting)]
        expect(len(set(ids)) == len(ids) and len(waiting) == len(engine.waiting), "a request is in two places")
        expect(not any(request.finished for request in (*busy, *waiting)), "a finished request is somewhere")
        expect(not any(request.lease or request.slot or request.seq_len for request in waiting), "who waits holds none")
        placed = [*busy, *waiting]
        followers = [one for request in placed for one in request.followers if not one.finished]
        beams = [one for request in placed if request.search for one in request.search.rows]
        slots = [one.slot for one in dict.fromkeys((*placed, *followers, *beams)) if one.slot]
        expect(len(set(slots)) == len(slots) == self.num_slots - engine.slots.num_free, "a slot is lost")
        known = {*ids, *(one.request_id for one in followers)}
        self.check_references(busy)
        for one in list(self.live):
            request = one.request
            if one.leader is not None and one.leader.finished and not one.orphan and request.lease is None:
                one.orphan = True
            if request.finished:
                self.check_finished(one)
                self.live.remove(one)
            else:
                expect(request.request_id in known, f"request {request.request_id} is nowhere")

    def check_references(self, busy: list[Request]) -> None:
        """Each block has as many references as holders, and nobody holds a block beside its kept equal."""
        memory = self.engine.memory
        for group, allocator in enumerate(memory.allocators):
            held = Counter(block for request in busy for block in request.lease.tables[group])
            held += Counter(node.blocks[group] for node in memory.tree._nodes() if node.blocks)
            del held[0]
            counts = {block: count for block, count in enumerate(allocator._references) if count}
            expect(counts == held, f"references of group {group}: {counts}, holders: {held}")
            for request in [] if memory._windows[group] else busy:
                node = request.lease.pin and request.lease.pin._node
                while node and node.generation == memory.tree._generation and node.depth:
                    own = request.lease.tables[group][node.depth - 1]
                    expect(own == node.blocks[group], f"{own} is held beside its equal {node.blocks[group]}")
                    node = node.parent

    def check_finished(self, one: Sent) -> None:
        """What came out is the solo answer, as far as it goes."""
        request, job, output = one.request, one.job, one.request.output
        if job.params.beam_width:
            self.check_search(one)
            return
        expect(output == one.answer[: len(output)], f"{output} is no beginning of {one.answer}")
        expect(one.watch.seen == output[: len(one.watch.seen)], "the watch saw something else")
        expect(request.lease is None and not request.slot, "a finished request holds things")
        expect(all(follower.finished for follower in request.followers), "a follower waits for one that has finished")
        told = str(request.error)
        if request.finish_reason == "abort":
            late = job.params.deadline_s and self.now >= request.queued_at + job.params.deadline_s
            expect(request.error is None or (late and "deadline" in told), f"aborted: {told}")
        elif "INJECTED" in told or "not finite" in told:
            expect(request.finish_reason == "error", "a failure is an error")
            expect(self.device.num_failed if "INJECTED" in told else self.num_broken, told)
        else:
            expect(output == one.answer, f"{output} is not {one.answer}: {told}")
            expect(request.finish_reason == one.reason, f"{request.finish_reason} is not {one.reason}: {told}")
            expect((request.error is None) == (one.reason != "error"), told)
        self.check_logprobs(one)
        if not request.num_preemptions and not self.device.num_failed and one.leader is None:
            self.check_work(one)

    def check_search(self, one: Sent) -> None:
        """A search that ended by itself found what it finds alone."""
        request = one.request
        expect(not any(row.lease or row.slot for row in request.search.rows), "a finished search holds things")
        if request.finish_reason in ("stop", "length"):
            found = solo_search(one.job, self.rules)
            expect(request.hypotheses == found, f"{request.hypotheses} are not {found}")
        elif request.finish_reason == "error":
            expect("INJECTED" in str(request.error) or "not finite" in str(request.error), str(request.error))

    def check_logprobs(self, one: Sent) -> None:
        """Log-probabilities are those of the tokens, each once."""
        request, job = one.request, one.job
        tokens, start = [*job.prompt, *request.output], len(job.prompt)

        def entry(position: int, count: int) -> TokenLogprob:
            salt = job.params.cache_salt, self.rules.regime_at(start, max(start, position))
            hidden = fingerprints(tokens[:position], salt)[-1]
            top = tuple(((hidden + place) % VOCAB, float(-place - hidden % 7)) for place in range(count))
            return TokenLogprob(tokens[position], log_probability(hidden, tokens[position]), top)

        count = job.params.logprobs
        wanted = [] if count is None else [entry(place, count) for place in range(start, len(tokens))]
        expect(request.logprobs == wanted, f"log-probabilities {request.logprobs} are not {wanted}")
        count = job.params.prompt_logprobs
        wanted = [] if count is None else [entry(place, count) for place in range(1, start)]
        partial = not request.output or one.leader is not None
        wanted = wanted[: len(request.prompt_logprobs)] if partial else wanted
        expect(request.prompt_logprobs == wanted, f"prompt: {request.prompt_logprobs} are not {wanted}")

    def check_work(self, one: Sent) -> None:
        """An undisturbed request skipped what it says was cached, and ran the rest once.

        Where its rotary frequencies change, and only there, it goes back to what is cached under the new ones.
        """
        request, spans = one.request, self.device.sequences[one.request.request_id].spans
        if not request.output:
            return
        if request.cached_tokens == len(request.prompt):
            expect(self.device.num_kept_rows_used, "a prompt was found whole, and no row drawn from")
        if not spans:
            found = request.cached_tokens == len(request.prompt) and len(request.output) == 1
            expect(found, "nothing was run of a prompt that was not found")
            return
        expect(self.keep or not request.cached_tokens, "something was cached without a cache")
        if request.cached_tokens == len(request.prompt):
            # One that outgrew its frequencies at once is run again, and nothing of it was run before.
            spans = [(request.cached_tokens, request.cached_tokens), *spans]
        starts, stops = zip(*spans, strict=True)
        expect(starts[0] == request.cached_tokens, f"{starts[0]} tokens were skipped, not {request.cached_tokens}")
        jumps = [pair for pair in zip(stops[:-1], starts[1:], strict=True) if pair[0] != pair[1]]
        limit = self.rules.recompute_len
        again = len(jumps) == 1 and len(request.prompt) <= limit == jumps[0][0]
        back = again and jumps[0][1] < limit and jumps[0][1] % BLOCK == 0 and (self.keep or not jumps[0][1])
        back |= again and self.device.recurrent and jumps[0][1] == limit + 1  # all of it was found under the new ones
        expect(not jumps or back, f"tokens were run twice or never: {spans}")

    def check_order(self) -> None:
        """First tokens come in order of service, from those that had a chance.

        Where a prompt is cut for a snapshot or for branches, the rest of its step is for who comes next. A search that
        fails with the pool has had its first tokens, and others of its step draw theirs again.
        """
        if self.device.recurrent or any(one.branch for one in self.sent):
            return
        lost = [one for one in self.sent if one.job.params.beam_width and "INJECTED" in str(one.request.error)]
        seen = [one for one in self.sent if one.first_at and not one.orphan and one not in lost]
        for one in seen:
            for other in seen:
                before = (one.request.rank, one.request.request_id) < (other.request.rank, other.request.request_id)
                if before and one.sent_at <= other.sent_at:
                    expect(one.first_at <= other.first_at, f"{other.request.request_id} was served before its turn")

    def finish(self) -> None:
        """Runs to the end in a bounded number of steps, then nothing is held."""
        cuts = 20 if self.device.recurrent else 0  # also one for each block, where a step holds but one
        work = [len(one.job.prompt) // self.shapes.prefill_tokens + 2 * one.job.room + 4 + cuts for one in self.live]
        most = 10 + 2 * sum(work)
        start = self.steps
        while self.step():
            self.check()
            expect(self.steps - start < most, f"work is left after {most} steps")
        self.check()
        expect(not self.live, "an answer is missing")
        drawing = [one.request for one in self.sent if not one.job.params.beam_width]
        expect(self.device.num_failed or not any(one.in_flight for one in drawing), "tokens are in flight")
        self.check_order()
        expect(self.engine.slots.num_free == self.num_slots, "an idle engine holds slots")
        memory = self.engine.memory
        memory.forget()
        expect(all(a.num_free == a.num_usable for a in memory.allocators), "an idle engine holds blocks")
        if self.drafting is not None:
            self.check_drafts()

    def check_drafts(self) -> None:
        """What the policy was told of drafts is what there was, and it keeps nothing of answers that have ended."""
        stats, device = self.drafting.stats(), self.device
        expect(all(0 <= accepted <= proposed for proposed, accepted in stats.positions), f"{stats.positions}")
        told, found = (stats.proposed, stats.accepted), (device.num_proposed, device.num_accepted)
        lost = device.num_failed or self.num_broken
        whole = told == found or (lost and all(a <= b for a, b in zip(told, found, strict=True)))
        expect(whole, f"the policy was told of {told} drafts, there were {found}")
        known = self.drafting._policy._acceptance._sequences
        expect(not known, f"answers {list(known)} have ended, and are known to the policy")
