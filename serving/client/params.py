# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters by name, as `SamplingParams` of metrale_jax spells them, as a message of the protocol.

Values are checked by the server; here only names, and whether a value fits its field.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from serving.client.prompts import token_ids_message
from serving.grpc.stubs import generate_pb2 as pb

PLAIN = tuple(
    "n temperature top_n_sigma top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty seed "
    "max_tokens min_tokens ignore_eos include_stop_str_in_output skip_special_tokens logprobs prompt_logprobs echo "
    "regex grammar beam_width length_penalty priority deadline_s cache_salt".split()
)
STRUCTURES = ("json_schema", "regex", "choice", "grammar")
EARLY_STOPPING = MappingProxyType(
    {False: pb.EARLY_STOPPING_NO, True: pb.EARLY_STOPPING_YES, "never": pb.EARLY_STOPPING_NEVER}
)


def params_message(params: Mapping[str, Any]) -> pb.SamplingParams:
    """The parameters as a message. None leaves a parameter at its default; `max_tokens=None` lifts the limit.

    Raises `TypeError` for a name that is none, saying the nearest, and for values of a wrong type; `ValueError` for
    ones that do not fit.
    """
    made = pb.SamplingParams()
    _check_names(params)
    given = [name for name in STRUCTURES if params.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given, an answer has one structure; leave out all but one.")
    for name, value in params.items():
        if name == "max_tokens" and value is None:
            made.max_tokens_unlimited = True
        elif value is not None:
            _set(made, name, value)
    return made


def _check_names(params: Mapping[str, Any]) -> None:
    for name in params:
        if name not in PLAIN and name not in SHAPED:
            near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
            raise TypeError(f"{name} is no parameter of a request; the nearest is {near}.")


def _set(made: pb.SamplingParams, name: str, value: Any) -> None:
    try:
        if name in SHAPED:
            SHAPED[name](made, value)
        else:
            setattr(made, name, value)
    except (TypeError, AttributeError) as error:
        raise TypeError(f"{name}={value!r} is of a wrong type ({error}).") from error
    except ValueError as error:
        raise ValueError(f"{name}={value!r} does not fit ({error}).") from error


def _set_bias(made: pb.SamplingParams, value: Mapping[int | str, float]) -> None:
    for token_id, bias in value.items():
        # The keys of a JSON object are texts.
        made.logit_bias[int(token_id)] = bias


def _set_bad_words(made: pb.SamplingParams, value: Any) -> None:
    for word in value:
        by_text = isinstance(word, str)
        made.bad_words.append(
            pb.BadWord(text=word) if by_text else pb.BadWord(token_ids=token_ids_message("bad_words", word))
        )


def _set_json_schema(made: pb.SamplingParams, value: Mapping[str, Any] | str) -> None:
    # The order of properties is the order in which an answer gives them: it stays.
    made.json_schema = value if isinstance(value, str) else json.dumps(value)


def _set_early_stopping(made: pb.SamplingParams, value: bool | str) -> None:
    if value not in EARLY_STOPPING:
        raise ValueError("use True, False or 'never'")
    made.early_stopping = EARLY_STOPPING[value]


def _set_choice(made: pb.SamplingParams, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError("give a list of texts")
    made.choice.CopyFrom(pb.Choices(texts=value))


SHAPED: Mapping[str, Callable[[pb.SamplingParams, Any], None]] = MappingProxyType(
    {
        "logit_bias": _set_bias,
        "allowed_token_ids": lambda made, value: made.allowed_token_ids.CopyFrom(pb.TokenIds(ids=value)),
        "banned_token_ids": lambda made, value: made.banned_token_ids.extend(value),
        "bad_words": _set_bad_words,
        "stop": lambda made, value: made.stop.extend([value] if isinstance(value, str) else value),
        "stop_token_ids": lambda made, value: made.stop_token_ids.extend(value),
        "json_schema": _set_json_schema,
        "choice": _set_choice,
        "early_stopping": _set_early_stopping,
    }
)
NAMES = (*PLAIN, *SHAPED)
