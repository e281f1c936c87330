# SPDX-License-Identifier: Apache-2.0
"""Drafts through the door under anything at once: each answer, its text, log-probabilities and end are those of the
same request alone without drafts."""

import random
from dataclasses import dataclass, field, replace

import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.answers import Answer
from metrale_jax.core.errors import RequestError
from metrale_jax.engine.buckets import make_shape_plan
from metrale_jax.engine.make import make_engine
from metrale_jax.llm_config import engine_config
from metrale_jax.loading import open_checkpoint
from metrale_jax.speculative.drafter_files import write_drafter
from tests.conftest import nan_fill
from tests.engine.conftest import WideShapes
from tests.serving.tiny_chat import write_tiny_chat
from tests.speculative.head_problems import head_of, random_params

LIMITS = {"max_sequences": 4, "max_context_tokens": 96, "block_size": 8, "prefill_tokens": 32, "kv_cache_mib": 1}
BLOCKS = 20
NUM_SCENES = 40
NEVER = -1
FORMS = (
    {"regex": r"[a-f]{2,9}(,[0-9]{1,3}){0,4}"},
    {"choice": ["abc", "abcd", "the", "a longer one"]},
    {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5}},
    {"grammar": 'start: "a" ("b" | "cd" | "ef")* "e"'},
)
# How often each is asked for, and what it is.
WISHES = (
    (0.15, lambda rng, vocab: {"top_k": rng.choice([1, 3, 20])}),
    (0.15, lambda rng, vocab: {"top_p": 0.9}),
    (0.1, lambda rng, vocab: {"typical_p": 0.8}),
    (0.2, lambda rng, vocab: {"repetition_penalty": rng.choice([0.8, 1.3])}),
    (0.2, lambda rng, vocab: {"frequency_penalty": rng.choice([-0.7, 1.5]), "presence_penalty": 0.5}),
    (0.2, lambda rng, vocab: {"logit_bias": {rng.randrange(vocab): rng.choice([-50.0, 5.0]) for _ in range(3)}}),
    (0.1, lambda rng, vocab: {"bad_words": [[rng.randrange(vocab), rng.randrange(vocab)] for _ in range(40)]}),
    (0.2, lambda rng, vocab: {"ignore_eos": True}),
    (0.2, lambda rng, vocab: {"min_tokens": rng.randint(1, 8)}),
    (0.3, lambda rng, vocab: {"logprobs": rng.choice([0, 5])}),
    (0.15, lambda rng, vocab: {"prompt_logprobs": 2}),
    (0.1, lambda rng, vocab: {"echo": True}),
    (0.15, lambda rng, vocab: {"n": rng.choice([2, 3])}),
    (0.25, lambda rng, vocab: rng.choice(FORMS)),
    (0.15, lambda rng, vocab: {"priority": rng.choice([-1, 1])}),
)
DRAFTERS = ("model", "ngram", "self", "mtp", "eagle3")


def drafter(kind, target, directory):
    """Options of the proposer: heads of random weights, and as a model the target itself, which is right wherever no
    rule speaks against it."""
    if kind in ("ngram", "self"):
        return {"proposer": kind}
    checkpoint = open_checkpoint(target)
    checkpoint.source.close()
    config = checkpoint.config
    if kind != "model":
        head = head_of(kind, config, capture=(0, 1, 2) if kind == "eagle3" else ())
        write_drafter(directory, head, random_params(head), config)
    return {"proposer": kind, "drafter": target if kind == "model" else directory}


def opened(path, **options):
    """An LLM whose pool is of NaN, and whose steps have few sizes."""
    llm = LLM(path, **LIMITS, **options)
    model = llm.loaded.steps.model
    each = BLOCKS * model.layout.block_bytes
    settings = replace(engine_config(llm.config, model), kv_cache_bytes=each, mixed_steps=True)
    shapes = make_shape_plan(settings, len(model.config.eos_token_ids))
    shapes = WideShapes(**vars(shapes), chunk_tokens=settings.prefill_tokens)
    llm.engine = make_engine(llm.loaded.steps, llm.loaded.params, settings, nan_fill, shapes=shapes)
    return llm


@dataclass(eq=False)
class Sent:
    """A request, the step in which it is given up, and the text that came of each of its answers."""

    prompt: list[int]
    params: SamplingParams
    answer: Answer
    cancel_at: int = NEVER
    pieces: dict[int, str] = field(default_factory=dict)


