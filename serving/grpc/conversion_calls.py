# SPDX-License-Identifier: Apache-2.0
"""Request messages as the service's calls. Raises `ServiceError` (INVALID) that names the field at fault."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from metrale_jax.sampling.params import MAX_LOGPROBS
from serving.core.calls import (
    BranchCall,
    CallInfo,
    DetokenizeCall,
    EmbedCall,
    ForkCall,
    GenerateCall,
    Prompt,
    ScoreCall,
    TokenizeCall,
)
from serving.grpc.conversion_params import invalid, sampling_params, token_ids
from serving.grpc.stubs import generate_pb2

_POOLINGS = MappingProxyType(
    {
        generate_pb2.POOLING_UNSPECIFIED: "mean",
        generate_pb2.POOLING_MEAN: "mean",
        generate_pb2.POOLING_LAST: "last",
    }
)


def generate_call(request: generate_pb2.GenerateRequest, info: CallInfo) -> GenerateCall:
    """The call."""
    return GenerateCall(prompt_of(request.prompt, "prompt"), sampling_params(request.params, "params"), info)


def fork_call(request: generate_pb2.ForkRequest, info: CallInfo) -> ForkCall:
    """The call, of at least one branch."""
    if not request.branches:
        raise invalid("branches", "is empty; give at least one")
    branches = tuple(_branch(branch, f"branches[{place}]") for place, branch in enumerate(request.branches))
    return ForkCall(prompt_of(request.prompt, "prompt"), branches, info)


def score_call(request: generate_pb2.ScoreRequest, info: CallInfo) -> ScoreCall:
    """The call."""
    if request.num_top > MAX_LOGPROBS:
        raise invalid("num_top", f"is {request.num_top}, above the limit; ask for up to {MAX_LOGPROBS}")
    continuations = tuple(
        _continuation(one, f"continuations[{place}]") for place, one in enumerate(request.continuations)
    )
    return ScoreCall(prompt_of(request.prompt, "prompt"), continuations, request.num_top, request.cache_salt, info)


def embed_call(request: generate_pb2.EmbedRequest, info: CallInfo) -> EmbedCall:
    """The call, of at least one input."""
    if not request.inputs:
        raise invalid("inputs", "is empty; give at least one")
    if request.pooling not in _POOLINGS:
        raise invalid("pooling", f"is {request.pooling}, which is no Pooling; use MEAN or LAST")
    inputs = tuple(prompt_of(one, f"inputs[{place}]") for place, one in enumerate(request.inputs))
    normalize = request.normalize if request.HasField("normalize") else True
    return EmbedCall(inputs, _POOLINGS[request.pooling], normalize, info)


def tokenize_call(request: generate_pb2.TokenizeRequest, info: CallInfo) -> TokenizeCall:
    """The call, of a text (an empty one too) or a chat."""
    if request.prompt.WhichOneof("input") == "token_ids":
        raise invalid("prompt.token_ids", "are tokens already; give a text or a chat")
    return TokenizeCall(prompt_of(request.prompt, "prompt", may_be_empty=True), info)


def detokenize_call(request: generate_pb2.DetokenizeRequest, info: CallInfo) -> DetokenizeCall:
    """The call."""
    return DetokenizeCall(token_ids(request.token_ids, "token_ids"), request.skip_special_tokens, info)


def prompt_of(message: generate_pb2.Prompt, path: str, framed: bool = True, may_be_empty: bool = False) -> Prompt:
    """The prompt; `framed` is what `add_special_tokens` is where it is not set."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise invalid(path, "is missing; give a text, token ids or a chat")
    add_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else framed
    if kind == "chat":
        return _chat(message.chat, f"{path}.chat", add_special_tokens)
    if kind == "text":
        if not message.text and not may_be_empty:
            raise invalid(path, "is an empty text; give at least one character")
        return Prompt(text=message.text, add_special_tokens=add_special_tokens)
    ids = token_ids(message.token_ids.ids, f"{path}.token_ids.ids")
    if not ids:
        raise invalid(path, "is an empty list of token ids; give at least one")
    return Prompt(token_ids=ids, add_special_tokens=add_special_tokens)


def _branch(branch: generate_pb2.Branch, path: str) -> BranchCall:
    params = sampling_params(branch.params, f"{path}.params")
    if params.n != 1:
        raise invalid(f"{path}.params.n", f"is {params.n}, a branch gives one answer; add a branch for each")
    added = branch.continuation
    nothing = not branch.HasField("continuation") or (added.WhichOneof("input") == "text" and not added.text)
    return BranchCall(params, None if nothing else _continuation(added, f"{path}.continuation"))


def _continuation(message: generate_pb2.Prompt, path: str) -> Prompt:
    if message.WhichOneof("input") == "chat":
        raise invalid(f"{path}.chat", "cannot follow a prompt; give a text or token ids")
    return prompt_of(message, path, framed=False)


def _chat(chat: generate_pb2.Chat, path: str, add_special_tokens: bool) -> Prompt:
    if not chat.messages:
        raise invalid(f"{path}.messages", "is empty; give at least one")
    messages = tuple(_message(one, f"{path}.messages[{place}]") for place, one in enumerate(chat.messages))
    template = _plain_struct(chat.template, f"{path}.template")
    if chat.HasField("add_generation_prompt"):
        template["add_generation_prompt"] = chat.add_generation_prompt
    return Prompt(messages=messages, template=template, add_special_tokens=add_special_tokens)


def _message(message: generate_pb2.Message, path: str) -> Mapping[str, Any]:
    if not message.role:
        raise invalid(f"{path}.role", "is missing; say whose message it is, as user or assistant")
    given = {"role": message.role, "content": message.content}
    if message.HasField("name"):
        given["name"] = message.name
    extra = _plain_struct(message.extra, f"{path}.extra")
    doubled = given.keys() & extra.keys()
    if doubled:
        raise invalid(f"{path}.extra", f"holds {sorted(doubled)[0]}, which is a field of its own; leave it out there")
    return {**given, **extra}


def _plain_struct(struct: Struct, path: str) -> dict[str, Any]:
    return {name: _plain_value(value, f"{path}.{name}") for name, value in struct.fields.items()}


def _plain_value(value: Value, path: str) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return _plain_struct(value.struct_value, path)
    if kind == "list_value":
        return [_plain_value(item, f"{path}[{place}]") for place, item in enumerate(value.list_value.values)]
    if kind == "number_value":
        if not math.isfinite(value.number_value):
            raise invalid(path, f"is {value.number_value}, which JSON cannot hold; give a finite number")
        # A Struct has no integers, and a template would write 3 as 3.0.
        return int(value.number_value) if value.number_value.is_integer() else value.number_value
    return None if kind in (None, "null_value") else getattr(value, kind)
