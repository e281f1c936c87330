# SPDX-License-Identifier: Apache-2.0
"""Methods as gRPC takes them: bytes in and out, every error a status, every call counted while it runs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from serving.core.errors import Kind, ServiceError
from serving.grpc.statuses import foreseen, status_of

Context = grpc.aio.ServicerContext
# Of one message: (request, context) -> the response, or nothing where `context.write` sends bytes. Of many: (context).
Method = Callable[..., Awaitable[Message | None]]


class CallsInFlight:
    """How many calls run; `idle` is set while none does. `refused(method, peer, error)` hears of those that ended by an
    error."""

    def __init__(self, refused: Callable[[str, str, ServiceError], None] = lambda method, peer, error: None):
        self.refused = refused
        self._num_calls = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self, context: Context) -> None:
        """Counts the call until its status is sent."""
        self._num_calls += 1
        self.idle.clear()
        context.add_done_callback(self._leave)

    def _leave(self, _: Context) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self.idle.set()


def parsed(message_class: type[Message], raw: bytes) -> Message:
    """The message. Raises `ServiceError` for bytes that are none, as gRPC itself would end the call with UNKNOWN."""
    try:
        return message_class.FromString(raw)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.full_name
        message = f"The {len(raw)} bytes are no {name}, whose texts are UTF-8; send what its proto describes."
        raise ServiceError(Kind.INVALID, message) from error


def service_handler(
    service: ServiceDescriptor, methods: Mapping[str, Method], calls: CallsInFlight
) -> grpc.GenericRpcHandler:
    """What a server needs to answer the calls of `service`, whose methods `methods` holds by name."""
    handlers = {method.name: _handler(method, methods[method.name], calls) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def unserved_handler(service: str, reasons: Mapping[str, str]) -> grpc.GenericRpcHandler:
    """A handler of methods that are known and not served: it says why, by the method's name."""

    def unserved(reason):
        async def refuse(_, context):
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)

        return grpc.unary_unary_rpc_method_handler(refuse)

    return grpc.method_handlers_generic_handler(service, {name: unserved(why) for name, why in reasons.items()})


def _handler(method: MethodDescriptor, answer: Method, calls: CallsInFlight) -> grpc.RpcMethodHandler:
    message_class = GetMessageClass(method.input_type)

    async def of_many(_, context):
        async with _told(context, method.name, calls):
            await answer(context)

    async def streamed(raw, context):
        async with _told(context, method.name, calls):
            await answer(parsed(message_class, raw), context)

    async def single(raw, context):
        async with _told(context, method.name, calls):
            return (await answer(parsed(message_class, raw), context)).SerializeToString()

    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(of_many)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(streamed)
    return grpc.unary_unary_rpc_method_handler(single)


@asynccontextmanager
async def _told(context: Context, method: str, calls: CallsInFlight) -> AsyncIterator[None]:
    calls.enter(context)
    try:
        with foreseen(method):
            yield
    except ServiceError as error:
        calls.refused(method, context.peer(), error)
        await context.abort_with_status(status_of(error))
