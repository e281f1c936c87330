# SPDX-License-Identifier: Apache-2.0
"""`ScriptedService`: a service without a model. Fronts and clients are tested against what a test writes down for it.

A token is a byte of UTF-8, so ids are 0 to 255 and a text of `k` ASCII characters has `k` tokens.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from metrale_jax.results import GenerationResult, RequestMetrics, TokenLogprob, Usage
from serving.chat.model import ChatModel
from serving.core.api import AbstractService
from serving.core.calls import Caller, ForkCall, GenerateCall, Prompt
from serving.core.changes import ModelStatus
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Embedded, Ended, Event, ModelCard, Scored

CARD = ModelCard(
    id="scripted",
    architecture="ScriptedForCausalLM",
    dtype="float32",
    vocab_size=256,
    max_context_tokens=4096,
    max_sequences=32,
    embedding_width=4,
    has_chat_template=True,
    eos_token_ids=(0,),
    fingerprint="c0ffee",
    created=1_700_000_000,
)
STATUS = ModelStatus("serving", "", CARD, ("scripted",), 0, None, None)

# An `asyncio.Event` is waited for, an exception is raised, the rest is sent.
Step = Event | asyncio.Event | BaseException


def ids_of(text: str) -> tuple[int, ...]:
    """A text's token ids."""
    return tuple(text.encode())


def text_of(token_ids) -> str:
    """The text of token ids."""
    return bytes(token_ids).decode("utf-8", "replace")


def prompt_text(prompt: Prompt) -> str:
    """What the prompt says; a chat as `role:content` lines."""
    if prompt.text is not None:
        return prompt.text
    if prompt.token_ids is not None:
        return text_of(prompt.token_ids)
    return "".join(f"{message['role']}:{message['content']}\n" for message in prompt.messages)


def result(text: str, *, prompt_tokens: int = 3, finish_reason: str = "stop", **fields: Any) -> GenerationResult:
    """A whole answer of `text`."""
    token_ids = ids_of(text)
    made = {
        "text": text,
        "token_ids": token_ids,
        "logprobs": (),
        "finish_reason": finish_reason,
        "usage": Usage(prompt_tokens, 1, len(token_ids)),
        "metrics": RequestMetrics(0.25, 0.5, 2.5, 1),
        "seed": 7,
    }
    return GenerationResult(**{**made, **fields})


def answer(text: str, index: int = 0, **fields: Any) -> tuple[Event, ...]:
    """The events of an answer, a delta for each character."""
    whole = result(text, **fields)
    deltas = (
        Delta(index, letter, ids_of(letter), usage=dataclasses.replace(whole.usage, generated_tokens=place + 1))
        for place, letter in enumerate(text)
    )
    return (*deltas, Ended(index, whole))


def echoed(call: GenerateCall) -> tuple[Event, ...]:
    """What is answered without a script: the prompt again, `n` times, up to `max_tokens`, with what was asked for."""
    said = prompt_text(call.prompt)
    asked = len(said) if call.params.max_tokens is None else call.params.max_tokens
    text, reason = said[:asked], "stop" if asked >= len(said) else "length"
    logprobs = _logprobs(ids_of(text), call.params.logprobs)
    first_seed = 7 if call.params.seed is None else call.params.seed
    events: list[Event] = []
    for index in range(call.params.n):
        for letter in text:
            events.append(Delta(index, letter, ids_of(letter), _logprobs(ids_of(letter), call.params.logprobs)))
        seed = first_seed + index
        whole = result(text, prompt_tokens=len(ids_of(said)), finish_reason=reason, logprobs=logprobs, seed=seed)
        events.append(Ended(index, whole))
    return tuple(events)


def _logprobs(token_ids: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprob, ...]:
    if num_top is None:
        return ()
    tops = (tuple(((token + place) % 256, -0.5 - place) for place in range(num_top)) for token in token_ids)
    return tuple(TokenLogprob(token, -0.5, top) for token, top in zip(token_ids, tops, strict=True))


