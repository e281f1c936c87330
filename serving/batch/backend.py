# SPDX-License-Identifier: Apache-2.0
"""What a batch needs of a model, small enough that a fake can stand in; and `LLM` as one."""

from typing import TYPE_CHECKING, Protocol

from metrale_jax.results import GenerationResult
from metrale_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from metrale_jax.llm import LLM

# A text, token ids, or the messages of a chat.
Prompt = str | list[int] | list[dict[str, str]]


class Ticket(Protocol):
    """A request on its way."""

    @property
    def finished(self) -> bool:
        """Whether `result` can be asked for."""

    def result(self) -> GenerationResult:
        """The answer, or one with `error` set."""


class Backend(Protocol):
    """A model that works on many requests at once. `max_in_flight` is how many answers it wants queued or running."""

    max_in_flight: int

    def submit(self, prompt: Prompt, params: SamplingParams) -> Ticket:
        """Queues a request. Raises `MetraleError` for one that cannot be served."""

    def step(self) -> None:
        """Advances all that was submitted."""

    def token_bytes(self, token_id: int) -> bytes:
        """How a token is spelt, for log-probabilities."""


class LLMBackend:
    """An `LLM` as a backend: its slots full, and as many requests again waiting three times over."""

    def __init__(self, llm: "LLM"):
        self._llm = llm
        self.max_in_flight = 4 * llm.config.max_sequences

    def submit(self, prompt: Prompt, params: SamplingParams) -> Ticket:
        """The ticket of a queued request. Raises `MetraleError`."""
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = self._llm.chat_tokens(prompt)
        return self._llm.submit(prompt, params)

    def step(self) -> None:
        """One step of the engine."""
        self._llm.step()

    def token_bytes(self, token_id: int) -> bytes:
        """A token's spelling; nothing where the model has no tokenizer."""
        tokenizer = self._llm.loaded.tokenizer
        return tokenizer.token_bytes(token_id) if tokenizer else b""
