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
    LoadCall,
    ScoreCall,
    TokenizeCall,
    UnloadCall,
)
from serving.core.changes import ModelStatus
from serving.core.errors import ServiceError
from serving.core.events import Embedded, Event, ModelCard, Scored


class AbstractCalls(ABC):
    """What can be asked of a model. Calls from the event loop; every method raises `ServiceError` and nothing else but
    cancellation.

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
        """The models that serve; none while none does."""

    @abstractmethod
    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes, for log-probabilities."""

    @abstractmethod
    def chat_model(self) -> ChatModel:
        """What has to be known of the model to chat with it. Raises `ServiceError` (UNAVAILABLE) while none serves."""


class AbstractService(AbstractCalls):
    """A service whose model may be changed. What it is asked goes to the model that serves at that moment, and is
    answered by that one to its end."""

    @abstractmethod
    def pinned(self) -> AbstractCalls:
        """The calls of one model, for who asks more than one thing that have to fit together: tokens and their texts.
        It is the one that serves when the first is asked. To be made for each of a caller's calls and not kept."""

    @abstractmethod
    def authenticate(self, token: str | None, peer: str) -> Caller:
        """Who holds this bearer token. Raises `ServiceError` (UNAUTHENTICATED)."""

    @abstractmethod
    def refused(self, method: str, peer: str, error: ServiceError) -> None:
        """Nothing; a front ended a call by `error`, before or after the service heard of it: it leaves one record."""

    @abstractmethod
    async def load_model(self, call: LoadCall, caller: Caller) -> ModelStatus:
        """How things stand once the model serves that was asked for. Calls of the one before go on to their end; where
        this one cannot be loaded, that one serves on. A caller that no longer waits takes nothing back.

        Raises `ServiceError`: FORBIDDEN for who may not or a model that may not be loaded, CONFLICT while another
        change is under way, INVALID for a model or options that are wrong, INTERNAL where loading failed.
        """

    @abstractmethod
    async def unload_model(self, call: UnloadCall, caller: Caller) -> ModelStatus:
        """How things stand once no model is there and its memory is free. Calls are refused from the start on. Raises
        as `load_model`; CONFLICT also where no model is there."""

    @abstractmethod
    def model_status(self, caller: Caller) -> ModelStatus:
        """How things stand. Raises `ServiceError` (FORBIDDEN) for who may not change models."""

    @abstractmethod
    def model_changes(self, caller: Caller) -> AsyncIterator[ModelStatus]:
        """How things stand, and again whenever that is different, until no change is under way. Raises `ServiceError`
        (FORBIDDEN) for who may not change models."""
