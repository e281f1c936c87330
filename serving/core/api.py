# SPDX-License-Identifier: Apache-2.0
"""`AbstractService`: what a front may ask for. `Service` is the real one; fronts are tested against a scripted one."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from serving.chat.model import ChatModel
from serving.core.calls import (
    Caller,
    DetokenizeCall,
    EmbedCall,
    ForkCall,
    GenerateCall,
    ScoreCall,
    TokenizeCall,
)
from serving.core.errors import ServiceError
from serving.core.events import Embedded, Event, ModelCard, Scored


class AbstractService(ABC):
    """Calls from the event loop; every method raises `ServiceError` and nothing else but cancellation.

    A generator that is closed, or whose task is cancelled, ends its requests in the engine within a step.
    """

    @abstractmethod
    def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Event]:
        """Deltas of all answers as they come, an `Ended` for each."""

    @abstractmethod
    def fork(self, call: ForkCall, caller: Caller) -> AsyncIterator[Event]:
        """As `generate`; `index` is the branch's."""

    @abstractmethod
    async def score(self, call: ScoreCall, caller: Caller) -> Sequence[Scored]:
        """One for each continuation, or one for the prompt."""

    @abstractmethod
    async def embed(self, call: EmbedCall, caller: Caller) -> Sequence[Embedded]:
        """One for each input."""

    @abstractmethod
    async def tokenize(self, call: TokenizeCall, caller: Caller) -> Sequence[int]:
        """Token ids."""

    @abstractmethod
    async def detokenize(self, call: DetokenizeCall, caller: Caller) -> str:
        """Text."""

    @abstractmethod
    def models(self) -> Sequence[ModelCard]:
        """The models there are; none while one loads."""

    @abstractmethod
    def chat_model(self) -> ChatModel:
        """What has to be known of the model to chat with it. Raises `ServiceError` (UNAVAILABLE) while none serves."""

    @abstractmethod
    def authenticate(self, token: str | None, peer: str) -> Caller:
        """Who holds this bearer token. Raises `ServiceError` (UNAUTHENTICATED)."""

    @abstractmethod
    def refused(self, method: str, peer: str, error: ServiceError) -> None:
        """Nothing; a front ended a call by `error`, before or after the service heard of it: it leaves one record."""

    @abstractmethod
    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes, for log-probabilities."""
