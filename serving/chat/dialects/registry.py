# SPDX-License-Identifier: Apache-2.0
"""The dialects by name. A template goes to the first that recognises it."""

from importlib import import_module

from metrale_jax.core.errors import ConfigError
from serving.chat.dialects.api import AbstractDialect

DIALECTS = {
    "gemma": "serving.chat.dialects.gemma:Gemma",
    "mistral": "serving.chat.dialects.mistral:Mistral",
    "qwen3_coder": "serving.chat.dialects.qwen3_coder:Qwen3Coder",
    "hermes": "serving.chat.dialects.hermes:Hermes",
    "llama3": "serving.chat.dialects.llama3:Llama3",
    "fenced": "serving.chat.dialects.fenced:Fenced",
}
# What is told to models that say nothing of tools: the plainest.
OTHERWISE = "hermes"


def dialect_named(name: str) -> AbstractDialect:
    """The dialect of this name. Raises `ConfigError` for one that is none."""
    if name not in DIALECTS:
        raise ConfigError(f"tool_dialect={name!r} is no dialect; use one of {', '.join(DIALECTS)}.")
    module, _, found = DIALECTS[name].partition(":")
    return getattr(import_module(module), found)()


def dialect_of(template: str) -> AbstractDialect:
    """The dialect of models with this chat template."""
    named = (dialect_named(name) for name in DIALECTS)
    return next((dialect for dialect in named if dialect.recognizes(template)), None) or dialect_named(OTHERWISE)
