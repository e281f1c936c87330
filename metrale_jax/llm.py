# SPDX-License-Identifier: Apache-2.0
"""`LLM`: the door for most users. Text in, text out, over the engine; safe to use from several threads."""

import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import RLock, get_ident
from typing import Any, Literal

import numpy as np

from metrale_jax.answers import Answer, AnswerStream, checked_prompts, only_request, params_for
from metrale_jax.core.config import rope_regime
from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.devices import devices_for
from metrale_jax.engine.admission import checked_tokens
from metrale_jax.engine.hooks import Hook, ignore, in_turn
from metrale_jax.engine.make import make_engine
from metrale_jax.engine.moves import spill_kept
from metrale_jax.engine.stats import EngineStats
from metrale_jax.evaluation import chunked_logits, embedding, embedding_chunks, token_nlls
from metrale_jax.llm_config import (
    checked_limits,
    engine_config,
    llm_config,
    lower_tier,
    path_of,
    run_options,
    warn_of_a_cold_cache,
)
from metrale_jax.prepared import Prepared, Preparer, Prompt
from metrale_jax.programs import Programs
from metrale_jax.progress import Progress, shown_by
from metrale_jax.request_log import RequestLog
from metrale_jax.results import GenerationResult, StreamPiece
from metrale_jax.runtime import LoadedModel, load_model, profiled, use_compile_cache
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.saved_answers import carry_on, fingerprint, load_saved, save_request
from metrale_jax.text.tokenizer import Tokenizer


