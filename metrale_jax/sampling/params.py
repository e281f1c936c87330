# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams`: what a request asks for, checked once, under the names that vLLM and OpenAI use."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from metrale_jax.core.errors import RequestError, shown
from metrale_jax.sampling.checks import Check, at_most, every, in_turn, integer, listed, number, one_of, optional, text

# Below this a temperature's only effect would be overflow: it means greedy.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 512
# Each of them costs something at every token, or every character, of an answer.
MAX_STOP_STRINGS, MAX_BAD_WORDS = 64, 1024
MAX_WORDS_SIZE = 1 << 14
MAX_SALT = 1024
# Beyond this every token is as likely as any other in float32.
MAX_TEMPERATURE = 1e6
# Penalties that multiply logits stay where float32 neither overflows nor loses them.
MAX_FACTOR = 1e6


@dataclass(frozen=True)
class SamplingParams:
    """How to draw and when to stop. Raises `RequestError` for values out of range.

    Drawing applies, in this order, what is not off:

    1. Masks: only `allowed_token_ids`, none of `banned_token_ids`; no `bad_words` (texts, or lists of token ids: the
       last token of one may not follow the others at the end of the answer so far); what the structured output allows.
    2. `min_tokens`: no stop id before that many tokens. A stop string that is complete by then does not end it.
    3. `repetition_penalty` (1 is off): positive logits of tokens in prompt or answer are divided by it, negative ones
       multiplied.
    4. `frequency_penalty` (0 is off) times a token's count in the answer is subtracted, then `presence_penalty` (0 is
       off) once from each token of the answer.
    5. `logit_bias` `{token id: number}` is added; an id may be a decimal text, as in JSON. Greedy draws take the
       highest logit here.
    6. `temperature` divides; 0 is greedy.
    7. `top_n_sigma` (0 is off) keeps logits at most so many standard deviations below the highest, then `top_k` (0 or
       -1 is off), `top_p` (1 is off) and `min_p` (0 is off), each of what the one before it kept and with ties; the
       likeliest token survives all of these. Last, `typical_p` (1 is off) keeps the tokens whose information is nearest
       to the entropy of what is left, up to that mass: those may be others than the likeliest.

    `seed` None draws a fresh one, which the result reports. `n` answers are drawn with seeds derived from `seed`.
    `max_tokens` None runs to the context's end. `stop` strings are cut from the text unless
    `include_stop_str_in_output`; `stop_token_ids` end the answer as EOS does. `logprobs` k returns each chosen token's
    log-probability, before all of the above, and those of the k most likely; `prompt_logprobs` the same for the
    prompt. `echo` puts the prompt before the answer. At most one of `json_schema` (a dict or JSON text), `regex`,
    `choice` and `grammar` (Lark or GBNF) structures the answer. `beam_width` above 0 searches instead of drawing and
    returns the `n` best by sum of log-probabilities over length to the power of `length_penalty`; `early_stopping` as
    in transformers. Requests of lower `priority` are served first; one that is not done after `deadline_s` seconds
    ends. Requests share cached prefixes only under the same `cache_salt`.

    Lists are kept as tuples, `logit_bias` as sorted pairs and `json_schema` as JSON text, so that params hash.
    """

    n: int = 1
    temperature: float = 1.0
    top_n_sigma: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int | str, float] | tuple[tuple[int, float], ...] | None = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    banned_token_ids: tuple[int, ...] | list[int] | None = ()
    bad_words: tuple | list | None = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self):
        for name, normal in NORMAL_FORMS.items():
            object.__setattr__(self, name, normal(name, getattr(self, name)))
        for name, check in CHECKS.items():
            check(name, getattr(self, name))
        limit = math.inf if self.max_tokens is None else self.max_tokens
        integer(0, limit, "use a count between 0 and max_tokens")("min_tokens", self.min_tokens)
        if self.beam_width:
            integer(1, self.beam_width, "ask for at most beam_width answers")("n", self.n)
        forms = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(forms) > 1:
            raise RequestError(
                f"{' and '.join(forms)} are given, an answer has one structure; leave out all but one.", forms[1]
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def structured(self) -> bool:
        """Whether the answer has a structure to keep to."""
        return any(getattr(self, name) is not None for name in STRUCTURES)


def seed_bits(seed: int, sample: int) -> int:
    """The 32 bits that drive answer number `sample` of a request; answer 0 of a small seed is the seed itself."""
    folded = (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF
    return (folded + sample * 0x85EBCA6B) & 0xFFFFFFFF


STRUCTURES = ("json_schema", "regex", "choice", "grammar")
_TOKEN_ID = integer(0, math.inf, "use token ids of the model's vocabulary")
_DECIMAL = re.compile("[0-9]{1,19}")
_SWITCH = one_of((True, False), "use True or False")


def _texts(name, value):
    return (value,) if isinstance(value, str) else listed(name, value)


def _list_or_none(name, value):
    return value if value is None else listed(name, value)


def _bad_words(name, value):
    return tuple(tuple(word) if isinstance(word, list) else word for word in listed(name, value))


def _bias_pairs(name, value):
    if isinstance(value, Mapping | tuple | list) and len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"{name} of {len(value)} tokens is above the limit of {MAX_LOGIT_BIAS}; name fewer.", name)
    pairs = tuple(value.items()) if isinstance(value, Mapping) else listed(name, value)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"{name}={shown(pair)} is not a pair of token id and number; give a dict.", name)
        number(-100, 100, "use a value from -100 to 100")(name, pair[1])
    pairs = tuple((_id_of(token), value) for token, value in pairs)
    every(_TOKEN_ID)(name, [token for token, _ in pairs])
    return tuple(sorted(dict(pairs).items()))


