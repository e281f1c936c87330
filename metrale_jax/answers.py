# SPDX-License-Identifier: Apache-2.0
"""`Answer`: one prompt's requests in the engine and the text that comes of them."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from metrale_jax.core.errors import MetraleError, RequestError, shown
from metrale_jax.engine.admission import NO_SEQUENCES, Admitted, Watch
from metrale_jax.engine.loop import Engine
from metrale_jax.engine.request import Request, RequestMetrics
from metrale_jax.prepared import Prepared, fresh_seed
from metrale_jax.results import GenerationResult, NewPiece, StreamPiece, Usage
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.text.answer import AnswerText
from metrale_jax.text.tokenizer import Tokenizer


def checked_prompts(prompts) -> list:
    """A list of prompts from one text, one list of ids, or a list of either. Raises `RequestError` for other things."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, NO_SEQUENCES) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts={shown(prompts)} is no text, list of token ids or list of these; give one.", "prompt"
        )
    listed = list(prompts)
    if listed and not any(hasattr(item, "__len__") for item in listed):
        return [listed]
    for item in listed:
        if not hasattr(item, "__len__"):
            raise RequestError(
                f"prompt {shown(item)} is neither a text nor a list of token ids; give one of these.", "prompt"
            )
    return listed


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Params for each of `count` prompts: the same for all, or a list of as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"params={shown(params)} is no SamplingParams or list of them; give SamplingParams(...).")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts; give one, or one for each.")
    return list(params)


class Answer:
    """The `params.n` answers to one prompt, their text cut at stop strings."""

    def __init__(self, params: SamplingParams, seed: int):
        self.params, self.seed = params, seed
        self._tokenizer: Tokenizer | None = None
        self._texts: list[_Text | None] = []
        self._requests: list[Request] = []
        self._taken: list[int] = []
        self._told: list[bool] = []
        self._error: MetraleError | None = None

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        """The answer to come of it, once it is queued."""
        answer, params, tokenizer = cls(prepared.params, prepared.seed), prepared.params, prepared.tokenizer
        answer._tokenizer = tokenizer
        answer._texts = [
            _Text(AnswerText(tokenizer, params, prepared.stops)) if tokenizer else None for _ in range(params.n)
        ]
        return answer

    @classmethod
    def refused(cls, params: SamplingParams, error: MetraleError) -> Self:
        """An answer that ended before it began."""
        answer = cls(params, fresh_seed(params))
        answer._error = error
        return answer

    def submit(self, engine: Engine, admitted: Admitted) -> None:
        """Queues the requests of what it was prepared for."""
        self.adopt(engine.enqueue(admitted, self.watches))

    @property
    def watches(self) -> list[Watch | None]:
        """What sees the tokens of each answer: without stop strings nothing in the text ends one, and it can wait until
        somebody asks for it."""
        return [text.watch if text and self.params.stop else None for text in self._texts] or [None] * self.params.n

    def adopt(self, requests: list[Request]) -> None:
        """Takes the requests that were queued for it."""
        self._requests = requests
        self._taken, self._told = [0] * self.params.n, [False] * self.params.n

    @property
    def only(self) -> Request:
        """The one request. Raises `RequestError` for an answer that was refused, or of several."""
        if len(self._requests) != 1:
            raise self._error or RequestError(f"{len(self._requests)} answers are not one; ask for n=1.")
        return self._requests[0]

    def cancel(self, engine: Engine) -> None:
        """Gives back whatever still runs."""
        for request in self._requests:
            engine.cancel(request)

    @property
    def began(self) -> bool:
        """Whether its prompt was taken up."""
        return any([request.started_at for request in self._requests])

    @property
    def finished(self) -> bool:
        """Whether all of it is there."""
        return self._error is not None or all(request.finished for request in self._requests)

    @property
    def max_tokens(self) -> int:
        """Most tokens that can come."""
        return sum(request.max_tokens for request in self._requests)

    @property
    def num_generated(self) -> int:
        """Tokens so far."""
        return sum(len(request.output) for request in self._requests)

    @property
    def num_taken(self) -> int:
        """Tokens of the first answer that were taken so far."""
        return self._taken[0]

    def take(self) -> tuple[str, tuple[int, ...]]:
        """Text and token ids of the first answer that are new since the last call."""
        request = self._requests[0]
        tokens, text, _ = self._new(0, request.output, request.finished)
        return text, tokens

    def new_pieces(self) -> list[NewPiece]:
        """What is new of each of the n answers since the last call, of those that have anything new; the end of one is
        told once. A beam search has nothing new before it ends, and an answer that was refused never has."""
        if self.params.beam_width:
            return self._found_pieces()
        pieces = []
        for index, request in enumerate(self._requests):
            if len(request.output) > self._taken[index] or (request.finished and not self._told[index]):
                finished = self._told[index] = request.finished
                tokens, text, logprobs = self._new(index, request.output, finished)
                pieces.append(NewPiece(index, text, tokens, logprobs, finished, _usage(request, request.output)))
        return pieces

    def _new(self, index: int, output: Sequence[int], finished: bool) -> tuple[tuple[int, ...], str, tuple]:
        start, text = self._taken[index], self._texts[index]
        self._taken[index] = len(output)
        new = ""
        if text is not None:
            text.follow(output, finished)
            new = (self._prompt_text() if self.params.echo and text.begins() else "") + text.take()
        logprobs = () if self.params.beam_width else tuple(self._requests[index].logprobs[start:])
        return tuple(output[start:]), new, logprobs

    def _found_pieces(self) -> list[NewPiece]:
        if self._told[:1] != [False] or not self._requests[0].finished:
            return []
        self._told[0] = True
        found = [(index, item.tokens) for index, item in enumerate(self._requests[0].hypotheses)]
        news = [(index, *self._new(index, tokens, True)) for index, tokens in found or [(0, self._requests[0].output)]]
        request = self._requests[0]
        return [
            NewPiece(index, text, tokens, logprobs, True, _usage(request, tokens))
            for index, tokens, text, logprobs in news
        ]

    def result(self) -> GenerationResult:
        """The finished answer. Call once all is `finished`."""
        if self._error is not None:
            empty = RequestMetrics(0.0, 0.0, 0.0, 0)
            return GenerationResult("", (), (), "error", Usage(0, 0, 0), empty, self.seed, self._error)
        if self.params.beam_width:
            results = self._found(self._requests[0])
        else:
            results = [self._result(i, request, request.output) for i, request in enumerate(self._requests)]
        first, *others = results
        return replace(first, others=tuple(others)) if others else first

    def _found(self, request: Request) -> list[GenerationResult]:
        if not request.hypotheses:
            return [self._result(index, request, request.output) for index in range(self.params.n)]
        return [
            replace(
                self._result(index, request, item.tokens),
                score=item.score,
                finish_reason="stop" if item.tokens[-1] in request.stop_ids else "length",
            )
            for index, item in enumerate(request.hypotheses)
        ]

    def _result(self, index: int, request: Request, tokens: Sequence[int]) -> GenerationResult:
        text = self._texts[index]
        if text:
            text.follow(tokens, finished=True)
        return GenerationResult(
            text=(self._prompt_text() if self.params.echo else "") + text.whole if text else "",
            token_ids=tuple(tokens),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            usage=_usage(request, tokens),
            metrics=request.metrics(),
            seed=request.seed,
            error=request.error,
            prompt_token_ids=request.prompt,
            # One of the answers ran the prompt for all.
            prompt_logprobs=tuple(max((one.prompt_logprobs for one in self._requests), key=len)),
        )

    def _prompt_text(self) -> str:
        return self._tokenizer.decode(self._requests[0].prompt, self.params.skip_special_tokens)


