# SPDX-License-Identifier: Apache-2.0
"""Fields of the APIs that are served in part: those passed over, those refused by name, and values in our terms."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from metrale_jax.core.errors import RequestError, shown

# Fields of `SamplingParams` that an API can have beside its own: they shape one answer and no more than that.
DRAWING = tuple(
    "temperature top_p top_k min_p typical_p top_n_sigma seed repetition_penalty presence_penalty frequency_penalty "
    "logit_bias allowed_token_ids banned_token_ids bad_words min_tokens stop stop_token_ids ignore_eos priority "
    "deadline_s cache_salt".split()
)
# The least that top_p can be: it leaves the likeliest token, and what ties with it.
LEAST_TOP_P = 1e-9


@dataclass(frozen=True)
class Refusal:
    """A field that is not served, the way out, and the values by which nothing is asked."""

    remedy: str
    harmless: tuple[Any, ...] = ()


# They concern billing, caches, routing, transport or speed, or are hints: the answer need not depend on them.
OPENAI_HINTS = frozenset(
    "model user metadata store service_tier stream stream_options safety_identifier prompt_cache_key "
    "prompt_cache_options prompt_cache_retention parallel_tool_calls prediction verbosity".split()
)
OPENAI_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "tools": Refusal("describe the tools in a message", ([],)),
        "tool_choice": Refusal("describe the tools in a message", ("none", "auto")),
        "functions": Refusal("describe the functions in a message", ([],)),
        "function_call": Refusal("describe the functions in a message", ("none", "auto")),
        "suffix": Refusal("put it into the prompt", ("",)),
        "best_of": Refusal("ask for n answers and choose"),
        "audio": Refusal("take the answer as text"),
        "modalities": Refusal("take the answer as text", (["text"], [])),
        "moderation": Refusal("look at prompts and answers on your side"),
        "web_search_options": Refusal("put what was found into a message", ({},)),
    }
)
RESPONSES_HINTS = frozenset(
    "model stream stream_options user safety_identifier service_tier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention include access_programs background_options client_metadata context_management image "
    "max_tool_calls".split()
)
RESPONSES_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "background": Refusal("wait for the answer, or make a batch", (False,)),
        "conversation": Refusal("go on by previous_response_id"),
        "moderation": Refusal("look at prompts and answers on your side"),
        "prompt": Refusal("write its text into instructions and input"),
        # It tells two answers apart only where the input is too long, which is refused.
        "truncation": Refusal("send less", ("disabled", "auto")),
    }
)
MESSAGES_HINTS = frozenset(
    "model stream metadata service_tier cache_control inference_geo speed diagnostics user_profile_id workspace_id "
    "billing_policy context_management fallbacks fallback_credit_token".split()
)
MESSAGES_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "compaction": Refusal("ask for a summary in a message"),
        "container": Refusal("run tools on your side"),
        "mcp_servers": Refusal("ask them on your side, and give their tools in tools", ([],)),
        "thread": Refusal("send all messages each time"),
    }
)


def refuse(body: Mapping[str, Any], refused: Mapping[str, Refusal]) -> None:
    """Nothing. Raises `RequestError` for a field of those that are refused, unless nothing is asked by it."""
    for name, refusal in refused.items():
        value = body.get(name)
        if value is not None and not _is_among(value, refusal.harmless):
            raise RequestError(
                f"{name}={shown(value, 80)} is not served here; leave it out and {refusal.remedy}.", name
            )


def described(hints: Collection[str], refused: Mapping[str, Refusal]) -> dict[str, Any]:
    """JSON schemas of these fields."""
    harmless = {name: {"enum": list(one.harmless)} for name, one in sorted(refused.items()) if one.harmless}
    return {name: {} for name in sorted(hints)} | harmless


def as_meant(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` out of those that OpenAI's clients send: a `top_p` of 0 is the likeliest token alone,
    a negative `seed` of 64 bits the one of the same bits."""
    made = dict(sampling)
    seed, top_p = made.get("seed"), made.get("top_p")
    if type(seed) is int and -(2**63) <= seed < 0:
        made["seed"] = seed + 2**64
    if type(top_p) in (int, float) and top_p == 0:
        made["top_p"] = LEAST_TOP_P
    return made


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    # True is no 1.
    return any(type(value) is type(one) and value == one for one in harmless)
