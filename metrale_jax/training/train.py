# SPDX-License-Identifier: Apache-2.0
"""`train_drafter`: from a model and a directory to a trained draft head, in three phases that each can be gone on with:
the model's answers, what it computes for them, and the training itself."""

import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from metrale_jax.core.config import ModelConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers import embed as embedding
from metrale_jax.llm import LLM
from metrale_jax.models.decoder import DecoderParams
from metrale_jax.progress import Progress, silent
from metrale_jax.runtime import LoadedModel, check_writable
from metrale_jax.speculative.drafter_files import write_drafter
from metrale_jax.speculative.heads import HEADS, KINDS, default_capture, head_config
from metrale_jax.training.answers import Answered, asked, collect_answers
from metrale_jax.training.features import DONE, digest, read_rows, record_rows
from metrale_jax.training.fit import CHECKPOINTS, REPORT_STEPS, Course, Lessons, fit, measure
from metrale_jax.training.initial import head_layer, initial_head
from metrale_jax.training.options import BUILT_IN, TrainOptions
from metrale_jax.training.pack import (
    Packed,
    Text,
    coverage,
    draft_vocabulary,
    expected_counts,
    pack,
    texts_of,
    token_counts,
)
from metrale_jax.training.places import claimed, refuse_others, settle_owner
from metrale_jax.training.programs import Programs, Recipe
from metrale_jax.training.prompts import built_in, prompts_of_file, spread
from metrale_jax.training.questions import made_up
from metrale_jax.training.regress import linear_start

DEFAULTS = TrainOptions()
FIGURES = "training.json"
DATA = "data"
# What of a model's identity its answers and rows depend on.
OWNED_BY = ("family", "config", "weights")
# Held-out answers are drawn with seeds that no other answer has.
HELD_OUT_SEED = 1 << 20
HELD_OUT, LEARNT = "held-out", "answers"
# Of the prompts for a model that makes up its own, one in so many is a built-in one: these have more forms.
BUILT_IN_EVERY = 4
COUNTED_ROWS = 2048
MEASURED = (0.0, 0.7, 1.0)
# How much of the learning rate an `fc` moves by that begins at its best.
FITTED_SHARE = 0.2


@dataclass(frozen=True)
class Told:
    """What the model said: to prompts that are learnt from, and to those that are not."""

    learnt: list[Answered]
    held_out: list[Answered]


def train_drafter(
    llm: LLM, directory: Path, options: TrainOptions = DEFAULTS, progress: Progress = silent, say=print
) -> dict[str, Any]:
    """Figures of the run, which `directory` then holds as `training.json` beside the head. `say(line)` tells how the
    training goes. Raises `MetraleError`s; what was done by then is gone on with by the next call."""
    data = Path(options.data) if options.data else directory / DATA
    for name, place in (("output directory", directory), ("data directory", data)):
        check_writable(name, place)
    with claimed(directory, data):
        if (directory / FIGURES).exists():
            _clean(directory, options)  # what a run that was killed in its last moments left
            raise ConfigError(f"{directory} holds a drafter that is finished; give another directory, or remove it.")
        refuse_others(directory)
        owner = {name: value for name, value in llm.identity.items() if name in OWNED_BY}
        asked_for = {"answer_tokens": options.answer_tokens, "seed": options.seed}
        settle_owner(data, owner | asked_for, [f"{HELD_OUT}.jsonl", f"{LEARNT}.jsonl", DONE])
        return _run(llm, directory, data, options, owner, progress, say)


