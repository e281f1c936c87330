# SPDX-License-Identifier: Apache-2.0
"""SamplingParams messages as `SamplingParams`. `path` is the message's place in its request, for errors."""

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from metrale_jax.core.errors import RequestError
from metrale_jax.sampling.params import SamplingParams
from serving.core.errors import Kind, ServiceError
from serving.grpc.stubs import generate_pb2

MAX_TOKEN_ID = 2**31 - 1


def sampling_params(message: generate_pb2.SamplingParams, path: str) -> SamplingParams:
    """The parameters; what is not set keeps its default. Raises `ServiceError` that names the field at fault."""
    asked: dict[str, Any] = {}
    for field, value in message.ListFields():
        asked[field.name] = _READERS.get(field.name, _plain)(value, f"{path}.{field.name}")
    if asked.pop("max_tokens_unlimited", False):
        if "max_tokens" in asked:
            raise invalid(f"{path}.max_tokens_unlimited", "is set beside max_tokens; leave out one of them")
        asked["max_tokens"] = None
    return checked_params(asked, path)


def checked_params(asked: dict[str, Any], path: str) -> SamplingParams:
    """`SamplingParams` of fields by name. Raises `ServiceError` that names the field at fault, under `path`."""
    try:
        return SamplingParams(**asked)
    except RequestError as error:
        field = ".".join(part for part in (path, error.field) if part)
        raise ServiceError(Kind.INVALID, str(error), field=field) from error


def token_ids(ids: Iterable[int], path: str) -> tuple[int, ...]:
    """The ids. Raises `ServiceError` for one that no vocabulary has."""
    whole = tuple(ids)
    if whole and max(whole) > MAX_TOKEN_ID:
        raise invalid(path, f"holds {max(whole)}, which is above {MAX_TOKEN_ID}; use token ids of the vocabulary")
    return whole


def shortest(value: float) -> float:
    """The number with the fewest digits that float32 keeps as `value`: 0.7, where plain widening gives 0.699999988."""
    return float(str(np.float32(value)))


def invalid(path: str, fault: str) -> ServiceError:
    """The error for a field that is wrong: `fault` goes on where the field's name ends."""
    return ServiceError(Kind.INVALID, f"{path} {fault}.", field=path)


def _plain(value, path):
    return value


def _float(value, path):
    return shortest(value)


def _ids(value, path):
    return token_ids(value, path)


def _id_list(value, path):
    return token_ids(value.ids, f"{path}.ids")


def _texts(value, path):
    return tuple(value)


def _choices(value, path):
    return tuple(value.texts)


def _bias(value, path):
    token_ids(value, path)
    return {token: shortest(bias) for token, bias in value.items()}


def _bad_words(value, path):
    return tuple(_bad_word(word, f"{path}[{place}]") for place, word in enumerate(value))


def _bad_word(word, path):
    kind = word.WhichOneof("word")
    if kind is None:
        raise invalid(path, "is neither a text nor token ids; give one of them")
    return word.text if kind == "text" else token_ids(word.token_ids.ids, f"{path}.token_ids.ids")


def _early_stopping(value, path):
    if value not in _EARLY_STOPPING:
        raise invalid(path, f"is {value}, which is no EarlyStopping; use NO, YES or NEVER")
    return _EARLY_STOPPING[value]


_EARLY_STOPPING = MappingProxyType(
    {
        generate_pb2.EARLY_STOPPING_UNSPECIFIED: False,
        generate_pb2.EARLY_STOPPING_NO: False,
        generate_pb2.EARLY_STOPPING_YES: True,
        generate_pb2.EARLY_STOPPING_NEVER: "never",
    }
)
_FLOATS = [
    field.name
    for field in generate_pb2.SamplingParams.DESCRIPTOR.fields
    if field.type == FieldDescriptor.TYPE_FLOAT and not field.is_repeated
]
_READERS: MappingProxyType[str, Callable[[Any, str], Any]] = MappingProxyType(
    {
        **dict.fromkeys(_FLOATS, _float),
        "logit_bias": _bias,
        "allowed_token_ids": _id_list,
        "banned_token_ids": _ids,
        "stop_token_ids": _ids,
        "bad_words": _bad_words,
        "stop": _texts,
        "choice": _choices,
        "early_stopping": _early_stopping,
    }
)
