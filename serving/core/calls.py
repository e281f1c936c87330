# SPDX-License-Identifier: Apache-2.0
"""What a front asks of the service: frozen, plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from metrale_jax.sampling.params import SamplingParams


@dataclass(frozen=True)
class Prompt:
    """Exactly one of a text, token ids, and the messages of a chat; `template` is for the chat template.

    `add_special_tokens` is for texts: whether the tokenizer frames them (its BOS).
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Caller:
    """Who asks. `key_id` names the key in logs and metrics ("" without keys); its secret is never here. `salt` parts
    its cached prefixes from other callers'. `peer` is the transport's address, `trace` an incoming traceparent. `admin`
    is whether the key may change models; nobody may without one."""

    key_id: str = ""
    salt: str = ""
    peer: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False


@dataclass(frozen=True)
class CallInfo:
    """What goes with every call: the `model` asked for ("" for the one there is), the caller's or a fresh `request_id`,
    the `method` for logs and metrics, and the seconds from now that the caller will wait (None: as long as it takes).
    Nobody waits for a call in the `background`: its turn comes when no other call waits for one, and it counts neither
    against the limits of its key nor against those of the queue. Whoever makes such calls bounds how many there are.
    """

    model: str = ""
    request_id: str = ""
    method: str = ""
    timeout_s: float | None = None
    background: bool = False


@dataclass(frozen=True)
class GenerateCall:
    """`params.n` answers to a prompt."""

    prompt: Prompt
    params: SamplingParams
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class BranchCall:
    """One continuation of a shared prompt: what is added to it (None: nothing) and how to go on. One answer each."""

    params: SamplingParams
    continuation: Prompt | None = None


@dataclass(frozen=True)
class ForkCall:
    """Several continuations of one prompt, which runs once; event `index` is the branch's."""

    prompt: Prompt
    branches: tuple[BranchCall, ...]
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class ScoreCall:
    """Log-probabilities of each continuation's tokens after `prompt`, or of the prompt's own without continuations;
    `num_top` likeliest tokens beside each. `cache_salt` parts cached prefixes."""

    prompt: Prompt
    continuations: tuple[Prompt, ...] = ()
    num_top: int = 0
    cache_salt: str = ""
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class EmbedCall:
    """A vector for each input, from the rows behind the model's last norm: their mean or the last one; `normalize`
    to length one."""

    inputs: tuple[Prompt, ...]
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class TokenizeCall:
    """Token ids of a text or of a chat."""

    prompt: Prompt
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class DetokenizeCall:
    """Text of token ids."""

    token_ids: tuple[int, ...]
    skip_special_tokens: bool = False
    info: CallInfo = CallInfo()


@dataclass(frozen=True)
class LoadCall:
    """Another model in the place of the one that serves. `model` is one of those that may be loaded, "" the one that is
    there (or was last): it is read again. `served_name` is what clients shall call it (""; its own name). `options` are
    for `LLM`, beside the operator's; None takes one of these back.

    `drain_first` unloads the old one before the new one is loaded: it needs no memory for both, and calls that come
    meanwhile are refused. False never does, and None does where the device has no room for both. Calls of the old one
    have `grace_s` to end (None: as long as they take).
    """

    model: str = ""
    served_name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    drain_first: bool | None = None
    grace_s: float | None = None


@dataclass(frozen=True)
class UnloadCall:
    """No model in the place of the one that serves. Calls of it have `grace_s` to end (None: as long as they take)."""

    grace_s: float | None = None