def _id_of(token):
    # The keys of a JSON object are texts.
    return int(token) if isinstance(token, str) and _DECIMAL.fullmatch(token) else token


def _json_text(name, value):
    if isinstance(value, Mapping):
        try:
            # The order of properties is the order in which an answer gives them: it stays.
            return json.dumps(dict(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"{name}={shown(value)} is not plain JSON ({error}); give plain values.", name
            ) from error
    return value


def _check_json(name, value):
    text(1, "give a JSON schema as a dict or as text")(name, value)
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shown(value)} is not JSON ({error}); give a JSON schema.", name) from error


def _check_allowed(name, value):
    if not value:
        raise RequestError(f"{name}={shown(value)} allows no token; name at least one, or leave it out.", name)
    every(_TOKEN_ID)(name, value)


def _check_bad_word(name, value):
    if isinstance(value, tuple):
        if not value:
            raise RequestError(f"{name} holds an empty list of token ids; leave it out.", name)
        every(_TOKEN_ID)(name, value)
    elif isinstance(value, str) and value.strip():
        text(1, "leave it out")(name, value)
    else:
        raise RequestError(f"{name}={shown(value)} is neither a word nor a list of token ids; leave it out.", name)


def _check_choice(name, value):
    if not value:
        raise RequestError(f"{name}={shown(value)} leaves nothing to choose; name at least one text.", name)
    every(text(1, "leave it out"))(name, value)


NORMAL_FORMS = MappingProxyType(
    {
        "stop": _texts,
        "stop_token_ids": listed,
        "allowed_token_ids": _list_or_none,
        "banned_token_ids": listed,
        "bad_words": _bad_words,
        "logit_bias": _bias_pairs,
        "choice": _list_or_none,
        "json_schema": _json_text,
    }
)
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "n": integer(1, math.inf, "ask for at least one answer"),
        "temperature": number(0, MAX_TEMPERATURE, "use 0 for greedy or a value around 0.7"),
        "top_n_sigma": number(0, MAX_FACTOR, "use 0 for off or a value around 1"),
        "top_k": integer(-1, math.inf, "use 0 for off or a count"),
        "top_p": number(0, 1, "use a value above 0 and up to 1; 1 is off", open_low=True),
        "min_p": number(0, 1, "use a value from 0 to 1; 0 is off"),
        "typical_p": number(0, 1, "use a value above 0 and up to 1; 1 is off", open_low=True),
        "repetition_penalty": number(1 / MAX_FACTOR, MAX_FACTOR, "use 1 for off or a value around 1.2"),
        "presence_penalty": number(-2, 2, "use a value from -2 to 2; 0 is off"),
        "frequency_penalty": number(-2, 2, "use a value from -2 to 2; 0 is off"),
        "allowed_token_ids": optional(_check_allowed),
        "banned_token_ids": every(_TOKEN_ID),
        "bad_words": in_turn(every(_check_bad_word), at_most(MAX_BAD_WORDS, MAX_WORDS_SIZE)),
        "seed": optional(integer(0, 2**64 - 1, "use a seed from 0 to 2**64 - 1")),
        "max_tokens": optional(integer(1, math.inf, "ask for at least one token")),
        "stop": in_turn(every(text(1, "leave it out")), at_most(MAX_STOP_STRINGS, MAX_WORDS_SIZE)),
        "stop_token_ids": every(_TOKEN_ID),
        "ignore_eos": _SWITCH,
        "include_stop_str_in_output": _SWITCH,
        "skip_special_tokens": _SWITCH,
        "logprobs": optional(integer(0, MAX_LOGPROBS, f"ask for up to {MAX_LOGPROBS}")),
        "prompt_logprobs": optional(integer(0, MAX_LOGPROBS, f"ask for up to {MAX_LOGPROBS}")),
        "echo": _SWITCH,
        "json_schema": optional(_check_json),
        "regex": optional(text(1, "give a pattern, or leave it out")),
        "choice": optional(_check_choice),
        "grammar": optional(text(1, "give a grammar, or leave it out")),
        "beam_width": integer(0, math.inf, "use 0 for off or a count of beams"),
        "length_penalty": number(-100, 100, "use 1, or a higher value for longer answers"),
        "early_stopping": one_of((True, False, "never"), "use one of these"),
        "priority": integer(-(2**31), 2**31 - 1, "use 0, or a lower number to be served earlier"),
        "deadline_s": optional(number(0, math.inf, "use seconds above 0, or leave it out", open_low=True)),
        "cache_salt": text(0, "give a text, or leave it out", MAX_SALT),
    }
)
