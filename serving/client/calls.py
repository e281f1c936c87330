# SPDX-License-Identifier: Apache-2.0
"""What each method of a client sends and how its response is read, for the sync and the async client alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue

from serving.client import reading
from serving.client.params import params_message
from serving.client.prompts import PromptInput, Text, prompt_message
from serving.client.results import Embedding, Generation, Model, Score, Tokens
from serving.grpc.stubs import generate_pb2 as pb

T = TypeVar("T")
POOLINGS = MappingProxyType({"mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST})


@dataclass(frozen=True)
class UnaryCall(Generic[T]):
    """A method's name, its request, and what its response is read by."""

    method: str
    request: Message
    read: Callable[[Any], T]


@dataclass(frozen=True)
class StreamCall:
    """A streaming method's name, its request, and how many answers it gives."""

    method: str
    request: pb.GenerateRequest | pb.ForkRequest
    num_answers: int


def generate(prompt: PromptInput, model: str, request_id: str, params: Mapping[str, Any]) -> UnaryCall[Generation]:
    """Whole answers to a prompt."""
    return UnaryCall("GenerateUnary", generate_request(prompt, model, request_id, params), reading.whole)


def stream(prompt: PromptInput, model: str, request_id: str, params: Mapping[str, Any]) -> StreamCall:
    """Streamed answers to a prompt."""
    request = generate_request(prompt, model, request_id, params)
    return StreamCall("Generate", request, num_answers(request.params))


def generate_request(prompt: PromptInput, model: str, request_id: str, params: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request of all ways to generate."""
    return pb.GenerateRequest(
        model=model, request_id=request_id, prompt=prompt_message(prompt), params=params_message(params)
    )


def num_answers(params: pb.SamplingParams) -> int:
    """How many answers a request asks for."""
    return params.n if params.HasField("n") else 1


def fork(
    prompt: PromptInput,
    branches: Sequence[Mapping[str, Any] | PromptInput],
    model: str,
    request_id: str,
    params: Mapping[str, Any],
) -> StreamCall:
    """Streamed continuations of one prompt; a branch's own parameters come over the common ones."""
    request = pb.ForkRequest(
        model=model,
        request_id=request_id,
        prompt=prompt_message(prompt),
        branches=[_branch({**params, **_fields(branch)}) for branch in branches],
    )
    return StreamCall("Fork", request, len(request.branches))


def score(
    prompt: PromptInput,
    continuations: Sequence[PromptInput],
    num_top: int,
    cache_salt: str,
    model: str,
    request_id: str,
) -> UnaryCall[tuple[Score, ...]]:
    """Log-probabilities of continuations, or of the prompt."""
    request = pb.ScoreRequest(
        model=model,
        prompt=prompt_message(prompt),
        continuations=[_continuation(one) for one in _listed("continuations", continuations)],
        num_top=num_top,
        request_id=request_id,
        cache_salt=cache_salt,
    )
    return UnaryCall("Score", request, reading.scores)


def embed(
    inputs: Sequence[PromptInput], pooling: Literal["mean", "last"], normalize: bool, model: str, request_id: str
) -> UnaryCall[tuple[Embedding, ...]]:
    """Vectors of inputs."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is not known; use one of {', '.join(POOLINGS)}.")
    request = pb.EmbedRequest(
        model=model,
        inputs=[prompt_message(one) for one in _listed("inputs", inputs)],
        pooling=POOLINGS[pooling],
        normalize=normalize,
        request_id=request_id,
    )
    return UnaryCall("Embed", request, reading.embeddings)


def tokenize(prompt: PromptInput, model: str) -> UnaryCall[Tokens]:
    """Token ids of a text or chat."""
    return UnaryCall("Tokenize", pb.TokenizeRequest(model=model, prompt=prompt_message(prompt)), reading.tokens)


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool, model: str) -> UnaryCall[str]:
    """Text of token ids."""
    request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    return UnaryCall("Detokenize", request, lambda response: response.text)


def models() -> UnaryCall[tuple[Model, ...]]:
    """The models there are."""
    return UnaryCall("ListModels", pb.ListModelsRequest(), reading.models)


def health(service: str) -> UnaryCall[str]:
    """The status of a service."""
    return UnaryCall("Health", StringValue(value=service), lambda response: reading.HEALTH.get(response.value, ""))


def _fields(branch: Mapping[str, Any] | PromptInput) -> Mapping[str, Any]:
    """A branch's own; a text or ids alone are its continuation."""
    return branch if isinstance(branch, Mapping) else {"continuation": branch}


def _branch(fields: Mapping[str, Any]) -> pb.Branch:
    params = {name: value for name, value in fields.items() if name != "continuation"}
    continuation = fields.get("continuation")
    made = pb.Branch(params=params_message(params))
    if continuation is not None:
        made.continuation.CopyFrom(_continuation(continuation))
    return made


def _continuation(one: PromptInput) -> pb.Prompt:
    message = prompt_message(one)
    if message.WhichOneof("input") == "chat":
        raise TypeError("a continuation is a chat, and follows a prompt; give a text or token ids.")
    if not isinstance(one, Text):
        message.ClearField("add_special_tokens")
    return message


def _listed(name: str, given: Sequence[PromptInput]) -> Sequence[PromptInput]:
    if isinstance(given, str | Text) or any(isinstance(one, int | Mapping) for one in given):
        raise TypeError(f"{name} is one prompt; give a list of them.")
    return given