class ScriptedService(AbstractService):
    """Answers by `scripts[request_id]`, else by `script`, else with the prompt itself.

    `asked` lists (method, call, caller) in the order of arrival; `running`, `cancelled` and `ended` hold request ids:
    at work, closed before their script's end, and the rest. `keys` maps bearer tokens to callers; None lets all in.
    `failure` is raised by the methods that answer once. `chat` is its chat model, of no template. `statuses` are those
    of models, the last one the present; a change ends when `changing` is set.
    """

    def __init__(self, script: tuple[Step, ...] | None = None, keys: Mapping[str, Caller] | None = None):
        self.script, self.keys = script, keys
        self.scripts: dict[str, tuple[Step, ...]] = {}
        self.failure: BaseException | None = None
        self.cards: tuple[ModelCard, ...] = (CARD,)
        self.chat = ChatModel()
        self.statuses: tuple[ModelStatus, ...] = (STATUS,)
        self.changing = asyncio.Event()
        self.changing.set()
        self.asked: list[tuple[str, Any, Caller]] = []
        self.running: list[str] = []
        self.cancelled: list[str] = []
        self.refusals: list[tuple[str, ServiceError]] = []
        self.ended: list[str] = []
        self.num_pulled = 0

    async def until(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Comes back once `holds()`; raises `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.002)

    def generate(self, call: GenerateCall, caller: Caller) -> AsyncIterator[Event]:
        self.asked.append(("generate", call, caller))
        return self._played(call.info.request_id, self._script(call.info.request_id, echoed(call)))

    def fork(self, call: ForkCall, caller: Caller) -> AsyncIterator[Event]:
        self.asked.append(("fork", call, caller))
        steps: list[Event] = []
        for index, branch in enumerate(call.branches):
            added = prompt_text(branch.continuation) if branch.continuation else ""
            alone = GenerateCall(Prompt(text=prompt_text(call.prompt) + added), branch.params)
            steps.extend(dataclasses.replace(event, index=index) for event in echoed(alone))
        return self._played(call.info.request_id, self._script(call.info.request_id, tuple(steps)))

    async def score(self, call, caller):
        self._single("score", call, caller)
        num_prompt = len(ids_of(prompt_text(call.prompt)))
        texts = [ids_of(prompt_text(one)) for one in call.continuations] or [ids_of(prompt_text(call.prompt))]
        lost = 0 if call.continuations else 1
        return [Scored(ids, _logprobs(ids[lost:], call.num_top), num_prompt, 1) for ids in texts]

    async def embed(self, call, caller):
        self._single("embed", call, caller)
        return [self._embedded(len(ids_of(prompt_text(one))), call.normalize) for one in call.inputs]

    async def tokenize(self, call, caller):
        self._single("tokenize", call, caller)
        return ids_of(prompt_text(call.prompt))

    async def detokenize(self, call, caller):
        self._single("detokenize", call, caller)
        return text_of(call.token_ids)

    def models(self):
        return self.cards

    def chat_model(self):
        return self.chat

    def pinned(self):
        return self

    async def load_model(self, call, caller):
        self._single("load_model", call, caller)
        await self.changing.wait()
        return self.statuses[-1]

    async def unload_model(self, call, caller):
        self._single("unload_model", call, caller)
        await self.changing.wait()
        return self.statuses[-1]

    def model_status(self, caller):
        self._single("model_status", None, caller)
        return self.statuses[-1]

    async def model_changes(self, caller):
        self._single("model_changes", None, caller)
        for status in self.statuses:
            yield status

    def authenticate(self, token, peer):
        if self.keys is None:
            return Caller(peer=peer)
        if token not in self.keys:
            raise ServiceError(Kind.UNAUTHENTICATED, "The key is not known here; send one that is.")
        return dataclasses.replace(self.keys[token], peer=peer)

    def refused(self, method, peer, error):
        self.refusals.append((method, error))

    def token_text(self, token_id):
        return text_of((token_id,)), bytes((token_id,))

    def _single(self, method: str, call: Any, caller: Caller) -> None:
        self.asked.append((method, call, caller))
        if self.failure is not None:
            raise self.failure

    def _script(self, request_id: str, default: tuple[Step, ...]) -> tuple[Step, ...]:
        return self.scripts.get(request_id, default if self.script is None else self.script)

    async def _played(self, request_id: str, steps: tuple[Step, ...]) -> AsyncIterator[Event]:
        self.running.append(request_id)
        outcome = self.cancelled
        try:
            for step in steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    outcome = self.ended
                    raise step
                else:
                    self.num_pulled += 1
                    yield step
            outcome = self.ended
        finally:
            self.running.remove(request_id)
            outcome.append(request_id)

    @staticmethod
    def _embedded(num_tokens: int, normalize: bool) -> Embedded:
        whole = (float(num_tokens), 1.0, 2.0, 2.0)
        length = math.hypot(*whole) if normalize else 1.0
        return Embedded(tuple(value / length for value in whole), num_tokens)