class Scenes:
    """Loads of an LLM that drafts, held against one that does not."""

    def __init__(self, plain: LLM, drafting: LLM, seed: int):
        self.plain, self.drafting, self.rng = plain, drafting, random.Random(seed)
        self.vocab = plain.loaded.config.vocab_size
        self.known: dict[tuple, list] = {}
        self.num_answers = self.num_cancelled = self.num_forks = 0

    def alone(self, prompt, params):
        """What the request gives alone."""
        key = tuple(prompt), params
        if key not in self.known:
            self.known[key] = self.plain.generate([prompt], params)[0].choices
        return self.known[key]

    def prompt(self):
        part = [self.rng.randrange(97, 123) for _ in range(self.rng.choice([1, 5, 9, 16, 24, 33]))]
        return [*part, *part[: self.rng.choice([0, len(part) // 2, len(part)])]]

    def params(self, prompt, single=False):
        rng = self.rng
        wishes = {"temperature": rng.choice([0, 0.7, 2.5]), "seed": rng.randrange(99)}
        wishes["max_tokens"] = rng.choice([1, 2, 3, 4, 5, 12, 20, None])
        for chance, wish in WISHES:
            wishes |= wish(rng, self.vocab) if rng.random() < chance else {}
        try:
            params = SamplingParams(**wishes | ({"n": 1} if single else {}))
            self.plain.prepare(prompt, params)
        except RequestError:
            return self.params(prompt, single)  # such as go together for nobody
        first = self.alone(prompt, params)[0]
        ends = rng.random()
        if ends < 0.25 and len(first.text) > 1 and not params.echo:
            start = rng.randrange(len(first.text))
            stop = first.text[start : start + rng.randint(1, 5)]
            return replace(params, stop=[stop], include_stop_str_in_output=ends < 0.08)
        return replace(params, stop_token_ids=[rng.choice(first.token_ids)]) if ends > 0.75 else params

    def submitted(self, prompt):
        if self.rng.random() > 0.12:
            params = self.params(prompt)
            return [Sent(prompt, params, self.drafting.submit(prompt, params))]
        parts = [[*prompt, *self.prompt()[:size]] for size in (0, self.rng.randint(0, 9))]
        asked = [(part, self.params(part, single=True)) for part in parts]
        answers = self.drafting.submit_forks([self.drafting.prepare(*one) for one in asked], len(prompt))
        self.num_forks += len(asked)
        return [Sent(*one, answer) for one, answer in zip(asked, answers, strict=True)]

    def run(self):
        """One load to its end: prompts that come at any step, are gone on with, forked, or given up."""
        rng, running = self.rng, []
        coming = sorted((rng.randint(0, 12), self.prompt()) for _ in range(rng.randint(1, 6)))
        for step in range(2000):
            while coming and coming[0][0] <= step:
                sent = self.submitted(coming.pop(0)[1])
                sent[0].cancel_at = step + rng.randint(1, 8) if rng.random() < 0.1 else NEVER
                running += sent
            if not running and not coming:
                return
            self.drafting.step()
            self.drafting.engine.check()
            for sent in list(running):
                for piece in sent.answer.new_pieces():
                    sent.pieces[piece.index] = sent.pieces.get(piece.index, "") + piece.text
                if sent.answer.finished:
                    running.remove(sent)
                    coming += [(step, prompt) for prompt in self.checked(sent)]
                elif sent.cancel_at == step:
                    self.drafting.cancel([sent.answer])
        raise AssertionError(f"{len(running)} answers never end")

    def checked(self, sent):
        """The next turn, if there is one, of an answer that is what it has to be."""
        found, expected = sent.answer.result().choices, self.alone(sent.prompt, sent.params)
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert sent.pieces.get(index, "") == ours.text
            if ours.finish_reason == "abort":
                self.num_cancelled += 1
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                continue
            self.num_answers += 1
            for name in ("token_ids", "text", "finish_reason"):
                assert getattr(ours, name) == getattr(theirs, name), (sent.prompt, sent.params)
            assert type(ours.error) is type(theirs.error)
            for one, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
                assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
                assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-4)
        if self.rng.random() > 0.3 or not found[0].token_ids:
            return []
        # The next turn may go back behind the answer's end.
        turn = [*sent.prompt, *found[0].token_ids[: self.rng.randint(1, len(found[0].token_ids))], 100]
        return [turn] if len(turn) < LIMITS["max_context_tokens"] - 12 else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
def test_answers_under_anything_at_once_are_those_alone_without_drafts(kind, tmp_path):
    target = write_tiny_chat(tmp_path / "model")
    (tmp_path / "drafter").mkdir()
    options = drafter(kind, target, tmp_path / "drafter")
    drafting = opened(target, **options, num_drafts=3, draft_mode="always")
    scenes = Scenes(opened(target, prefix_cache=False), drafting, seed=1)
    for _ in range(NUM_SCENES):
        scenes.run()
    drafts = drafting.stats().drafts
    assert 0 < drafts.accepted < drafts.proposed and scenes.num_answers > 2 * NUM_SCENES
    assert scenes.num_cancelled and scenes.num_forks
