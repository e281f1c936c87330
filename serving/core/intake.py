# SPDX-License-Identifier: Apache-2.0
"""From a call's prompts to what the engine takes: templates, tokens, rules. Runs beside the event loop, in threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from metrale_jax.core.errors import ContextLengthError, MetraleError, RequestError
from metrale_jax.sampling.params import SamplingParams
from serving.core.calls import BranchCall, Caller, Prompt
from serving.core.errors import Kind, ServiceError

if TYPE_CHECKING:
    from metrale_jax.answers import Prepared
    from metrale_jax.llm import LLM

# No tokenizer makes fewer tokens of a text than one for so many characters, on the whole: a guess before it is run.
CHARACTERS_PER_TOKEN = 4
# Texts in one call to embed; texts to score and branches of a prompt are one request of the engine each.
MAX_INPUTS, MAX_TEXTS = 2048, 256


def counted(name: str, texts: Sequence, most: int = MAX_TEXTS) -> int:
    """How many there are. Raises `ServiceError` for none, or too many."""
    if not 1 <= len(texts) <= most:
        raise ServiceError(Kind.INVALID, f"{len(texts)} {name} are not between 1 and {most}; give so many.", field=name)
    return len(texts)


def guessed_tokens(prompt: Prompt) -> int:
    """How many tokens a prompt has, before anybody has looked."""
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    texts = [prompt.text or "", *(str(message.get("content", "")) for message in prompt.messages or ())]
    return 1 + sum(map(len, texts)) // CHARACTERS_PER_TOKEN


def shown_prompt(prompt: Prompt) -> str:
    """The prompt as a record keeps it."""
    return prompt.text if prompt.text is not None else str(prompt.messages or prompt.token_ids)


def prompt_tokens(llm: "LLM", prompt: Prompt, field: str = "prompt") -> Sequence[int]:
    """Token ids of a prompt. Raises `ServiceError` for one that has none."""
    given = [form for form in (prompt.text, prompt.token_ids, prompt.messages) if form is not None]
    if len(given) != 1:
        raise ServiceError(
            Kind.INVALID, f"{field} has {len(given)} forms; give a text, token ids or a chat.", field=field
        )
    with _fault_of(field):
        if prompt.messages is not None:
            if "chat_template" in prompt.template:
                # It is a program, which may take as long as it likes.
                raise RequestError("chat_template is the server's own; leave it out, or send a text that you made.")
            return llm.chat_tokens(prompt.messages, **prompt.template)
        if prompt.text is not None:
            return llm.tokenize(prompt.text, prompt.add_special_tokens)
    return prompt.token_ids


def embedding_tokens(llm: "LLM", prompts: Sequence[Prompt]) -> tuple[tuple[int, ...], ...]:
    """Token ids of texts to embed. Raises `ServiceError` for one that has none, or that does not fit."""
    found = []
    for index, prompt in enumerate(prompts):
        place = f"inputs[{index}]"
        tokens = prompt_tokens(llm, prompt, place)
        with _fault_of(place):
            found.append(llm.checked_tokens(tokens))
    return tuple(found)


def text_of(llm: "LLM", token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids. Raises `ServiceError` for ids that are none."""
    with _fault_of("token_ids"):
        return llm.detokenize(token_ids, skip_special_tokens) if token_ids else ""


def prepared(llm: "LLM", tokens: Sequence[int], params: SamplingParams, caller: Caller, place: str) -> "Prepared":
    """What the engine takes of one request; its prefixes are the caller's own. `place` leads to its params."""
    with _told(place):
        return llm.prepare(tokens, replace(params, cache_salt=salted(caller, params.cache_salt)))


def prepared_fork(
    llm: "LLM", prompt: Prompt, branches: Sequence[BranchCall], caller: Caller
) -> "tuple[tuple[Prepared, ...], int]":
    """What the engine takes of the branches, and how many tokens they share."""
    shared = tuple(prompt_tokens(llm, prompt))
    made = []
    for index, branch in enumerate(branches):
        place = f"branches[{index}]"
        added = branch.continuation
        own = () if added is None else prompt_tokens(llm, added, f"{place}.continuation")
        made.append(prepared(llm, (*shared, *own), branch.params, caller, place))
    return tuple(made), len(shared)


def prepared_scores(
    llm: "LLM", prompt: Prompt, continuations: Sequence[Prompt], params: SamplingParams, caller: Caller
) -> "tuple[tuple[Prepared, ...], tuple[int, ...]]":
    """What the engine takes of texts to be scored, and the number of tokens of each before those that count."""
    shared = tuple(prompt_tokens(llm, prompt))
    if not continuations:
        return (prepared(llm, shared, params, caller, ""),), (0,)
    made = []
    for index, continuation in enumerate(continuations):
        place = f"continuations[{index}]"
        own = tuple(prompt_tokens(llm, continuation, place))
        if not own:
            raise ServiceError(Kind.INVALID, f"{place} has no tokens; give at least one.", field=place)
        made.append(prepared(llm, (*shared, *own), params, caller, place))
    return tuple(made), (len(shared),) * len(made)


def salted(caller: Caller, own: str) -> str:
    """The salt under which prefixes are cached: nobody else's can be the same."""
    return f"{len(caller.salt)}:{caller.salt}{own}" if caller.salt or own else ""


@contextmanager
def _fault_of(field: str) -> Iterator[None]:
    """Out of it a `MetraleError` comes as the fault of this field."""
    try:
        yield
    except MetraleError as error:
        raise ServiceError(_kind_of(error), str(error), field=field) from error


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Out of it a `MetraleError` comes as a `ServiceError` that names the field in the call."""
    try:
        yield
    except ServiceError:
        raise
    except MetraleError as error:
        raise as_service_error(error, place) from error


def as_service_error(error: MetraleError, place: str) -> ServiceError:
    """The call's fault that a library's error tells of. `place` leads to the prompt or params: "" or "branches[1]"."""
    if error.field == "branches":
        return ServiceError(Kind.INVALID, str(error), field="branches")
    path = [place] if place else []
    if error.field != "prompt":
        path.append(f"params.{error.field}" if error.field else "params")
    return ServiceError(_kind_of(error), str(error), field=".".join(path) or "prompt")


def _kind_of(error: MetraleError) -> Kind:
    return Kind.TOO_LONG if isinstance(error, ContextLengthError) else Kind.INVALID