def _run(
    llm: LLM, directory: Path, data: Path, options: TrainOptions, owner: Mapping[str, str], progress: Progress, say
) -> dict[str, Any]:
    clock = _Clock()
    told = _told(llm, options, data, progress)
    clock.end("answers")
    loaded = llm.loaded
    kind, capture = KINDS[options.kind], ()
    if HEADS[kind].fc_factor == 3:
        capture = default_capture(len(loaded.config.layers))
    held, learnt = texts_of(told.held_out), texts_of(told.learnt)
    offset = sum(len(text.tokens) for text in held)
    learnt = [dataclasses.replace(text, place=text.place + offset) for text in learnt]
    tokens = [text.tokens for text in (*held, *learnt)]
    record_rows(loaded.steps, loaded.params, tokens, capture, data, lambda *at: progress("record", *at))
    rows = read_rows(data, (None, *capture), sum(map(len, tokens)), loaded.config.hidden_dim)
    clock.end("rows")
    figures = _trained(loaded, told, (held, learnt), rows, directory, options, owner, say)
    clock.end("training")
    figures["minutes"] = clock.minutes
    (directory / FIGURES).write_text(json.dumps(figures, indent=2) + "\n")
    _clean(directory, options)
    return figures


def _clean(directory: Path, options: TrainOptions) -> None:
    """Nothing; of a finished run only the drafter is left, and data in a directory that the user named."""
    for name in (CHECKPOINTS,) if options.data else (CHECKPOINTS, DATA):
        shutil.rmtree(directory / name, ignore_errors=True)


def _told(llm: LLM, options: TrainOptions, data: Path, progress: Progress) -> Told:
    prompts = _prompts(llm, options, data, progress)
    found = []
    for name, stage in ((HELD_OUT, "answer held-out prompts"), (LEARNT, "answer")):
        questions = asked(llm, prompts[name], options.seed + (HELD_OUT_SEED if name == HELD_OUT else 0))
        path = data / f"{name}.jsonl"
        found.append(
            collect_answers(llm, questions, options.answer_tokens, path, lambda *at, stage=stage: progress(stage, *at))
        )
        if not found[-1]:
            lower = ", or a lower held_out" if options.held_out > 1 else ""
            raise ConfigError(
                f"prompts are too few for held_out={options.held_out}: none is left for {name}; give more{lower}."
            )
    return Told(found[1], found[0])


