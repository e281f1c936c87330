# SPDX-License-Identifier: Apache-2.0
"""The target's own answers to prompts: a file of JSON lines that a run which was killed goes on with."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from metrale_jax.core.errors import ConfigError, ContextLengthError, MetraleError, shown
from metrale_jax.llm import LLM
from metrale_jax.sampling.params import SamplingParams

# Temperatures that answers are drawn at, in turn: how a model goes on differs more between these than between seeds.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0, 0.8)


@dataclass(frozen=True)
class Asked:
    """One prompt as token ids, and how its answer is drawn."""

    tokens: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answered:
    """Token ids of a prompt and of its answer, and the temperature that it was drawn at."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


def asked(llm: LLM, texts: Sequence[str], seed: int) -> list[Asked]:
    """The prompts of `texts` under the model's chat template, where it has one, each with a temperature and a seed.
    Raises `ConfigError` for one that leaves no room for an answer."""
    chat, most = llm.tokenizer.has_chat_template, llm.engine.limits.max_context_tokens
    found = []
    for number, text in enumerate(texts):
        try:
            tokens = llm.chat_tokens([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        except ContextLengthError:
            tokens = ()
        if not 0 < len(tokens) < most:
            raise ConfigError(
                f"prompt {number + 1}, {shown(text)}, does not fit the model with an answer: the two may have {most} "
                "tokens; shorten it, or leave it out."
            )
        found.append(Asked(tuple(tokens), TEMPERATURES[number % len(TEMPERATURES)], seed + number))
    return found


def collect_answers(
    llm: LLM, questions: Sequence[Asked], max_tokens: int, path: Path, show: Callable[[int, int], None]
) -> list[Answered]:
    """Answers in the order of `questions`, of at most `max_tokens` tokens each. Those that `path` holds are not drawn
    again, the others are added there as they end. `show(done, total)` counts answers."""
    have = dict(read_answers(path, questions))
    missing = [number for number in range(len(questions)) if number not in have]
    show(len(have), len(questions))
    with path.open("a", encoding="utf-8") as file:
        for number, found in _drawn(llm, questions, missing, max_tokens):
            have[number] = found
            line = {"number": number, "prompt": found.prompt, "answer": found.answer, "temperature": found.temperature}
            file.write(json.dumps(line) + "\n")
            file.flush()
            show(len(have), len(questions))
        os.fsync(file.fileno())
    return [have[number] for number in range(len(questions))]


def _drawn(llm: LLM, questions: Sequence[Asked], missing: list[int], max_tokens: int) -> Iterator[tuple[int, Answered]]:
    """Answers as they end. As many are asked for at once as the engine runs, and as many again wait."""
    waiting, running = list(reversed(missing)), {}
    most = 2 * llm.config.max_sequences
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number = waiting.pop()
                one = questions[number]
                params = SamplingParams(temperature=one.temperature, seed=one.seed, max_tokens=max_tokens)
                running[number] = llm.submit(one.tokens, params)
            llm.step()
            for number in [number for number, answer in running.items() if answer.finished]:
                result = running.pop(number).result()
                if result.error is not None:
                    raise result.error
                one = questions[number]
                yield number, Answered(one.tokens, tuple(result.token_ids), one.temperature)
    finally:
        for answer in running.values():
            answer.cancel(llm.engine)


def read_answers(path: Path, questions: Sequence[Asked]) -> Iterator[tuple[int, Answered]]:
    """The answers to `questions` that `path` holds, by number. A last line that was not finished is cut off the file.
    Raises `ConfigError` for a file of other prompts."""
    if not path.exists():
        return
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(kept))
    for line in kept.splitlines():
        number, found = _answered(line, path)
        if number >= len(questions):
            continue
        if found.prompt != questions[number].tokens or found.temperature != questions[number].temperature:
            raise ConfigError(
                f"{path} holds answers to other prompts than these (number {number} differs); give another directory, "
                "or the prompts and seed that it was begun with."
            )
        yield number, found


def _answered(line: bytes, path: Path) -> tuple[int, Answered]:
    try:
        value: Mapping = json.loads(line)
        return value["number"], Answered(tuple(value["prompt"]), tuple(value["answer"]), value["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise MetraleError(f"{path} is damaged ({error!r}); remove it, and answers are drawn anew.") from None
