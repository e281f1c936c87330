# SPDX-License-Identifier: Apache-2.0
"""/v1/completions: one or several prompts as texts or token ids, their answers whole or as they come."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from metrale_jax.results import GenerationResult
from serving.core.calls import GenerateCall, Prompt, ScoreCall
from serving.core.errors import Kind, ServiceError
from serving.core.events import Delta, Scored
from serving.http.answers import (
    Streaming,
    UsageSum,
    body_faults,
    finish_reason,
    gathered,
    label_of,
    merged,
    results_of,
    streaming_of,
    switch,
    without,
)
from serving.http.bodies import text_field
from serving.http.desk import Desk
from serving.http.endpoint import Asked, json_answer, post
from serving.http.operations import Operation
from serving.http.schemas import (
    BOOLEAN,
    GENERATION,
    TOKENS,
    USAGE,
    any_of,
    array,
    body_of,
    integer,
    nullable,
    object_of,
    text,
)
from serving.http.sse import DONE, EventStream, data
from serving.openai_answer import Label, LogprobColumns, text_logprobs, usage_of
from serving.openai_body import MAX_ANSWERS, MAX_PROMPTS, Completions, completions_request, names_of

OWN_FIELDS = ("add_special_tokens", "return_token_ids")
BODY = {
    **GENERATION,
    "prompt": any_of(text(), TOKENS, array(any_of(text(), TOKENS), 1, MAX_PROMPTS)),
    "max_tokens": integer(0),
    "best_of": integer(1, MAX_ANSWERS),
    "add_special_tokens": BOOLEAN,
}
CHOICE = object_of(
    {
        "index": integer(0),
        "text": text(),
        "logprobs": nullable({"type": "object"}),
        "finish_reason": text("stop", "length"),
    },
    "index",
    "text",
    "logprobs",
    "finish_reason",
)
ANSWER = {"id": text(), "object": text("text_completion"), "created": integer(0), "model": text()}
ABOUT = Operation(
    "Completions of one or several prompts.",
    body_of(BODY, "prompt"),
    object_of(ANSWER | {"choices": array(CHOICE), "usage": USAGE}, *ANSWER, "choices", "usage"),
    is_streamed=True,
)


def routes(desk: Desk) -> list[Route]:
    """The routes of this API."""
    return [post(desk, "/v1/completions", complete, about=ABOUT, names=names_of)]


@dataclass(frozen=True)
class _Work:
    """One request: what is asked, of the service and for the answer."""

    desk: Desk
    asked: Asked
    completions: Completions
    label: Label
    model: str
    streaming: Streaming
    with_ids: bool
    add_special_tokens: bool

    @property
    def prompts(self) -> list[Prompt]:
        """What the service is given."""
        return [
            Prompt(text=one, add_special_tokens=self.add_special_tokens)
            if isinstance(one, str)
            else Prompt(token_ids=tuple(one))
            for one in self.completions.prompts
        ]

    @property
    def calls(self) -> list[GenerateCall]:
        """One for each prompt."""
        prompts = self.prompts
        parts = [f"-{place}" for place in range(len(prompts))] if len(prompts) > 1 else [""]
        params = self.completions.params
        return [
            GenerateCall(prompt, params, self.asked.info(self.model, part))
            for prompt, part in zip(prompts, parts, strict=True)
        ]


async def complete(desk: Desk, asked: Asked) -> Response | ASGIApp:
    """The completion of all prompts."""
    body, model = asked.body, text_field(asked.body, "model")
    with body_faults():
        completions = completions_request(without(body, OWN_FIELDS), {})
        work = _Work(
            desk=desk,
            asked=asked,
            completions=completions,
            label=label_of(desk, f"cmpl-{asked.request_id}", model),
            model=model,
            streaming=streaming_of(body),
            with_ids=switch(body, "return_token_ids", False),
            add_special_tokens=switch(body, "add_special_tokens", True),
        )
    if work.streaming.wanted:
        _check_streamed(completions)
        events = _chunks_of_prompts(work) if completions.only_prompt else _chunks(work)
        return EventStream(events, desk.settings.ping_s)
    return await (_of_prompts(work) if completions.only_prompt else _whole(work))


async def _whole(work: _Work) -> Response:
    usage, choices = UsageSum(), []
    answers = await results_of(work.desk, work.calls, work.asked.caller)
    for place, results in enumerate(answers):
        for result in results:
            usage.add(place, result)
        if len(results) > work.completions.num_kept:
            results = sorted(results, key=_likelihood, reverse=True)[: work.completions.num_kept]
        choices += [_choice(work, len(choices) + index, result) for index, result in enumerate(results)]
    return json_answer(_object(work, choices) | {"usage": usage.object()})


async def _of_prompts(work: _Work) -> Response:
    """Prompts as they are, with their log-probabilities; nothing is drawn."""
    choices, usage = await _prompts_scored(work)
    return json_answer(_object(work, choices) | {"usage": usage})


async def _chunks_of_prompts(work: _Work) -> AsyncIterator[bytes]:
    """The same, each prompt in one piece."""
    choices, usage = await _prompts_scored(work)
    for choice in choices:
        yield _chunk(work, choice)
    if work.streaming.usage:
        yield data(_object(work, []) | {"usage": usage})
    yield DONE


async def _prompts_scored(work: _Work) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices, and the usage object."""
    completions, model = work.completions, work.desk.model
    asked = [
        ScoreCall(call.prompt, (), completions.logprobs or 0, call.params.cache_salt, call.info) for call in work.calls
    ]
    scores = [scored for [scored] in await gathered([model.score(one, work.asked.caller) for one in asked])]
    choices = [
        _prompt_choice(work, index, call.prompt, scored)
        for index, (call, scored) in enumerate(zip(asked, scores, strict=True))
    ]
    num_tokens, cached = sum(len(one.token_ids) for one in scores), sum(one.cached_tokens for one in scores)
    return choices, usage_of(num_tokens, 0, cached)