def _prompts(llm: LLM, options: TrainOptions, data: Path, progress: Progress) -> dict[str, list[str]]:
    """The prompts that are not learnt from and those that are: none is among both."""
    if options.prompts not in (None, BUILT_IN):
        own = prompts_of_file(Path(options.prompts))
        return {HELD_OUT: own[: options.held_out], LEARNT: own[options.held_out :][: options.answers]}
    chat, found = llm.tokenizer.has_chat_template, {}
    for name, count, seed in (
        (HELD_OUT, options.held_out, options.seed + HELD_OUT_SEED),
        (LEARNT, options.answers, options.seed),
    ):
        texts = []
        if chat and options.prompts is None:
            path = data / f"{name}-questions.jsonl"
            texts = made_up(llm, count - count // BUILT_IN_EVERY, seed, path, lambda *at: progress("ask", *at))
            texts = [text for text in texts if text not in found.get(HELD_OUT, ())]
        listed = itertools.islice(built_in(options.seed, chat, name == HELD_OUT), count - len(texts))
        found[name] = spread(texts, list(listed))
    return found


def _trained(
    loaded: LoadedModel,
    told: Told,
    texts: tuple[list[Text], list[Text]],
    rows: Sequence[np.ndarray],
    directory: Path,
    options: TrainOptions,
    owner: Mapping[str, str],
    say,
) -> dict[str, Any]:
    target, params = loaded.config, loaded.params
    held, learnt = (_packed(each, options.row_tokens) for each in texts)
    ids = _vocabulary(loaded, told, rows[0], learnt, options.draft_vocab_size)
    capture = default_capture(len(target.layers)) if len(rows) > 1 else ()
    config = head_config(options.kind, target, head_layer(target), len(ids), capture)
    head = initial_head(config, target, params, ids, options.seed)
    table, scorer = _tables(target, params)
    # In whole reports, so that each is of steps of a kind.
    single = int(options.single_share * options.steps) // REPORT_STEPS * REPORT_STEPS
    recipe = Recipe(options.learning_rate, options.steps, options.turns, single)
    if not capture:
        recipe = dataclasses.replace(recipe, fc_share=FITTED_SHARE)
        own = jnp.asarray(scorer[ids])
        logits = lambda rows: embedding.logits(jnp.asarray(rows), own, target.logit_scale, 0.0)  # noqa: E731
        head = linear_start(head, learnt, rows[0], table, target.norm_eps, logits)
    programs = Programs(config, recipe, loaded.model.platform)
    settings = {**options.identity(), **owner, "texts": digest([text.tokens for text in (*texts[0], *texts[1])])}
    course = Course(options.seed, options.step_rows, 60 * options.checkpoint_minutes, settings)
    lessons = Lessons(learnt, rows, table, jnp.asarray(scorer[ids]), jnp.asarray(scorer))
    say(
        f"{learnt.asked.sum()} tokens in {len(learnt.tokens)} rows of {options.row_tokens}; {len(ids)} draft tokens, "
        f"which are {coverage(told.held_out, ids, target.vocab_size):.1%} of the held-out answers"
    )

    def report(step: int, loss: float, right: Sequence[float]) -> None:
        say(f"step {step} of {options.steps}: loss {loss:.3f}, right {' '.join(f'{share:.3f}' for share in right)}")

    head, history = fit(programs, head, lessons, course, directory, report)
    write_drafter(directory, config, head, target)
    kept = dataclasses.replace(lessons, packed=held)
    device_head = head.replace(token_ids=jnp.asarray(ids) if len(ids) < target.vocab_size else ())
    found = [
        measure(programs, device_head, kept, temperature, options.seed, options.measured_rows)
        for temperature in MEASURED
    ]
    for one in found:
        say(f"held out, temperature {one['temperature']}: right by turn {one['right']}, {one['tokens_per_step']}")
    return {
        "model": str(loaded.path.name),
        "kind": options.kind,
        "options": options.identity(),
        "answers": {"learnt": len(told.learnt), "held_out": len(told.held_out)},
        "answer_tokens": {"learnt": int(learnt.asked.sum()), "held_out": int(held.asked.sum())},
        "draft_vocabulary": {"size": len(ids), "covers": coverage(told.held_out, ids, target.vocab_size)},
        "held_out": found,
        "history": history,
    }


def _packed(texts: Sequence[Text], row_tokens: int) -> Packed:
    packed = pack(texts, row_tokens)
    if not packed.asked.any():
        least = min(text.answer_start for text in texts) + 1
        raise ConfigError(
            f"row_tokens={row_tokens} cuts each text before its answer; give {least} or more, better 512."
        )
    return packed


def _tables(target: ModelConfig, params: DecoderParams) -> tuple[np.ndarray, np.ndarray]:
    """The table of embeddings as the target takes them, and its head's rows, in float32."""
    table = np.asarray(params.embed, np.float32)
    head = table if isinstance(params.head, tuple) else np.asarray(params.head, np.float32)
    return table * np.float32(target.embed_scale) if target.embed_scale != 1.0 else table, head


def _vocabulary(loaded: LoadedModel, told: Told, hidden: np.ndarray, learnt, size: int) -> np.ndarray:
    """The draft vocabulary: what answers have, and what the target might have said instead."""
    target = loaded.config
    if not 0 < size < target.vocab_size:
        return np.arange(target.vocab_size, dtype=np.int32)
    _, scorer = _tables(target, loaded.params)
    scorer = jnp.asarray(scorer)
    places = learnt.places[learnt.asked]
    some = places[:: max(1, len(places) // COUNTED_ROWS)]
    expected = expected_counts(
        hidden[some], lambda rows: embedding.logits(jnp.asarray(rows), scorer, target.logit_scale, target.logit_softcap)
    )
    counts = token_counts(told.learnt, target.vocab_size) + expected * (len(places) / len(some))
    return draft_vocabulary(counts, size, loaded.eos_token_ids)


class _Clock:
    """Minutes that phases took."""

    def __init__(self):
        self.minutes: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, phase: str) -> None:
        """Nothing; the phase that began where the last one ended is over."""
        now = time.monotonic()
        self.minutes[phase] = round((now - self._last) / 60, 2)
        self._last = now
