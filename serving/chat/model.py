# SPDX-License-Identifier: Apache-2.0
"""`ChatModel`: what has to be known of a model's tokenizer to talk with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from metrale_jax.core.errors import MetraleError, TextError

_PROBE = "probe_7c1f"


def _unrendered(messages: Any, **variables: Any) -> str:
    raise TextError("the model has no chat template, so messages cannot be rendered; send a plain prompt.")


@dataclass(frozen=True)
class ChatModel:
    """`template` is the source of its chat templates, `render` makes a prompt of messages and template variables
    (raises `MetraleError`), `special_tokens` are the ids of those that answers leave out, by their text. `config` is
    what a tokenizer_config.json says."""

    template: str = ""
    render: Callable[..., str] = _unrendered
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether its template shows tools to the model."""
        schema = {"type": "object", "properties": {}}
        function = {"name": _PROBE, "description": _PROBE, "parameters": schema}
        return self._shows([_user()], tools=[{"type": "function", "function": function}])

    @cached_property
    def takes_calls(self) -> bool:
        """Whether its template shows calls that the model made, and their results."""
        call = {"id": "probe7c1f", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        made = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": _PROBE * 2, "tool_call_id": "probe7c1f", "name": _PROBE}
        return self._shows([_user(), made]) and self._shows([_user(), made, result], shown=_PROBE * 2)

    @cached_property
    def takes_system(self) -> bool:
        """Whether its template shows a system message."""
        return self._shows([{"role": "system", "content": _PROBE}, _user()])

    def _shows(self, messages: list[dict[str, Any]], shown: str = _PROBE, **variables: Any) -> bool:
        try:
            return shown in self.render(messages, **variables)
        except MetraleError:
            return False  # templates refuse by raising


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "Hello."}