def _usage(request: Request, tokens: Sequence[int]) -> Usage:
    return Usage(len(request.prompt), request.cached_tokens, len(tokens))


def only_request(answer: Any) -> Request:
    """The request of an answer to one. Raises `RequestError` for what is none."""
    if not isinstance(answer, Answer):
        raise RequestError(f"{shown(answer)} is no answer; give what submit or load_answer returned.")
    return answer.only


class AnswerStream(Iterator[StreamPiece]):
    """The pieces of an answer. Closed, it cancels what is left; forgotten unclosed, it leaves that to the next step."""

    def __init__(self, pieces: Generator[StreamPiece], cancel: Callable[[], None], forget: Callable[[], None]):
        self._pieces, self._cancel, self._forget = pieces, cancel, forget

    def __next__(self) -> StreamPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer with what it has."""
        self._pieces.close()
        self._cancel()

    def __del__(self):
        # Whoever collects garbage may be in the midst of a step, so nothing is cancelled here.
        self._forget()


class _Text:
    """An answer's text, from tokens as they stand or, where nothing in it can end the answer, when asked for."""

    def __init__(self, answer: AnswerText):
        self._answer = answer
        self._num_pushed = 0
        self._begun = False

    def begins(self) -> bool:
        """Whether nobody has asked this before."""
        begins, self._begun = not self._begun, True
        return begins

    def watch(self, tokens: list[int]) -> bool:
        """Takes tokens that stand; whether they complete a stop string."""
        self._num_pushed += len(tokens)
        return self._answer.push(tokens)

    def follow(self, tokens: Sequence[int], finished: bool) -> None:
        """Takes those of the answer's `tokens` that it has not seen."""
        new = list(tokens[self._num_pushed :])
        if new:
            self.watch(new)
        if finished:
            self._answer.close()

    def take(self) -> str:
        """The text decided since the last call."""
        return self._answer.take()

    @property
    def whole(self) -> str:
        """All text decided so far."""
        return self._answer.whole
