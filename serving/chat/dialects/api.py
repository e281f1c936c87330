# SPDX-License-Identifier: Apache-2.0
"""`AbstractDialect`: what there is to know of a way to write calls."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from serving.chat.model import ChatModel
from serving.chat.reader import Program, Reader
from serving.chat.structure import CallForm
from serving.chat.tools import Tool
from serving.chat.writer import Writer

Messages = list[dict[str, Any]]


class AbstractDialect(ABC):
    """Without state. Messages are those of `serving.chat.messages`: calls have their arguments as dicts."""

    @abstractmethod
    def recognizes(self, template: str) -> bool:
        """Whether a chat template's source is one of a model that writes calls like this."""

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """The words of the format that may be special tokens; the program has to see them."""

    @abstractmethod
    def program(self, reader: Reader, writer: Writer) -> Program:
        """Reads an answer to its end and writes its parts. What turns out to be no call is content, all of it; what
        follows a call that broke off is content too. Blanks at the words of the format are dropped."""

    @abstractmethod
    def form(self, tools: Sequence[Tool], model: ChatModel) -> CallForm:
        """The calls of these tools as a grammar."""

    @abstractmethod
    def new_id(self) -> str:
        """An id for a call."""

    @abstractmethod
    def fitted(self, messages: Messages) -> Messages:
        """The messages as the templates of such models want them."""

    @abstractmethod
    def described(self, tools: Sequence[Tool]) -> str:
        """What tells a model of the tools whose template does not."""

    @abstractmethod
    def spelt_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls as the model writes them, for one whose template does not."""

    @abstractmethod
    def spelt_result(self, name: str, content: str) -> str:
        """The result of a call of the tool `name`, for a model whose template does not show it."""
