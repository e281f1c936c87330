# SPDX-License-Identifier: Apache-2.0
"""`CallRecord`: what is known of a call when it ends, for logs, metrics and traces."""

from collections.abc import Callable
from dataclasses import dataclass

from serving.core.errors import ServiceError


@dataclass(frozen=True)
class CallRecord:
    """A call that ended. `outcome` is "ok" or a `Kind`'s value; `detail` the error's message, which may quote the call;
    `field` the field at fault.

    Seconds count from the call's arrival: `admitted_s` when the limits let it in, `queued_s` when its prompt began to
    run, `first_token_s`, `finished_s`; 0 where the point was not reached. `prompt_text` is the prompt where the service
    was told to keep it, else "".
    """

    method: str
    request_id: str
    key_id: str
    peer: str
    model: str
    outcome: str
    detail: str = ""
    finish_reasons: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    admitted_s: float = 0.0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    prompt_text: str = ""
    field: str = ""


def refusal(method: str, peer: str, error: ServiceError) -> CallRecord:
    """The record of a call that came no further than a front."""
    return CallRecord(method, "", "", peer, "", error.kind.value, str(error), field=error.field)


# Called on the event loop at a call's end; must be quick.
Observer = Callable[[CallRecord], None]


@dataclass(frozen=True)
class ChangeRecord:
    """A change of models whose outcome is known, or a model that is gone. `action` is "load", "unload" or "retire";
    `key_id` and `peer` say who asked, "" for the server itself; `outcome` and `detail` are as in `CallRecord`.

    Of a model that is gone `calls_ended` were ended for it, and `freed` says whether its memory is.
    """

    action: str
    model: str
    key_id: str = ""
    peer: str = ""
    outcome: str = "ok"
    detail: str = ""
    seconds: float = 0.0
    calls_ended: int = 0
    freed: bool = True
