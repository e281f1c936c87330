# SPDX-License-Identifier: Apache-2.0
"""The service's events and results as messages. Deltas are made many times a second: they cost little."""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

from metrale_jax.results import GenerationResult, TokenLogprob, Usage
from serving.core.errors import ServiceError
from serving.core.events import Delta, Embedded, Ended, Event, ModelCard, Scored
from serving.grpc.statuses import code_number, short_message
from serving.grpc.stubs import generate_pb2

FINISH_REASONS = MappingProxyType(
    {
        "stop": generate_pb2.FINISH_REASON_STOP,
        "length": generate_pb2.FINISH_REASON_LENGTH,
        "abort": generate_pb2.FINISH_REASON_ABORT,
        "error": generate_pb2.FINISH_REASON_ERROR,
    }
)
# token id -> (text, bytes), as `AbstractService.token_text`.
TokenText = Callable[[int], tuple[str, bytes]]
Response = generate_pb2.GenerateResponse | generate_pb2.GenerateStreamResponse


def event_bytes(response_class: type[Response], request_id: str, event: Event, token_text: TokenText) -> bytes:
    """The event as a serialised response."""
    if isinstance(event, Ended):
        done = answer_message(event.index, event.result, token_text)
        return response_class(request_id=request_id, done=done).SerializeToString()
    return response_class(request_id=request_id, delta=_delta(event, token_text)).SerializeToString()


def answer_message(index: int, result: GenerationResult, token_text: TokenText) -> generate_pb2.Answer:
    """A whole answer."""
    metrics = result.metrics
    return generate_pb2.Answer(
        index=index,
        text=result.text,
        token_ids=result.token_ids,
        logprobs=_logprobs(result.logprobs, token_text),
        finish_reason=FINISH_REASONS[result.finish_reason],
        usage=_usage(result.usage),
        timings=generate_pb2.Timings(
            queued_s=metrics.queued_s,
            first_token_s=metrics.first_token_s,
            finished_s=metrics.finished_s,
            decode_tokens_per_s=metrics.decode_tokens_per_s(len(result.token_ids)),
            num_preemptions=metrics.num_preemptions,
        ),
        seed=result.seed,
        prompt_token_ids=result.prompt_token_ids if result.prompt_logprobs else (),
        prompt_logprobs=_logprobs(result.prompt_logprobs, token_text),
        score=result.score,
    )


def whole_message(
    request_id: str, model: str, ended: Sequence[Ended], token_text: TokenText
) -> generate_pb2.GenerateUnaryResponse:
    """All answers of a request, by their index."""
    ordered = sorted(ended, key=lambda event: event.index)
    first = ordered[0].result.usage
    generated = sum(event.result.usage.generated_tokens for event in ordered)
    return generate_pb2.GenerateUnaryResponse(
        request_id=request_id,
        model=model,
        answers=[answer_message(event.index, event.result, token_text) for event in ordered],
        usage=_usage(Usage(first.prompt_tokens, first.cached_tokens, generated)),
    )


def failure_bytes(request_id: str, error: ServiceError) -> bytes:
    """The end of one request of a stream, as a serialised GenerateStreamResponse."""
    failed = generate_pb2.Failure(
        code=code_number(error.kind),
        message=short_message(error),
        field=error.field,
        retry_after_s=error.retry_after_s,
    )
    return generate_pb2.GenerateStreamResponse(request_id=request_id, failed=failed).SerializeToString()


def score_message(scores: Iterable[Scored], request_id: str, token_text: TokenText) -> generate_pb2.ScoreResponse:
    """The scores."""
    return generate_pb2.ScoreResponse(
        scores=[
            generate_pb2.Score(
                token_ids=one.token_ids,
                logprobs=_logprobs(one.logprobs, token_text),
                total_logprob=one.total_logprob,
                usage=_usage(Usage(one.prompt_tokens, one.cached_tokens, 0)),
            )
            for one in scores
        ],
        request_id=request_id,
    )


def embed_message(vectors: Iterable[Embedded], request_id: str) -> generate_pb2.EmbedResponse:
    """The vectors."""
    embeddings = [generate_pb2.Embedding(values=one.vector, num_tokens=one.num_tokens) for one in vectors]
    return generate_pb2.EmbedResponse(embeddings=embeddings, request_id=request_id)


def model_message(card: ModelCard) -> generate_pb2.Model:
    """What a client may know of a model."""
    return generate_pb2.Model(
        id=card.id,
        architecture=card.architecture,
        dtype=card.dtype,
        vocab_size=card.vocab_size,
        max_context_tokens=card.max_context_tokens,
        max_sequences=card.max_sequences,
        embedding_width=card.embedding_width,
        has_chat_template=card.has_chat_template,
        eos_token_ids=card.eos_token_ids,
        fingerprint=card.fingerprint,
        created=card.created,
    )


def _delta(delta: Delta, token_text: TokenText) -> generate_pb2.Delta:
    if not delta.logprobs:
        return generate_pb2.Delta(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    logprobs = _logprobs(delta.logprobs, token_text)
    return generate_pb2.Delta(index=delta.index, text=delta.text, token_ids=delta.token_ids, logprobs=logprobs)


def _logprobs(logprobs: Iterable[TokenLogprob], token_text: TokenText) -> list[generate_pb2.TokenLogprob]:
    return [
        generate_pb2.TokenLogprob(
            token_id=one.token_id,
            logprob=one.logprob,
            token=token_text(one.token_id)[1],
            top=[
                generate_pb2.TopLogprob(token_id=token, logprob=logprob, token=token_text(token)[1])
                for token, logprob in one.top
            ],
        )
        for one in logprobs
    ]


def _usage(usage: Usage) -> generate_pb2.Usage:
    return generate_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
    )