def _prompt_choice(work: _Work, index: int, prompt: Prompt, scored: Scored) -> dict[str, Any]:
    ids = scored.token_ids
    text = prompt.text
    if text is None:
        text = b"".join(map(work.label.token_bytes, ids)).decode("utf-8", "replace")
    wanted = work.completions.logprobs is not None
    choice = {
        "index": index,
        "text": text,
        "logprobs": text_logprobs(scored.logprobs, work.label, ids[0]) if wanted else None,
        "finish_reason": "length",
    }
    return choice | ({"token_ids": [], "prompt_token_ids": list(ids)} if work.with_ids else {})


def _choice(work: _Work, index: int, result: GenerationResult) -> dict[str, Any]:
    completions, logprobs = work.completions, None
    if completions.logprobs is not None:
        echoes = completions.params.echo
        first = result.prompt_token_ids[0] if echoes and result.prompt_token_ids else None
        listed = (*result.prompt_logprobs, *result.logprobs) if echoes else result.logprobs
        logprobs = text_logprobs(listed, work.label, first)
    choice = {"index": index, "text": result.text, "logprobs": logprobs, "finish_reason": finish_reason(result)}
    if work.with_ids:
        choice |= {"token_ids": list(result.token_ids), "prompt_token_ids": list(result.prompt_token_ids)}
    return choice


@dataclass
class _Streamed:
    """What a stream has to remember: tokens so far, and how far each choice's text has come."""

    usage: UsageSum = field(default_factory=UsageSum)
    columns: dict[int, LogprobColumns] = field(default_factory=dict)


async def _chunks(work: _Work) -> AsyncIterator[bytes]:
    completions, told = work.completions, _Streamed()
    async with aclosing(merged(work.desk, work.calls, work.asked.caller)) as events:
        async for place, event in events:
            index = place * completions.num_kept + event.index
            if isinstance(event, Delta):
                if event.text or event.logprobs or work.with_ids:
                    yield _chunk(work, _piece(work, told, index, event))
            else:
                told.usage.add(place, event.result)
                yield _chunk(work, _piece(work, told, index, Delta(event.index), finish_reason(event.result)))
    if work.streaming.usage:
        yield data(_object(work, []) | {"usage": told.usage.object()})
    yield DONE


def _piece(work: _Work, told: _Streamed, index: int, delta: Delta, reason: str | None = None) -> dict[str, Any]:
    logprobs = None
    if delta.logprobs:
        logprobs = told.columns.setdefault(index, LogprobColumns(work.label)).of(delta.logprobs)
    piece = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": reason}
    return piece | ({"token_ids": list(delta.token_ids)} if work.with_ids else {})


def _chunk(work: _Work, choice: dict[str, Any]) -> bytes:
    return data(_object(work, [choice]) | ({"usage": None} if work.streaming.usage else {}))


def _object(work: _Work, choices: list[dict[str, Any]]) -> dict[str, Any]:
    label = work.label
    return {
        "id": label.id,
        "object": "text_completion",
        "created": label.created,
        "model": label.model,
        "choices": choices,
    }


def _check_streamed(completions: Completions) -> None:
    params = completions.params
    for field_name, is_wrong, fault in (
        ("best_of", params.n > completions.num_kept, "answers cannot be chosen before they are whole; leave it out"),
        (
            "prompt_logprobs" if not params.echo else "echo",
            params.prompt_logprobs is not None and not completions.only_prompt,
            "log-probabilities of a prompt come with whole answers only; leave stream out, or logprobs",
        ),
    ):
        if is_wrong:
            raise ServiceError(Kind.INVALID, f"{field_name} does not go with stream: {fault}.", field=field_name)


def _likelihood(result: GenerationResult) -> float:
    return fmean(one.logprob for one in result.logprobs) if result.logprobs else float("-inf")
