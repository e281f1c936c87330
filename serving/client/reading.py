# SPDX-License-Identifier: Apache-2.0
"""From messages of the protocol to `results`."""

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from serving.client.errors import ServerError
from serving.client.results import (
    Embedding,
    Generation,
    Model,
    Piece,
    Score,
    Timings,
    TokenLogprob,
    Tokens,
    TopLogprob,
    Usage,
)
from serving.grpc.stubs import generate_pb2 as pb

FINISH_REASONS = MappingProxyType(
    {
        pb.FINISH_REASON_UNSPECIFIED: "",
        pb.FINISH_REASON_STOP: "stop",
        pb.FINISH_REASON_LENGTH: "length",
        pb.FINISH_REASON_ABORT: "abort",
        pb.FINISH_REASON_ERROR: "error",
    }
)
# grpc.health.v1.HealthCheckResponse.ServingStatus
HEALTH = MappingProxyType({0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"})
MODEL_FIELDS = tuple(field.name for field in pb.Model.DESCRIPTOR.fields if field.name != "eos_token_ids")


class AnswerReader:
    """Takes the responses of one streaming call, or of one request of a session, of `num_answers` answers."""

    def __init__(self, num_answers: int):
        self._num_answers = num_answers
        self._ended: dict[int, Generation] = {}
        self.request_id = ""
        self.delivered = False

    def take(self, response: pb.GenerateResponse | pb.GenerateStreamResponse) -> Piece:
        """The piece that a delta or an answer's end is."""
        self.delivered = True
        self.request_id = response.request_id
        if response.WhichOneof("event") == "done":
            result = generation(response.done, response.request_id)
            self._ended[result.index] = result
            return Piece("", result.index, result=result)
        delta = response.delta
        return Piece(delta.text, delta.index, tuple(delta.token_ids), logprobs(delta.logprobs))

    @property
    def complete(self) -> bool:
        """Whether every answer has ended."""
        return len(self._ended) >= self._num_answers

    def results(self) -> tuple[Generation, ...]:
        """All answers by index. Raises `ServerError` where one is missing."""
        if not self.complete:
            raise ServerError(
                "INTERNAL", f"{len(self._ended)} of {self._num_answers} answers had ended with the stream; ask again."
            )
        return tuple(self._ended[index] for index in sorted(self._ended))


def generation(answer: pb.Answer, request_id: str = "", model: str = "") -> Generation:
    """One answer."""
    timings = answer.timings
    return Generation(
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=FINISH_REASONS.get(answer.finish_reason, ""),
        usage=usage(answer.usage),
        timings=Timings(
            timings.queued_s,
            timings.first_token_s,
            timings.finished_s,
            timings.decode_tokens_per_s,
            timings.num_preemptions,
        ),
        seed=answer.seed,
        logprobs=logprobs(answer.logprobs),
        prompt_token_ids=tuple(answer.prompt_token_ids),
        prompt_logprobs=logprobs(answer.prompt_logprobs),
        score=answer.score if answer.HasField("score") else None,
        index=answer.index,
        request_id=request_id,
        model=model,
    )


def joined(answers: Iterable[Generation]) -> Generation:
    """The first answer, with the others in it. Raises `ServerError` where there is none."""
    first, *others = answers or (None,)
    if first is None:
        raise ServerError("INTERNAL", "the response holds no answer; ask again.")
    return replace(first, others=tuple(others))


def whole(response: pb.GenerateUnaryResponse) -> Generation:
    """All answers of a unary call, joined."""
    return joined([generation(answer, response.request_id, response.model) for answer in response.answers])


def usage(counts: pb.Usage) -> Usage:
    """Token counts."""
    return Usage(counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens)


def logprobs(found: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities, token by token."""
    return tuple(
        TokenLogprob(
            one.token_id,
            one.logprob,
            one.token,
            tuple(TopLogprob(top.token_id, top.logprob, top.token) for top in one.top),
        )
        for one in found
    )


def scores(response: pb.ScoreResponse) -> tuple[Score, ...]:
    """One for each continuation, or the prompt's own."""
    return tuple(
        Score(tuple(one.token_ids), logprobs(one.logprobs), one.total_logprob, usage(one.usage))
        for one in response.scores
    )


def embeddings(response: pb.EmbedResponse) -> tuple[Embedding, ...]:
    """One for each input."""
    return tuple(Embedding(tuple(one.values), one.num_tokens) for one in response.embeddings)


def tokens(response: pb.TokenizeResponse) -> Tokens:
    """Ids and bytes."""
    return Tokens(tuple(response.token_ids), tuple(response.tokens))


def models(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    """The models there are."""
    return tuple(
        Model(eos_token_ids=tuple(one.eos_token_ids), **{name: getattr(one, name) for name in MODEL_FIELDS})
        for one in response.models
    )
