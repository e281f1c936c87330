# SPDX-License-Identifier: Apache-2.0
"""A model whose answer is a function of the prompt and the seed, and which takes a few steps over it."""

import json
from zlib import crc32

from metrale_jax.core.errors import RequestError
from metrale_jax.results import GenerationResult, RequestMetrics, Usage

MAX_PROMPT = 1000


def answer_to(prompt, seed):
    """The text that the fake gives."""
    return f"{crc32(json.dumps(prompt).encode()):08x}-{seed}"


class FakeTicket:
    def __init__(self, prompt, params, steps):
        self._prompt, self._params, self.steps = prompt, params, steps

    @property
    def finished(self):
        return self.steps <= 0

    def result(self):
        assert self.finished
        choices = [self._choice(self._params.seed + index) for index in range(self._params.n)]
        return GenerationResult(**{**choices[0].__dict__, "others": tuple(choices[1:])})

    def _choice(self, seed):
        length = len(self._prompt)
        return GenerationResult(
            answer_to(self._prompt, seed), (1, 2), (), "stop", Usage(length, 0, 2), RequestMetrics(0, 0, 0, 0), seed
        )


class FakeBackend:
    """Finishes a request after one to `max_steps` steps, so that answers come out of order."""

    def __init__(self, max_in_flight=32, max_steps=5, on_step=lambda: None):
        self.max_in_flight, self._max_steps, self._on_step = max_in_flight, max_steps, on_step
        self.flying = []
        self.prompts = []
        self.most_flying = 0

    def submit(self, prompt, params):
        if len(prompt) > MAX_PROMPT:
            raise RequestError(
                f"prompt of {len(prompt)} tokens leaves no room in a context of {MAX_PROMPT}; shorten it."
            )
        ticket = FakeTicket(prompt, params, 1 + params.seed % self._max_steps)
        self.flying.append(ticket)
        self.most_flying = max(self.most_flying, len(self.flying))
        return ticket

    def step(self):
        self._on_step()
        for ticket in self.flying:
            ticket.steps -= 1
        self.flying = [ticket for ticket in self.flying if not ticket.finished]

    def token_bytes(self, token_id):
        return b"t%d" % token_id
