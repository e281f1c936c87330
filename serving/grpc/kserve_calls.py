# SPDX-License-Identifier: Apache-2.0
"""ModelInfer requests as calls: a text with its parameters, or several. Raises `ServiceError` (INVALID)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from serving.core.calls import CallInfo, GenerateCall, Prompt
from serving.grpc.conversion_params import checked_params, invalid
from serving.grpc.kserve_tensors import Tensor, input_tensors
from serving.grpc.stubs import open_inference_pb2

VERSION = "1"
# Fields of `SamplingParams` that can be inputs or request parameters of their own, with the datatype to announce.
PARAMETERS = MappingProxyType(
    {
        "n": "INT32",
        "temperature": "FP32",
        "top_n_sigma": "FP32",
        "top_k": "INT32",
        "top_p": "FP32",
        "min_p": "FP32",
        "typical_p": "FP32",
        "repetition_penalty": "FP32",
        "presence_penalty": "FP32",
        "frequency_penalty": "FP32",
        "seed": "UINT64",
        "max_tokens": "INT32",
        "min_tokens": "INT32",
        "ignore_eos": "BOOL",
        "include_stop_str_in_output": "BOOL",
        "skip_special_tokens": "BOOL",
        "echo": "BOOL",
        "json_schema": "BYTES",
        "regex": "BYTES",
        "grammar": "BYTES",
        "beam_width": "INT32",
        "length_penalty": "FP32",
        "early_stopping": "BOOL",
        "priority": "INT32",
        "deadline_s": "FP64",
        "cache_salt": "BYTES",
    }
)
# Those of which an input holds several values for one text.
LISTS = MappingProxyType(
    {
        "stop": "BYTES",
        "stop_token_ids": "INT32",
        "allowed_token_ids": "INT32",
        "banned_token_ids": "INT32",
        "bad_words": "BYTES",
        "choice": "BYTES",
    }
)
INPUTS = MappingProxyType(
    {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", **PARAMETERS, **LISTS}
)
OUTPUTS = MappingProxyType({"text_output": "BYTES", "token_ids": "INT32", "finish_reason": "BYTES"})
# Beside those by name, only in the JSON of `sampling_parameters`.
_IN_JSON = frozenset({*PARAMETERS, *LISTS, "logit_bias"})
# What clients send along that needs nothing done: the last response of a stream is always marked.
_WITHOUT_EFFECT = frozenset({"triton_enable_empty_final_response", "binary_data_output", "timeout"})


@dataclass(frozen=True)
class Inference:
    """A call for each text, the shape of the texts, whether answers come piece by piece, the outputs to give and in
    which form."""

    calls: tuple[GenerateCall, ...]
    shape: tuple[int, ...]
    stream: bool
    outputs: tuple[str, ...]
    raw: bool


def inference_of(request: open_inference_pb2.ModelInferRequest, info: CallInfo) -> Inference:
    """What the request asks for; `info` is for the whole of it, `id` 7 of three texts becomes 7-0, 7-1 and 7-2."""
    tensors = input_tensors(request)
    texts = tensors.pop("text_input", None)
    if texts is None or texts.datatype != "BYTES" or not texts.values:
        raise invalid("text_input", "is missing or no BYTES; give at least one text")
    if not all(texts.values):
        raise invalid("text_input", "is an empty text; give at least one character")
    num_texts = len(texts.values)
    stream = _first(tensors.pop("stream", None), "stream", False)
    asked = [_fields_of(tensors, request.parameters, place, num_texts) for place in range(num_texts)]
    info = replace(info, timeout_s=_timeout_s(request.parameters, info.timeout_s))
    calls = tuple(
        GenerateCall(Prompt(text=text), checked_params(fields, ""), _numbered(info, place, num_texts))
        for place, (text, fields) in enumerate(zip(texts.values, asked, strict=True))
    )
    inference = Inference(calls, texts.shape, stream, _outputs(request), bool(request.raw_input_contents))
    _check_answers(inference)
    return inference


def _check_answers(inference: Inference) -> None:
    num_answers = sum(call.params.n for call in inference.calls)
    if inference.stream and num_answers > 1:
        raise invalid("stream", f"is set for {num_answers} answers, pieces of one are sent; send a request for each")
    if "token_ids" in inference.outputs and num_answers > 1:
        raise invalid("token_ids", f"are asked for of {num_answers} answers, no tensor; send a request for each")
    if len({call.params.n for call in inference.calls}) > 1:
        raise invalid("n", "differs between the texts, no tensor; send a request for each")


def _fields_of(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Any], place: int, num_texts: int
) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name == "sampling_parameters":
            given = _json_fields(_of_text(tensor, name, place, num_texts))
        elif name == "exclude_input_in_output":
            given = {"echo": not _of_text(tensor, name, place, num_texts)}
        elif name in LISTS:
            given = {name: tensor.values}
        elif name in PARAMETERS:
            given = {name: _of_text(tensor, name, place, num_texts)}
        else:
            raise invalid(name, f"is no input of the model; use some of {', '.join(INPUTS)}")
        _add(asked, given)
    for name, parameter in parameters.items():
        if name in PARAMETERS:
            _add(asked, {name: _parameter(name, parameter)})
        elif name not in _WITHOUT_EFFECT:
            raise invalid(f"parameters.{name}", f"is no parameter of the model; use some of {', '.join(PARAMETERS)}")
    return asked


def _add(asked: dict[str, Any], given: dict[str, Any]) -> None:
    for name in given:
        if name in asked:
            raise invalid(name, "is given twice; give it as an input, as a parameter or in sampling_parameters")
    asked.update(given)


def _json_fields(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("sampling_parameters", f"is not JSON ({error}); give an object") from error
    if not isinstance(given, dict):
        raise invalid("sampling_parameters", "is no JSON object; give one")
    for name in given:
        if name not in _IN_JSON:
            fault = f"has no known field; use some of {', '.join(sorted(_IN_JSON))}"
            raise invalid(f"sampling_parameters.{name}", fault)
    return given


def _of_text(tensor: Tensor, name: str, place: int, num_texts: int) -> Any:
    if len(tensor.values) not in (1, num_texts):
        raise invalid(name, f"has {len(tensor.values)} values for {num_texts} texts; give one, or one for each")
    return tensor.values[place if len(tensor.values) > 1 else 0]


def _first(tensor: Tensor | None, name: str, default: bool) -> bool:
    if tensor is None:
        return default
    if len(tensor.values) != 1 or tensor.datatype != "BOOL":
        raise invalid(name, "is not one BOOL; give one")
    return tensor.values[0]


def _parameter(name: str, parameter: open_inference_pb2.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise invalid(f"parameters.{name}", "has no value; give one")
    value = getattr(parameter, kind)
    # Clients of this protocol know no float parameters, and write them as texts.
    if kind == "string_param" and PARAMETERS[name].startswith("FP"):
        try:
            return float(value)
        except ValueError as error:
            raise invalid(f"parameters.{name}", f"is {value!r}, which is no number; give one") from error
    return value


def _timeout_s(parameters: Mapping[str, Any], timeout_s: float | None) -> float | None:
    # Triton counts microseconds.
    if "timeout" not in parameters:
        return timeout_s
    asked_s = parameters["timeout"].int64_param / 1e6
    if asked_s <= 0:
        raise invalid("parameters.timeout", "is not above 0; give microseconds, or leave it out")
    return asked_s if timeout_s is None else min(asked_s, timeout_s)


def _outputs(request: open_inference_pb2.ModelInferRequest) -> tuple[str, ...]:
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise invalid(f"outputs.{output.name}", f"is no output of the model; use some of {', '.join(OUTPUTS)}")
        if "classification" in output.parameters or "shared_memory_region" in output.parameters:
            raise invalid(f"outputs.{output.name}", "is asked for as classes or in shared memory; ask for it plainly")
    return tuple(output.name for output in request.outputs) or ("text_output",)


def _numbered(info: CallInfo, place: int, num_texts: int) -> CallInfo:
    return info if num_texts == 1 else replace(info, request_id=f"{info.request_id}-{place}")
