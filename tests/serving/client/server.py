# SPDX-License-Identifier: Apache-2.0
"""A server of the protocol without a model: it does to calls what a test wrote down, through gRPC's own libraries."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from serving.grpc.stubs import generate_pb2 as pb
from serving.grpc.stubs.generate_pb2_grpc import GenerateServiceServicer, add_GenerateServiceServicer_to_server

WAIT_S = 10


def fault(code: grpc.StatusCode, message: str = "no", *, retry_after_s: float | None = None, field: str = "", **info):
    """A status with the details that the contract names."""
    details = []
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_after_s is not None:
        nanos = round(retry_after_s % 1 * 1e9)
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=int(retry_after_s), nanos=nanos)))
    if info:
        details.append(error_details_pb2.ErrorInfo(**info))
    packed = [AnyMessage() for _ in details]
    for one, detail in zip(packed, details, strict=True):
        one.Pack(detail)
    return status_pb2.Status(code=code.value[0], message=message, details=packed)


def text_of(prompt: pb.Prompt) -> str:
    """What a prompt says, whatever its form."""
    said = {
        "text": prompt.text,
        "token_ids": " ".join(map(str, prompt.token_ids.ids)),
        "chat": " ".join(message.content for message in prompt.chat.messages),
    }
    return said[prompt.WhichOneof("input")]


def answer_of(request: pb.GenerateRequest, index: int = 0) -> pb.Answer:
    """The prompt's words again, each a token."""
    words = text_of(request.prompt).split()
    limit = request.params.max_tokens if request.params.HasField("max_tokens") else len(words)
    words = words[:limit]
    return pb.Answer(
        index=index,
        text="".join(f"{word} " for word in words),
        token_ids=range(len(words)),
        logprobs=[logprob(place) for place in range(len(words))] if request.params.HasField("logprobs") else [],
        finish_reason=pb.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=5, cached_tokens=2, generated_tokens=len(words)),
        timings=pb.Timings(queued_s=0.25, first_token_s=0.5, finished_s=1.5, decode_tokens_per_s=8, num_preemptions=1),
        seed=request.params.seed + index,
    )


def logprob(token_id: int) -> pb.TokenLogprob:
    """A token's, with one likelier."""
    top = [pb.TopLogprob(token_id=token_id + 1, logprob=-0.25, token=b"\xff")]
    return pb.TokenLogprob(token_id=token_id, logprob=-0.5, token=b"x", top=top)


def deltas_of(answer: pb.Answer) -> list[pb.Delta]:
    """An answer word by word."""
    return [
        pb.Delta(index=answer.index, text=f"{word} ", token_ids=[place], logprobs=answer.logprobs[place : place + 1])
        for place, word in enumerate(answer.text.split())
    ]


