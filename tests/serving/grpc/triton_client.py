# SPDX-License-Identifier: Apache-2.0
"""What Triton's own client makes of a server: `python triton_client.py PORT` prints it as one JSON object.

A process of its own, as its descriptors and ours cannot be in one.
"""

import json
import queue
import sys

import numpy as np
from tritonclient import grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2

OUTPUTS = ("text_output", "token_ids", "finish_reason")
DTYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}


def tensor(name, values, datatype="BYTES", shape=None):
    array = np.array(values, dtype=DTYPES[datatype]).reshape(shape or [len(values)])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def shown(result, names=OUTPUTS):
    found = {name: result.as_numpy(name) for name in names}
    texts = {
        name: array.astype("U").tolist() for name, array in found.items() if array is not None and array.dtype == object
    }
    numbers = {name: array.tolist() for name, array in found.items() if array is not None and array.dtype != object}
    return {**texts, **numbers, "id": result.get_response().id, "model": result.get_response().model_name}


def wanted(*names):
    return [triton.InferRequestedOutput(name) for name in names]


def refused(ask):
    try:
        ask()
    except triton.InferenceServerException as error:
        return [error.status(), error.message()]
    return None


def about(client):
    config = client.get_model_config("scripted").config
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": [
            client.is_model_ready(name, version)
            for name, version in [("scripted", ""), ("scripted", "1"), ("scripted", "2"), ("x", "")]
        ],
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata("scripted", as_json=True),
        "config": [
            config.name,
            config.model_transaction_policy.decoupled,
            [one.name for one in config.input if not one.optional],
        ],
        "types": {one.name: model_config_pb2.DataType.Name(one.data_type) for one in config.input},
        "index": client.get_model_repository_index(as_json=True),
        "unknown": refused(lambda: client.get_model_metadata("x")),
        "load": refused(lambda: client.load_model("scripted")),
        "memory": refused(lambda: client.get_system_shared_memory_status()),
        "trace": refused(lambda: client.get_trace_settings()),
    }


def answers(client):
    hello = tensor("text_input", ["hello world"])
    asynchronous = queue.Queue()
    client.async_infer("scripted", [hello], lambda result, error: asynchronous.put((result, error)))
    result, error = asynchronous.get(timeout=10)
    return {
        "plain": shown(client.infer("scripted", [hello], request_id="q1")),
        "all": shown(
            client.infer(
                "scripted",
                [hello, tensor("max_tokens", [5], "INT32"), tensor("temperature", [0.7], "FP32")],
                outputs=wanted("finish_reason", "token_ids", "text_output"),
            )
        ),
        "square": shown(client.infer("scripted", [tensor("text_input", ["abc"], shape=[1, 1])])),
        "batch": shown(
            client.infer(
                "scripted", [tensor("text_input", ["aa", "bb", "cc"]), tensor("max_tokens", [1, 2, 1], "INT32")]
            )
        ),
        "several": shown(
            client.infer("scripted", [tensor("text_input", ["a", "b"]), tensor("sampling_parameters", ['{"n": 2}'])])
        ),
        "json": shown(
            client.infer("scripted", [hello, tensor("sampling_parameters", ['{"max_tokens": 3, "stop": ["x"]}'])])
        ),
        "parameters": shown(
            client.infer(
                "scripted", [hello], parameters={"max_tokens": 2, "temperature": "0.3"}, priority=4, timeout=9_000_000
            )
        ),
        "asynchronous": [shown(result), error],
        "bad": refused(lambda: client.infer("scripted", [hello, tensor("top_p", [7], "FP32")])),
        "no_model": refused(lambda: client.infer("scripted", [tensor("text_input", [""])])),
        "streaming": refused(lambda: client.infer("scripted", [hello, tensor("stream", [True], "BOOL")])),
    }


def streamed(client):
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    streaming = tensor("stream", [True], "BOOL")
    client.async_stream_infer(
        "scripted",
        [tensor("text_input", ["stream"]), streaming],
        request_id="s",
        outputs=wanted(*OUTPUTS),
        enable_empty_final_response=True,
    )
    client.async_stream_infer("scripted", [tensor("text_input", [""]), streaming], request_id="bad")
    client.async_stream_infer("scripted", [tensor("text_input", ["whole"])], request_id="w")
    found = {"s": [], "w": [], "bad": []}
    num_open = 3
    while num_open:
        result, error = responses.get(timeout=10)
        if error is not None:
            found["bad"].append(error.message())
            num_open -= 1
            continue
        last = result.get_response().parameters["triton_final_response"].bool_param
        found[result.get_response().id].append([shown(result), last])
        num_open -= last
    client.stop_stream()
    return found


def fields(message):
    """Each field as number, type, label, and what its messages hold, by message and name."""
    own = {
        f"{message.full_name}.{field.name}": [
            field.number,
            field.type,
            field.is_repeated,
            (field.message_type or field.enum_type).full_name if field.message_type or field.enum_type else "",
            field.containing_oneof.name if field.containing_oneof else "",
        ]
        for field in message.fields
    }
    for nested in message.nested_types:
        own.update(fields(nested))
    return own


def description():
    messages = [
        *service_pb2.DESCRIPTOR.message_types_by_name.values(),
        *model_config_pb2.DESCRIPTOR.message_types_by_name.values(),
    ]
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    return {
        "fields": {name: field for message in messages for name, field in fields(message).items()},
        "methods": {
            method.name: [
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            ]
            for method in service.methods
        },
        "types": {value.name: value.number for value in model_config_pb2.DataType.DESCRIPTOR.values},
    }


def main(port):
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    told = {"about": about(client), "answers": answers(client), "streamed": streamed(client), "proto": description()}
    told["statistics"] = client.get_inference_statistics("scripted", as_json=True)
    client.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
