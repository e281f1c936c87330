# SPDX-License-Identifier: Apache-2.0
"""Reading a step's tokens: each is applied as if it had come alone, stop rules included."""

from collections.abc import Iterator, Sequence

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine.device import FAILURES
from metrale_jax.engine.request import Request, TokenLogprob
from metrale_jax.steps.outcome import StepOutput


def read_tokens(
    host: StepOutput, rows: Sequence[tuple[int, Request]], now: float
) -> Iterator[tuple[Request, str, MetraleError | None]]:
    """The requests that end here, why, and the error that ended them, after each row's tokens were taken.

    `host` holds numpy arrays. A request that ended meanwhile (cancelled, or by an earlier token) takes nothing.
    """
    tokens, counts = host.tokens.tolist(), host.num_tokens.tolist()
    finite, drawable = host.finite.tolist(), host.drawable.tolist()
    for row, request in rows:
        request.in_flight -= 1
        if request.finish_reason:
            continue
        if not finite[row]:
            yield request, "error", not_finite(request)
            continue
        for column in range(counts[row]):
            if not drawable[row][column]:
                yield request, "error", request.fault or _nothing_to_draw(request)
                break
            token = tokens[row][column]
            request.output.append(token)
            if not request.first_token_at:
                request.first_token_at = now
            if request.params.logprobs is not None:
                request.logprobs.append(_logprob(host, row, column, token, request.params.logprobs))
            ended = _ended(request, token)
            if ended is not None:
                yield request, *ended
                break


def _ended(request: Request, token: int) -> tuple[str, MetraleError | None] | None:
    try:
        if request.constraint is not None:
            request.constraint.accept(token)
        if token in request.stop_ids or (request.watch is not None and request.watch([token])):
            return "stop", None
    except FAILURES as error:
        return "error", own_error(request, error)
    return ("length", None) if len(request.output) >= request.max_tokens else None


def own_error(request: Request, error: Exception) -> MetraleError:
    """The error of a request whose own watch or constraint raised `error`: others are not to pay for it."""
    if isinstance(error, MetraleError):
        return error
    return RequestError(
        f"request {request.request_id}: its watch or constraint raised {error!r} after {request.num_tokens} tokens; "
        "mend that, or leave it out."
    )


def not_finite(request: Request) -> RequestError:
    """The error of a request whose logits are broken."""
    return RequestError(
        f"logits of request {request.request_id} are not finite after {request.num_tokens} tokens; check the weights, "
        "or load them in float32."
    )


# What can leave nothing to draw, the likeliest cause first.
MASKS = ("allowed_token_ids", "banned_token_ids", "bad_words", "json_schema", "regex", "choice", "grammar")


def _nothing_to_draw(request: Request) -> RequestError:
    way_out = "loosen its masks or bad words"
    if request.params.structured:
        way_out = "let allowed_token_ids, banned_token_ids and bad_words leave what its structure needs"
    field = next((name for name in MASKS if getattr(request.params, name)), "allowed_token_ids")
    return RequestError(
        f"request {request.request_id}: its rules allow no token after {request.num_tokens} tokens of prompt and "
        f"answer; {way_out}.",
        field,
    )


def _logprob(host: StepOutput, row: int, column: int, token: int, count: int) -> TokenLogprob:
    top = zip(host.top_ids[row, column, :count].tolist(), host.top_logprobs[row, column, :count].tolist(), strict=True)
    return TokenLogprob(token, float(host.logprobs[row, column]), tuple(top))


def read_prompt_scores(scores, chunk: Sequence[tuple[Request, int]]) -> None:
    """Takes the log-probabilities of a step's prompt tokens; `chunk` are its requests and their tokens, in order."""
    start = 0
    for request, size in chunk:
        count = request.params.prompt_logprobs
        # One that runs again, answer and all, has them already, or has left them to the one it was forked from.
        if count is not None and not request.output and not request.finish_reason:
            wanted = len(request.prompt) - 1 - len(request.prompt_logprobs)
            for row in range(start, start + min(size, wanted)):
                token = request.prompt[len(request.prompt_logprobs) + 1]
                ids, top = scores.top_ids[row, :count].tolist(), scores.top_logprobs[row, :count].tolist()
                pairs = tuple(zip(ids, top, strict=True))
                request.prompt_logprobs.append(TokenLogprob(token, float(scores.logprobs[row]), pairs))
        start += size
