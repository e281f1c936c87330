# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams`: what a request asks for, checked once, under the names that vLLM and OpenAI use."""

import math
from dataclasses import dataclass

from metrale_jax.core.errors import RequestError

# Below this a temperature's only effect would be overflow: it means greedy.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
# Beyond this every token is as likely as any other in float32.
MAX_TEMPERATURE = 1e6


@dataclass(frozen=True)
class SamplingParams:
    """How to draw and when to stop. Raises `RequestError` for values out of range.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off, `top_p` 1 and `min_p` 0 are off; filters apply in the order
    temperature, top_k, top_p, min_p. `seed` None draws a fresh one, which the result reports. `max_tokens` None runs
    to the context's end. `min_tokens` keeps every stop id from being drawn before that many tokens. `stop` strings
    are cut from the text unless `include_stop_str_in_output`; `stop_token_ids` end the answer as EOS does.
    `logprobs` k returns each chosen token's log-probability, before temperature and filters, and those of the k most
    likely. `n` answers are drawn with seeds derived from `seed`.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        _number("temperature", self.temperature, 0, MAX_TEMPERATURE, "use 0 for greedy or a value around 0.7")
        _number("top_p", self.top_p, 0, 1, "use a value above 0 and up to 1; 1 is off", open_low=True)
        _number("min_p", self.min_p, 0, 1, "use a value from 0 to 1; 0 is off")
        _integer("top_k", self.top_k, -1, None, "use 0 for off or a count")
        _integer("n", self.n, 1, None, "ask for at least one answer")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None, "ask for at least one token")
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, "use a count between 0 and max_tokens")
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1, "use a seed from 0 to 2**64 - 1")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, f"ask for up to {MAX_LOGPROBS}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop={text!r} is not a text of at least one character; leave it out.")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None, "use token ids of the model's vocabulary")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def seed_bits(seed: int, sample: int) -> int:
    """The 32 bits that drive answer number `sample` of a request; answer 0 of a small seed is the seed itself."""
    folded = (seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF
    return (folded + sample * 0x85EBCA6B) & 0xFFFFFFFF


def _listed(name, value):
    if value is not None and not isinstance(value, list | tuple):
        raise RequestError(f"{name}={value!r} is not a list; give a list, or leave it out.")
    return tuple(value or ())


def _number(name, value, low, high, remedy, open_low=False):
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value < low or value > high or (open_low and value == low):
        raise RequestError(f"{name}={value!r} is not a number {_range(low, high, open_low)}; {remedy}.")


def _integer(name, value, low, high, remedy):
    top = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or value < low or value > top:
        raise RequestError(f"{name}={value!r} is not an integer {_range(low, top, False)}; {remedy}.")


def _range(low, high, open_low):
    start = f"above {low}" if open_low else f"from {low}"
    return start + (" up" if high == math.inf else f" to {high}")
