# SPDX-License-Identifier: Apache-2.0
"""`KserveMethods`: the Open Inference Protocol over any `AbstractService`, for clients of KServe and Triton."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing
from types import MappingProxyType

from serving.core.api import AbstractCalls, AbstractService
from serving.core.calls import Caller, GenerateCall
from serving.core.errors import Kind, ServiceError
from serving.core.events import Ended, Event, ModelCard
from serving.grpc.callers import announce, call_info, caller_of
from serving.grpc.generation import incoming, refuse_where_draining
from serving.grpc.kserve_answers import FINAL, failed_response, piece_response, whole_response
from serving.grpc.kserve_calls import INPUTS, OUTPUTS, VERSION, Inference, inference_of
from serving.grpc.kserve_statistics import Statistics
from serving.grpc.methods import Context, Method, parsed
from serving.grpc.request_stream import RequestStream
from serving.grpc.stubs import open_inference_pb2 as messages

SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
PLATFORM = "metrale_jax"
_REPOSITORY = "The server has the models that it was started with; start it with others."
_MEMORY = "Shared memory is not served; send tensors in the request."
_SETTINGS = "The server's settings are given when it starts; start it with others."
# Methods that Triton has beside those of the proto.
UNSERVED = MappingProxyType(
    {
        "RepositoryModelLoad": _REPOSITORY,
        "RepositoryModelUnload": _REPOSITORY,
        "SystemSharedMemoryStatus": _MEMORY,
        "SystemSharedMemoryRegister": _MEMORY,
        "SystemSharedMemoryUnregister": _MEMORY,
        "CudaSharedMemoryStatus": _MEMORY,
        "CudaSharedMemoryRegister": _MEMORY,
        "CudaSharedMemoryUnregister": _MEMORY,
        "TraceSetting": _SETTINGS,
        "LogSettings": _SETTINGS,
    }
)


class KserveMethods:
    """The methods of the service. `is_serving` says what the health service says; `draining` is set when streams shall
    take nothing more; `version` is the server's. Whether the server lives and is ready, anybody may ask."""

    def __init__(
        self,
        service: AbstractService,
        max_requests_per_stream: int,
        draining: asyncio.Event,
        is_serving: Callable[[], bool],
        version: str,
    ):
        self._service, self._max_requests, self._draining = service, max_requests_per_stream, draining
        self._is_serving, self._version, self._statistics = is_serving, version, Statistics()

    def by_name(self) -> Mapping[str, Method]:
        """The methods, by their names in the proto."""
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "ModelStreamInfer": self._model_stream_infer,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
        }

    async def _server_live(self, _: messages.ServerLiveRequest, context: Context) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def _server_ready(self, _: messages.ServerReadyRequest, context: Context) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=self._is_serving())

    async def _model_ready(self, request: messages.ModelReadyRequest, context: Context) -> messages.ModelReadyResponse:
        caller_of(self._service, context)
        known = request.version in ("", VERSION) and request.name in self._cards()
        return messages.ModelReadyResponse(ready=known and self._is_serving())

    async def _server_metadata(
        self, _: messages.ServerMetadataRequest, context: Context
    ) -> messages.ServerMetadataResponse:
        extensions = ("model_configuration", "parameters", "statistics")
        return messages.ServerMetadataResponse(name="metrale-jax", version=self._version, extensions=extensions)

    async def _model_metadata(
        self, request: messages.ModelMetadataRequest, context: Context
    ) -> messages.ModelMetadataResponse:
        caller_of(self._service, context)
        card = self._card(request.name, request.version)
        tensor = messages.ModelMetadataResponse.TensorMetadata
        return messages.ModelMetadataResponse(
            name=card.id,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[tensor(name=name, datatype=datatype, shape=[-1]) for name, datatype in INPUTS.items()],
            outputs=[tensor(name=name, datatype=datatype, shape=[-1]) for name, datatype in OUTPUTS.items()],
        )

    async def _model_config(
        self, request: messages.ModelConfigRequest, context: Context
    ) -> messages.ModelConfigResponse:
        caller_of(self._service, context)
        card = self._card(request.name, request.version)
        config = messages.ModelConfig(
            name=card.id,
            platform=PLATFORM,
            backend=PLATFORM,
            input=[
                messages.ModelInput(name=name, data_type=_data_type(datatype), dims=[-1], optional=name != "text_input")
                for name, datatype in INPUTS.items()
            ],
            output=[
                messages.ModelOutput(name=name, data_type=_data_type(datatype), dims=[-1])
                for name, datatype in OUTPUTS.items()
            ],
            model_transaction_policy=messages.ModelTransactionPolicy(decoupled=True),
        )
        return messages.ModelConfigResponse(config=config)

    async def _model_statistics(
        self, request: messages.ModelStatisticsRequest, context: Context
    ) -> messages.ModelStatisticsResponse:
        caller_of(self._service, context)
        cards = [self._card(request.name, request.version)] if request.name else self._service.models()
        return messages.ModelStatisticsResponse(model_stats=[self._statistics.message(card.id) for card in cards])

    async def _repository_index(
        self, request: messages.RepositoryIndexRequest, context: Context
    ) -> messages.RepositoryIndexResponse:
        caller_of(self._service, context)
        index = messages.RepositoryIndexResponse.ModelIndex
        models = [index(name=name, version=VERSION, state="READY") for name in self._cards()]
        return messages.RepositoryIndexResponse(models=models)

    async def _model_infer(self, request: messages.ModelInferRequest, context: Context) -> messages.ModelInferResponse:
        caller = caller_of(self._service, context)
        inference = self._inference(request, context, "ModelInfer")
        if inference.stream:
            message = "stream is set, which this method cannot do; use ModelStreamInfer, or leave it out."
            raise ServiceError(Kind.INVALID, message, field="stream")
        await announce(context, inference.calls[0].info.request_id)
        with self._timed(inference):
            return whole_response(request, inference, await self._answers(inference, caller))

    async def _model_stream_infer(self, context: Context) -> None:
        caller = caller_of(self._service, context)
        await context.send_initial_metadata(())
        stream = RequestStream(context.write, "ModelStreamInfer", self._max_requests)
        # Clients give several requests one id, or none.
        places = itertools.count()
        try:
            async with aclosing(incoming(context, self._draining)) as raws:
                async for raw in raws:
                    request = parsed(messages.ModelInferRequest, raw)
                    try:
                        place = str(next(places))
                        stream.check_room(place)
                        inference = self._inference(request, context, "ModelStreamInfer")
                    except ServiceError as error:
                        self._service.refused("ModelStreamInfer", context.peer(), error)
                        await stream.send(failed_response(request.id, error))
                    else:
                        self._start(stream, place, request, inference, caller)
            await stream.finish()
        finally:
            await stream.close()
        refuse_where_draining(self._draining)

    def _start(
        self,
        stream: RequestStream,
        place: str,
        request: messages.ModelInferRequest,
        inference: Inference,
        caller: Caller,
    ) -> None:
        def of_piece(event: Event) -> bytes:
            piece = piece_response(request, inference, event)
            return messages.ModelStreamInferResponse(infer_response=piece).SerializeToString()

        def of_whole(response: messages.ModelInferResponse) -> bytes:
            response.parameters[FINAL].bool_param = True
            return messages.ModelStreamInferResponse(infer_response=response).SerializeToString()

        def failure(error: ServiceError) -> bytes:
            return failed_response(request.id, error)

        events = self._pieces(inference, caller) if inference.stream else self._whole(request, inference, caller)
        stream.start(place, events, of_piece if inference.stream else of_whole, failure, 1)

    async def _pieces(self, inference: Inference, caller: Caller) -> AsyncIterator[Event]:
        with self._timed(inference):
            async with aclosing(self._service.generate(inference.calls[0], caller)) as events:
                async for event in events:
                    yield event

    async def _whole(
        self, request: messages.ModelInferRequest, inference: Inference, caller: Caller
    ) -> AsyncIterator[messages.ModelInferResponse]:
        with self._timed(inference):
            answers = await self._answers(inference, caller)
        yield whole_response(request, inference, answers)

    async def _answers(self, inference: Inference, caller: Caller) -> list[list[Ended]]:
        model = self._service.pinned()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_answer(model, call, caller)) for call in inference.calls]
        except ExceptionGroup as failed:
            # The others were cancelled for the first.
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    def _inference(self, request: messages.ModelInferRequest, context: Context, method: str) -> Inference:
        if request.model_version not in ("", VERSION):
            raise _no_version(request.model_version)
        # An answer names its model; and what is counted, is counted for models that there are.
        request.model_name = request.model_name or next(iter(self._cards()), "")
        return inference_of(request, call_info(context, method, request.model_name, request.id, "id"))

    def _timed(self, inference: Inference) -> AbstractContextManager[None]:
        model = inference.calls[0].info.model
        return self._statistics.timed(model if model in self._cards() else "", len(inference.calls))

    def _cards(self) -> dict[str, ModelCard]:
        return {card.id: card for card in self._service.models()}

    def _card(self, name: str, version: str) -> ModelCard:
        cards = self._cards()
        if name not in cards:
            known = ", ".join(cards) or "none, as one loads"
            raise ServiceError(Kind.NOT_FOUND, f"The model {name!r} is not served here; ask for {known}.", field="name")
        if version not in ("", VERSION):
            raise _no_version(version)
        return cards[name]


async def _answer(model: AbstractCalls, call: GenerateCall, caller: Caller) -> list[Ended]:
    async with aclosing(model.generate(call, caller)) as events:
        return [event async for event in events if isinstance(event, Ended)]


def _no_version(version: str) -> ServiceError:
    message = f"Version {version!r} of the model is not served here; ask for version {VERSION}, or for none."
    return ServiceError(Kind.NOT_FOUND, message, field="version")


def _data_type(datatype: str) -> int:
    return messages.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
