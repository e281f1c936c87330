# SPDX-License-Identifier: Apache-2.0
"""`GenerateMethods`: what metrale.v1.GenerateService does, over any `AbstractService`."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import grpc

from serving.core.api import AbstractService
from serving.core.calls import Caller, CallInfo, GenerateCall
from serving.core.errors import Kind, ServiceError
from serving.core.events import Ended, Event
from serving.grpc.callers import announce, call_info, caller_of
from serving.grpc.conversion_calls import (
    detokenize_call,
    embed_call,
    fork_call,
    generate_call,
    score_call,
    tokenize_call,
)
from serving.grpc.conversion_events import (
    TokenText,
    embed_message,
    event_bytes,
    failure_bytes,
    model_message,
    score_message,
    whole_message,
)
from serving.grpc.methods import Context, Method, parsed
from serving.grpc.request_stream import RequestStream
from serving.grpc.stubs import generate_pb2

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"]


class GenerateMethods:
    """The methods of the service. `draining` is set when streams shall take nothing more."""

    def __init__(self, service: AbstractService, max_requests_per_stream: int, draining: asyncio.Event):
        self._service, self._max_requests, self._draining = service, max_requests_per_stream, draining

    def by_name(self) -> Mapping[str, Method]:
        """The methods, by their names in the proto."""
        return {
            "Generate": self._generate,
            "GenerateUnary": self._generate_unary,
            "GenerateStream": self._generate_stream,
            "Fork": self._fork,
            "Score": self._score,
            "Embed": self._embed,
            "Tokenize": self._tokenize,
            "Detokenize": self._detokenize,
            "ListModels": self._list_models,
        }

    async def _generate(self, request: generate_pb2.GenerateRequest, context: Context) -> None:
        caller, info = self._asked(context, "Generate", request.model, request.request_id)
        call = generate_call(request, info)
        await announce(context, info.request_id)
        model = self._service.pinned()
        events = model.generate(call, caller)
        await self._write_events(events, model.token_text, info, context, request.only_whole)

    async def _fork(self, request: generate_pb2.ForkRequest, context: Context) -> None:
        caller, info = self._asked(context, "Fork", request.model, request.request_id)
        call = fork_call(request, info)
        await announce(context, info.request_id)
        model = self._service.pinned()
        await self._write_events(model.fork(call, caller), model.token_text, info, context, only_whole=False)

    async def _generate_unary(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> generate_pb2.GenerateUnaryResponse:
        caller, info = self._asked(context, "GenerateUnary", request.model, request.request_id)
        call = generate_call(request, info)
        await announce(context, info.request_id)
        model = self._service.pinned()
        async with aclosing(model.generate(call, caller)) as events:
            ended = [event async for event in events if isinstance(event, Ended)]
        name = info.model or "".join(card.id for card in model.models()[:1])
        return whole_message(info.request_id, name, ended, model.token_text)

    async def _generate_stream(self, context: Context) -> None:
        caller = caller_of(self._service, context)
        await context.send_initial_metadata(())
        stream = RequestStream(context.write, "GenerateStream", self._max_requests)
        try:
            async with aclosing(incoming(context, self._draining)) as raws:
                async for raw in raws:
                    request = parsed(generate_pb2.GenerateStreamRequest, raw)
                    if request.WhichOneof("action") == "cancel":
                        await stream.take_back(request.cancel.request_id)
                    else:
                        await self._start(request, stream, caller, context)
            await stream.finish()
        finally:
            await stream.close()
        refuse_where_draining(self._draining)

    async def _start(
        self, request: generate_pb2.GenerateStreamRequest, stream: RequestStream, caller: Caller, context: Context
    ) -> None:
        asked = request.generate
        try:
            if request.WhichOneof("action") is None:
                raise ServiceError(Kind.INVALID, "The action is missing; generate or cancel.", field="action")
            info = call_info(context, "GenerateStream", asked.model, asked.request_id)
            stream.check_room(info.request_id)
            call = generate_call(asked, info)
        except ServiceError as error:
            self._service.refused("GenerateStream", context.peer(), error)
            await stream.send(failure_bytes(asked.request_id, error))
        else:
            self._run(call, stream, caller)

    def _run(self, call: GenerateCall, stream: RequestStream, caller: Caller) -> None:
        request_id, model = call.info.request_id, self._service.pinned()

        def message_of(event: Event) -> bytes:
            return event_bytes(generate_pb2.GenerateStreamResponse, request_id, event, model.token_text)

        def failure(error: ServiceError) -> bytes:
            return failure_bytes(request_id, error)

        stream.start(request_id, model.generate(call, caller), message_of, failure, call.params.n)

    async def _score(self, request: generate_pb2.ScoreRequest, context: Context) -> generate_pb2.ScoreResponse:
        caller, info = self._asked(context, "Score", request.model, request.request_id)
        call = score_call(request, info)
        await announce(context, info.request_id)
        model = self._service.pinned()
        scores = await model.score(call, caller)
        return score_message(scores, info.request_id, model.token_text)

    async def _embed(self, request: generate_pb2.EmbedRequest, context: Context) -> generate_pb2.EmbedResponse:
        caller, info = self._asked(context, "Embed", request.model, request.request_id)
        call = embed_call(request, info)
        await announce(context, info.request_id)
        return embed_message(await self._service.embed(call, caller), info.request_id)

    async def _tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeResponse:
        caller, info = self._asked(context, "Tokenize", request.model, "")
        model = self._service.pinned()
        ids = await model.tokenize(tokenize_call(request, info), caller)
        tokens = [model.token_text(token)[1] for token in ids]
        return generate_pb2.TokenizeResponse(token_ids=ids, tokens=tokens)

    async def _detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeResponse:
        caller, info = self._asked(context, "Detokenize", request.model, "")
        text = await self._service.detokenize(detokenize_call(request, info), caller)
        return generate_pb2.DetokenizeResponse(text=text)

    async def _list_models(
        self, _: generate_pb2.ListModelsRequest, context: Context
    ) -> generate_pb2.ListModelsResponse:
        caller_of(self._service, context)
        return generate_pb2.ListModelsResponse(models=[model_message(card) for card in self._service.models()])

    def _asked(self, context: Context, method: str, model: str, request_id: str) -> tuple[Caller, CallInfo]:
        return caller_of(self._service, context), call_info(context, method, model, request_id)

    async def _write_events(
        self, events: AsyncIterator[Event], token_text: TokenText, info: CallInfo, context: Context, only_whole: bool
    ) -> None:
        write = context.write
        async with aclosing(events):
            async for event in events:
                if not only_whole or isinstance(event, Ended):
                    await write(event_bytes(generate_pb2.GenerateResponse, info.request_id, event, token_text))


async def incoming(context: Context, draining: asyncio.Event) -> AsyncIterator[bytes]:
    """What the client sends, as it is, until it closes its half or the server drains."""
    drained = asyncio.create_task(draining.wait())
    read = None
    try:
        while True:
            read = asyncio.create_task(context.read())
            await asyncio.wait({read, drained}, return_when=asyncio.FIRST_COMPLETED)
            if drained.done():
                return
            message = read.result()
            if message is grpc.aio.EOF:
                return
            yield message
    finally:
        drained.cancel()
        if read is not None:
            read.cancel()


def refuse_where_draining(draining: asyncio.Event) -> None:
    """Raises `ServiceError` for a stream that ends because the server drains."""
    if draining.is_set():
        raise ServiceError(Kind.UNAVAILABLE, "The server shuts down; open a stream to another, or later.")
