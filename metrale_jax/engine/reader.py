# SPDX-License-Identifier: Apache-2.0
"""Reading a step's tokens: each is applied as if it had come alone, stop rules included."""

from collections.abc import Callable, Iterator

import jax

from metrale_jax.core.errors import MetraleError, RequestError
from metrale_jax.engine.request import Request, TokenLogprob
from metrale_jax.steps.outcome import StepOutput


def read_tokens(
    out: StepOutput, rows: tuple[tuple[int, Request], ...], clock: Callable[[], float]
) -> Iterator[tuple[Request, str, MetraleError | None]]:
    """For each row's request: why it ended ("" if it goes on) and the error that ended it, after taking its tokens.

    One transfer fetches the step. A request that ended meanwhile (cancelled, or by an earlier token) takes nothing.
    """
    host = jax.device_get(out)
    now = clock()
    for row, request in rows:
        request.in_flight = max(0, request.in_flight - 1)
        if request.finished:
            continue
        if not host.finite[row]:
            message = (
                f"logits of request {request.request_id} are not finite after {request.num_tokens} tokens; check the "
                "weights, or load them in float32."
            )
            yield request, "error", RequestError(message)
            continue
        reason = ""
        for column in range(int(host.num_tokens[row])):
            reason = _take(request, host, row, column, now)
            if reason:
                break
        yield request, reason, None


def _take(request: Request, host: StepOutput, row: int, column: int, now: float) -> str:
    token = int(host.tokens[row, column])
    request.output.append(token)
    request.first_token_at = request.first_token_at or now
    count = request.params.logprobs
    if count is not None:
        top = zip(host.top_ids[row, column, :count], host.top_logprobs[row, column, :count], strict=True)
        pairs = tuple((int(token_id), float(value)) for token_id, value in top)
        request.logprobs.append(TokenLogprob(token, float(host.logprobs[row, column]), pairs))
    if token in request.stop_ids:
        return "stop"
    if request.watch([token]):
        return "stop"
    return "length" if len(request.output) >= request.max_tokens else ""
