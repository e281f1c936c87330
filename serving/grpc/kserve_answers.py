# SPDX-License-Identifier: Apache-2.0
"""Answers as ModelInferResponses: whole ones of all texts, or pieces of one."""

from collections.abc import Sequence

from metrale_jax.results import GenerationResult
from serving.core.events import Ended, Event
from serving.grpc.kserve_calls import OUTPUTS, VERSION, Inference
from serving.grpc.kserve_tensors import Tensor, put_tensor
from serving.grpc.statuses import short_message
from serving.grpc.stubs import open_inference_pb2

FINAL = "triton_final_response"


def whole_response(
    request: open_inference_pb2.ModelInferRequest, inference: Inference, answers: Sequence[Sequence[Ended]]
) -> open_inference_pb2.ModelInferResponse:
    """All answers in the shape of the texts; with several answers to each, those are a last axis."""
    results = [ended.result for of_text in answers for ended in sorted(of_text, key=lambda one: one.index)]
    num_answers = len(answers[0])
    shape = inference.shape if num_answers == 1 else (*inference.shape, num_answers)
    response = _started(request)
    for name in inference.outputs:
        if name == "token_ids":
            ids = results[0].token_ids
            put_tensor(response, name, Tensor(OUTPUTS[name], (len(ids),), ids), inference.raw)
        else:
            put_tensor(response, name, Tensor(OUTPUTS[name], shape, _texts(name, results)), inference.raw)
    return response


def piece_response(
    request: open_inference_pb2.ModelInferRequest, inference: Inference, event: Event
) -> open_inference_pb2.ModelInferResponse:
    """What is new of the one answer. The last has no more of it, but says so, and why the answer ended."""
    last = isinstance(event, Ended)
    pieces = {
        "text_output": ("" if last else event.text,),
        "token_ids": () if last else event.token_ids,
        "finish_reason": (event.result.finish_reason if last else "",),
    }
    response = _started(request)
    response.parameters[FINAL].bool_param = last
    for name in inference.outputs:
        shape = (len(pieces[name]),) if name == "token_ids" else inference.shape
        put_tensor(response, name, Tensor(OUTPUTS[name], shape, pieces[name]), inference.raw)
    return response


def failed_response(request_id: str, error: Exception) -> bytes:
    """What tells of a failed request on a stream that goes on."""
    return open_inference_pb2.ModelStreamInferResponse(
        error_message=short_message(error) or "failed",
        infer_response=open_inference_pb2.ModelInferResponse(id=request_id),
    ).SerializeToString()


def _started(request: open_inference_pb2.ModelInferRequest) -> open_inference_pb2.ModelInferResponse:
    return open_inference_pb2.ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)


def _texts(name: str, results: Sequence[GenerationResult]) -> tuple[str, ...]:
    if name == "finish_reason":
        return tuple(result.finish_reason for result in results)
    return tuple(result.text for result in results)