class Servicer(GenerateServiceServicer):
    """Answers with the prompt itself, word by word.

    `faults` are given in the place of answers, one a call, after `num_before` pieces. A prompt that says "wait" stops
    after its first piece until its caller is gone or `go` is set; `gone` counts ends of such calls. `calls` holds what
    came: method, request, metadata, seconds left.
    """

    def __init__(self):
        self.faults: list[status_pb2.Status] = []
        self.num_before = 0
        self.calls: list[tuple[str, object, dict, float | None]] = []
        self.gone = threading.Semaphore(0)
        self.go = threading.Event()

    def methods(self) -> list[str]:
        """The methods that were called, in order."""
        return [method for method, *_ in self.calls]

    def _arrived(self, method, request, context, fails: bool = True):
        self.calls.append((method, request, dict(context.invocation_metadata()), context.time_remaining()))
        waits = hasattr(request, "prompt") and "wait" in text_of(request.prompt)
        if waits and not context.add_callback(self.gone.release):
            self.gone.release()
        if fails and self.faults:
            context.abort_with_status(rpc_status.to_status(self.faults.pop(0)))

    def _wait(self, context):
        """Until the caller is gone, or all may go on."""
        while context.is_active() and not self.go.is_set():
            self.go.wait(0.005)

    def _stream(self, request, answers, context) -> Iterator[pb.GenerateResponse]:
        request_id = request.request_id or "made-up"
        pieces = [(request_id, delta) for answer in answers for delta in deltas_of(answer)]
        if self.faults:
            for request_id, delta in pieces[: self.num_before]:
                yield pb.GenerateResponse(request_id=request_id, delta=delta)
            context.abort_with_status(rpc_status.to_status(self.faults.pop(0)))
        for place, (request_id, delta) in enumerate(pieces):
            yield pb.GenerateResponse(request_id=request_id, delta=delta)
            if place == 0 and "wait" in text_of(request.prompt):
                self._wait(context)
        if "unfinished" not in text_of(request.prompt):
            for answer in answers:
                yield pb.GenerateResponse(request_id=request_id, done=answer)

    def Generate(self, request, context):
        self._arrived("Generate", request, context, fails=False)
        yield from self._stream(request, [answer_of(request, index) for index in range(request.params.n or 1)], context)

    def GenerateUnary(self, request, context):
        self._arrived("GenerateUnary", request, context)
        if "wait" in text_of(request.prompt):
            self._wait(context)
        answers = [answer_of(request, index) for index in range(request.params.n or 1)]
        return pb.GenerateUnaryResponse(request_id=request.request_id, model="scripted", answers=answers)

    def Fork(self, request, context):
        self._arrived("Fork", request, context, fails=False)
        answers = []
        for index, branch in enumerate(request.branches):
            said = f"{text_of(request.prompt)} {branch.continuation.text}"
            one = pb.GenerateRequest(prompt=pb.Prompt(text=said), params=branch.params)
            answers.append(answer_of(one, index))
        yield from self._stream(request, answers, context)

    def GenerateStream(self, requests, context):
        self.calls.append(("GenerateStream", None, dict(context.invocation_metadata()), context.time_remaining()))
        held: dict[str, pb.GenerateRequest] = {}
        for message in requests:
            self.calls.append((message.WhichOneof("action"), message, {}, None))
            if message.WhichOneof("action") == "cancel":
                request_id = message.cancel.request_id
                if held.pop(request_id, None):
                    failed = pb.Failure(code=1, message="cancelled")
                    yield pb.GenerateStreamResponse(request_id=request_id, failed=failed)
                continue
            request = message.generate
            if self.faults:
                told = self.faults.pop(0)
                if told.code == grpc.StatusCode.INTERNAL.value[0]:
                    context.abort_with_status(rpc_status.to_status(told))
                failed = pb.Failure(code=told.code, message=told.message, field="prompt", retry_after_s=0.25)
                yield pb.GenerateStreamResponse(request_id=request.request_id, failed=failed)
            elif "wait" in request.prompt.text:
                held[request.request_id] = request
                yield pb.GenerateStreamResponse(request_id=request.request_id, delta=deltas_of(answer_of(request))[0])
            else:
                yield from self._of_session(request, 0)
        for request in held.values():
            yield from self._of_session(request, 1)

    def _of_session(self, request, first: int):
        answer = answer_of(request)
        for delta in deltas_of(answer)[first:]:
            yield pb.GenerateStreamResponse(request_id=request.request_id, delta=delta)
        yield pb.GenerateStreamResponse(request_id=request.request_id, done=answer)

    def Score(self, request, context):
        self._arrived("Score", request, context)
        one = pb.Score(token_ids=[1, 2], logprobs=[logprob(1), logprob(2)], total_logprob=-1.0)
        return pb.ScoreResponse(scores=[one] * max(1, len(request.continuations)))

    def Embed(self, request, context):
        self._arrived("Embed", request, context)
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=[0.5, 1.0], num_tokens=3) for _ in request.inputs])

    def Tokenize(self, request, context):
        self._arrived("Tokenize", request, context)
        words = text_of(request.prompt).split()
        return pb.TokenizeResponse(token_ids=range(len(words)), tokens=[word.encode() for word in words])

    def Detokenize(self, request, context):
        self._arrived("Detokenize", request, context)
        return pb.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    def ListModels(self, request, context):
        self._arrived("ListModels", request, context)
        return pb.ListModelsResponse(models=[pb.Model(id="scripted", vocab_size=256, eos_token_ids=[0, 2])])


@contextmanager
def serving(servicer: Servicer, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """The target of a server that runs meanwhile."""
    server = grpc.server(ThreadPoolExecutor(40))
    add_GenerateServiceServicer_to_server(servicer, server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    checks.set("metrale.v1.GenerateService", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        servicer.go.set()
        server.stop(None).wait(WAIT_S)


class FakeTime:
    """Seconds that pass in waits only, and the waits."""

    def __init__(self):
        self.now_s, self.waits = 0.0, []

    def sleep(self, seconds: float) -> None:
        """Waits by turning the clock."""
        self.waits.append(seconds)
        self.now_s += seconds

    async def pause(self, seconds: float) -> None:
        """As `sleep`."""
        self.sleep(seconds)