class LLM:
    """A loaded model that answers.

    `model` is an alias (`smollm2-135m`, `gemma3-270m`), a Hugging Face directory, a .gguf file or a hub id; options are
    the fields of `LLMConfig`. `progress` shows load, compile and generate on stderr, or is told of them. `device` is
    JAX's first or several that share the model. `on_finish(request)` is called when one ends. Raises `MetraleError`s.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str | None = None,
        *,
        progress: bool | Progress = False,
        device=None,
        on_finish: Hook = ignore,
        **options,
    ):
        self.config = llm_config({"dtype": dtype, **options})
        checked_limits(self.config)  # mistakes in the options show before anything is loaded
        if self.config.request_log is not None:
            on_finish = in_turn(on_finish, RequestLog(self.config.request_log))
        self._progress = shown_by(progress)
        if self.config.compile_cache is not None:
            use_compile_cache(Path(self.config.compile_cache))
        self._programs = Programs(self.config, lambda *stage: self._progress(*stage))
        self.loaded: LoadedModel = load_model(
            str(model),
            run_options(self.config),
            path_of(self.config.cache_dir),
            devices_for(device, self.config.tensor_parallel),
            self._progress,
            self._programs.compile_first,
        )
        steps = self.loaded.steps
        warn_of_a_cold_cache(self.config, steps.model.layout)
        steps.on_compile = self._programs.compiling
        tier = lower_tier(self.config, steps.model.layout, lambda: self.identity)
        settings = engine_config(self.config, steps.model)
        places = {"tier": tier, "swap_directory": path_of(self.config.swap_dir)}
        self.engine = make_engine(steps, self.loaded.params, settings, on_finish=on_finish, **places)
        self._lock = RLock()
        self._forgotten: deque[Answer] = deque()
        self._preparer = Preparer(lambda: self.tokenizer, self.loaded.eos_token_ids, self.engine.limits)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `TextError` if its files hold none."""
        if self.loaded.tokenizer is None:
            raise self.loaded.tokenizer_error
        return self.loaded.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Results in the order of `prompts`: texts or lists of token ids, one or many.

        A lone bad prompt raises `RequestError`; among others it comes back with `finish_reason` "error" and the rest
        run. One `params` serves all, a list holds one for each.
        """
        listed = checked_prompts(prompts)
        each = params_for(params, len(listed))
        alone = len(listed) == 1
        # The longest answers first: whatever comes last then has company to the end.
        order = sorted(range(len(listed)), key=lambda index: -(each[index].max_tokens or sys.maxsize))
        by_index: dict[int, Answer] = {}
        try:
            for index in order:
                by_index[index] = self._submitted(listed[index], each[index], alone)
            answers = list(by_index.values())
            total = sum(answer.max_tokens for answer in answers)
            while self._advance(answers):
                self._progress("generate", sum(answer.num_generated for answer in answers), total)
        finally:
            self.cancel(by_index.values())
        self._progress("generate", total, total)
        return [by_index[index].result() for index in range(len(listed))]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template
    ) -> GenerationResult:
        """The assistant's answer to a conversation: dicts with `role` and `content`. `template` is for the template."""
        return self.generate([self.chat_tokens(messages, **template)], params)[0]

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], /, **template) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the assistant to go on."""
        text = self.tokenizer.apply_chat_template(messages, **template)
        return self.tokenize(text, add_special_tokens=False)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt's text, framed as the model wants it or not. Raises `RequestError` for one too long."""
        return self._preparer.tokens(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises `RequestError` for ids that are none."""
        return self.tokenizer.decode(self.checked_tokens(token_ids), skip_special_tokens)

    def checked_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's ids as plain ints. Raises `RequestError` for none, or for ids outside the vocabulary."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return checked_tokens(token_ids, self.loaded.config.vocab_size)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AnswerStream:
        """Pieces of the answer's text as they are decided; the last carries the result. Closing the stream cancels the
        rest, and so does forgetting it.

        Joined, the pieces are the result's text. Raises `RequestError` at once for a prompt that cannot be served.
        """
        [one] = params_for(params, 1)
        if one.n != 1 or one.beam_width:
            raise RequestError(
                f"n={one.n} answers with beam_width={one.beam_width} cannot share one stream; ask for one that is "
                "drawn, or use generate.",
                "beam_width" if one.beam_width else "n",
            )
        answer = self.submit(prompt, one)
        return AnswerStream(self._pieces(answer), lambda: self.cancel([answer]), lambda: self._forgotten.append(answer))

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> Prepared:
        """The request, checked and ready to be queued: what takes time is done. Any thread may call this, and it waits
        for no step. Raises `RequestError` for what can never be served."""
        [one] = params_for(params, 1)
        return self._preparer.prepared(prompt, one)

    def submit_prepared(self, prepared: Prepared) -> Answer:
        """The answer to come, as `submit`; there is nothing left to do but to queue it."""
        answer = Answer.of(prepared)
        with self._lock:
            answer.submit(self.engine, prepared.admitted)
        return answer

    def submit_forks(self, prepared: Sequence[Prepared], shared_tokens: int) -> list[Answer]:
        """An answer to come for each, one of a kind, whose prompts all begin with the same `shared_tokens`: these run
        once, and each goes on from there by its own params. Raises `RequestError` for such as cannot share them."""
        answers = [Answer.of(one) for one in prepared]
        watches = [answer.watches[0] for answer in answers]
        with self._lock:
            requests = self.engine.enqueue_forks([one.admitted for one in prepared], shared_tokens, watches)
        for answer, request in zip(answers, requests, strict=True):
            answer.adopt([request])
        return answers

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Answer:
        """The answer to come: `step` until it is `finished`, then ask its `result`. Raises `RequestError` at once."""
        return self.submit_prepared(self.prepare(prompt, params))

    def save_answer(self, answer: Answer, path: str | Path) -> int:
        """Bytes of the file at `path` with which `load_answer` of another process, on the same model, goes on from
        where `answer` stands, bit for bit. Raises `RequestError` for one of another LLM, or finished, or of several."""
        with self._lock:
            return save_request(path_of(path or ""), self.engine, only_request(answer), answer.seed, self.identity)

    def spill(self) -> None:
        """Copies what is kept of prefixes to the host's memory and disk: `disk_cache` has it after this process."""
        with self._lock:
            spill_kept(self.engine)

    def load_answer(self, path: str | Path) -> Answer:
        """The answer that `save_answer` saved, queued to go on; its result has all of its tokens. A deadline counts
        from now. Raises `ConfigError` for a file of another model, or one that is damaged."""
        saved = load_saved(path_of(path or ""), self.engine, self.identity, partial(rope_regime, self.loaded.config))
        with self._lock:
            answer = self.submit(saved.prompt, replace(saved.params, seed=saved.seed))
            carry_on(self.engine, answer.only, saved)
        return answer

    @cached_property
    def identity(self) -> dict[str, str]:
        """What tells this model, and how it keeps state, from others."""
        return fingerprint(self.loaded.steps, self.loaded.params)

    def step(self) -> bool:
        """Advances all that was submitted; returns whether work is left."""
        with self._lock:
            return self._step()

    def stats(self) -> EngineStats:
        """How the engine stands. Waits for no step that is under way; gauges may be caught amid a change then."""
        return self.engine.stats()

    def profile(self, directory: str | Path) -> AbstractContextManager[None]:
        """A context whose work JAX's profiler records under `directory`, for TensorBoard or Perfetto. Entering raises
        `ConfigError` if that is not writable, or if the process is being profiled already."""
        return profiled(Path(directory))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Float32 logits `[T, V]` of a whole sequence; row i scores what follows token i."""
        tokens = self.checked_tokens(token_ids)
        return np.concatenate(list(chunked_logits(self.loaded.steps, self.loaded.params, tokens)))

    def embed(
        self, inputs: Prompt | Sequence[Prompt], pooling: Literal["mean", "last"] = "mean", normalize: bool = True
    ) -> list[np.ndarray]:
        """A vector of each input, float32 `[D]`: the mean of the rows behind the model's last norm or the last of them,
        of length one if it is to `normalize`. See `evaluation.embedding_chunks`."""
        tokens = [self.checked_tokens(one) for one in checked_prompts(inputs)]
        return [embedding(self.loaded.steps, self.loaded.params, one, pooling, normalize) for one in tokens]

    def embedding_chunks(
        self, token_ids: Sequence[int], pooling: str, normalize: bool
    ) -> Generator[None, None, np.ndarray]:
        """The same of one sequence, in pieces: comes back after each chunk, and with the vector in the end."""
        return embedding_chunks(self.loaded.steps, self.loaded.params, token_ids, pooling, normalize)

    def perplexity(self, text: Prompt) -> float:
        """`exp` of the mean negative log-likelihood of every token after the first."""
        tokens = self.checked_tokens(text)
        if len(tokens) < 2:
            raise RequestError(f"text of {len(tokens)} token predicts nothing; give at least two tokens.", "prompt")
        return float(np.exp(token_nlls(self.loaded.steps, self.loaded.params, tokens).mean()))

    def warm_up(self) -> int:
        """Compiles all that a load can need but for beams, swaps and saved answers; returns how many programs it is."""
        return self._programs.compile_all(self.loaded, self.engine.shapes)

    def _submitted(self, prompt: Prompt, params: SamplingParams, alone: bool) -> Answer:
        try:
            return self.submit_prepared(self.prepare(prompt, params))
        except MetraleError as error:
            if alone:
                raise
            return Answer.refused(params, error)

    def _advance(self, answers: Sequence[Answer]) -> bool:
        with self._lock:
            if all(answer.finished for answer in answers):
                return False
            self._step()
            return True

    def _step(self) -> bool:
        self._programs.stepping = get_ident()
        while self._forgotten:
            self._forgotten.popleft().cancel(self.engine)
        return self.engine.step()

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Ends what still runs of them, with what it has; what it held is free again."""
        with self._lock:
            for answer in answers:
                answer.cancel(self.engine)

    def _pieces(self, answer: Answer) -> Iterator[StreamPiece]:
        try:
            while self._advance([answer]):
                if not answer.finished and answer.num_generated > answer.num_taken:
                    yield StreamPiece(*answer.take())
            result = answer.result()
            text, tokens = answer.take()
            yield StreamPiece(text, tokens, result)
        except (Exception, KeyboardInterrupt):
            self.cancel([answer])
            raise
