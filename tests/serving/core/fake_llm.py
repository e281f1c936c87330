# SPDX-License-Identifier: Apache-2.0
"""A model for tests of what is around it: each step draws one token of every answer, and can be told to go wrong."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from metrale_jax.core.errors import RequestError
from metrale_jax.results import GenerationResult, RequestMetrics, TokenLogprob, Usage
from metrale_jax.sampling.params import SamplingParams


class FakeAnswer:
    """Tokens 0, 1, 2 …, spelt a, b, c …, up to `max_tokens`."""

    def __init__(self, prompt, params):
        self.prompt, self.params = tuple(prompt), params
        self.drawn, self.told, self.reason = 0, 0, ""
        self.began = False
        self.error = None

    @property
    def finished(self):
        return bool(self.reason)

    def draw(self):
        self.began = True
        self.drawn += 1
        if self.drawn >= self.params.max_tokens:
            self.reason = "length"

    def new_pieces(self):
        if self.told == self.drawn:
            return []
        tokens = tuple(range(self.told, self.drawn))
        self.told = self.drawn
        usage = Usage(len(self.prompt), 0, self.drawn)
        return [SimpleNamespace(index=0, text=spelt(tokens), token_ids=tokens, logprobs=(), usage=usage)]

    def result(self):
        tokens = tuple(range(self.drawn))
        usage = Usage(len(self.prompt), 0, len(tokens))
        scores = ()
        if self.params.prompt_logprobs is not None:
            scores = tuple(TokenLogprob(token, -float(token), ()) for token in self.prompt[1:])
        return GenerationResult(
            spelt(tokens),
            tokens,
            (),
            self.reason,
            usage,
            RequestMetrics(0.0, 0.0, 0.01, 0),
            seed=0,
            error=self.error,
            prompt_token_ids=self.prompt,
            prompt_logprobs=scores,
        )


def spelt(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


class FakeLLM:
    """`on_step()` is called in each step, `on_prepare()` in each preparation; they may raise or wait."""

    def __init__(self, on_step: Callable[[], None] = lambda: None, on_prepare: Callable[[], None] = lambda: None):
        self.on_step, self.on_prepare = on_step, on_prepare
        self.running: list[FakeAnswer] = []
        self.cancelled: list[FakeAnswer] = []
        self.forks: list[tuple[int, int]] = []
        self.num_warmed = self.num_spilled = self.num_steps = 0
        self.config = SimpleNamespace(max_sequences=4)
        self.engine = SimpleNamespace(limits=SimpleNamespace(max_context_tokens=64))
        self.identity = {"weights": "fake"}
        self.loaded = SimpleNamespace(
            steps=SimpleNamespace(on_compile=lambda name: nullcontext()),
            config=SimpleNamespace(family="fake", vocab_size=100, max_context_tokens=64, hidden_dim=2, dtype="float32"),
            tokenizer=None,
            eos_token_ids=(0,),
        )

    def warm_up(self):
        self.num_warmed += 1

    def spill(self):
        self.num_spilled += 1

    def prepare(self, prompt, params: SamplingParams):
        self.on_prepare()
        return SimpleNamespace(prompt=prompt, params=params)

    def tokenize(self, text, add_special_tokens):
        return [ord(one) % 100 for one in text]

    def chat_tokens(self, messages, **template):
        return self.tokenize("".join(one["content"] for one in messages), True)

    def detokenize(self, token_ids, skip_special_tokens):
        return spelt(token_ids)

    def checked_tokens(self, token_ids):
        if not token_ids:
            raise RequestError("prompt of 0 tokens is empty; give at least one token.", field="prompt")
        return tuple(token_ids)

    def submit_prepared(self, prepared):
        if not prepared.prompt:
            raise RequestError("prompt of 0 tokens is empty; give at least one token.", field="prompt")
        answer = FakeAnswer(prepared.prompt, prepared.params)
        self.running.append(answer)
        return answer

    def submit_forks(self, prepared, shared_tokens):
        self.forks.append((len(prepared), shared_tokens))
        return [self.submit_prepared(one) for one in prepared]

    def cancel(self, answers: Iterable[FakeAnswer]):
        for answer in answers:
            if not answer.finished:
                answer.reason = "abort"
                self.cancelled.append(answer)
        self.running = [one for one in self.running if not one.finished]

    def step(self):
        self.num_steps += 1
        self.on_step()
        for answer in self.running:
            answer.draw()
        self.running = [one for one in self.running if not one.finished]
        return bool(self.running)

    def embedding_chunks(self, tokens, pooling, normalize):
        for _ in range(2):
            yield
        return np.asarray([float(len(tokens)), 0.5], np.float32)
