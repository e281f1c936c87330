# SPDX-License-Identifier: Apache-2.0
"""`Catalog`: which models callers may have loaded, and what of a model's options is theirs to choose."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from metrale_jax.core.errors import ConfigError, MetraleError, shown
from metrale_jax.flags import kinds_of
from metrale_jax.llm_config import LLMConfig, checked_limits, llm_config
from serving.core.calls import Caller, LoadCall
from serving.core.errors import Kind, ServiceError

NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_NAME_CHARS = 128
# Options that name files or directories are the operator's: a caller must not have the server read or write any.
OPERATORS = frozenset(name for name, hint in get_type_hints(LLMConfig).items() if Path in kinds_of(hint))
# Options that fit one model: another begins with the defaults of these, and with the operator's own of the rest.
OF_ONE_MODEL = (
    "max_context_tokens",
    "executables",
    "proposer",
    "drafter",
    "num_drafts",
    "draft_confidence",
    "draft_layer_ids",
    "draft_mode",
    "acceptance",
)


@dataclass(frozen=True)
class Wanted:
    """A model to load: what clients call it, what `LLM` knows it by, and what that is told."""

    name: str
    source: str = ""
    config: LLMConfig = field(default_factory=LLMConfig)


@dataclass(frozen=True)
class Catalog:
    """`first` is the model that the server starts with. With `allow_changes` callers that may change models can have it
    loaded again, or one of `others`: sources by the names that callers use. Whatever is not here is not loaded."""

    first: Wanted
    allow_changes: bool = False
    others: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    @property
    def names(self) -> tuple[str, ...]:
        """What may be loaded."""
        return tuple(dict.fromkeys((self.first.name, *self.others)))

    def refuse_unless_allowed(self, caller: Caller) -> None:
        """Nothing for who may change models. Raises `ServiceError` (FORBIDDEN) otherwise."""
        if not self.allow_changes:
            raise ServiceError(
                Kind.FORBIDDEN,
                "models of this server stay as they are; its operator can allow changes by allow_model_changes.",
            )
        if not caller.admin:
            raise ServiceError(
                Kind.FORBIDDEN, "the call's key may not change models; use one that the key file calls admin = true."
            )

    def wanted(self, call: LoadCall, last: Wanted) -> Wanted:
        """The model that a call asks for, `last` where it names none. Raises `ServiceError`: FORBIDDEN for one that is
        not here or an option that is the operator's, INVALID for options or names that are none."""
        made = self._named(call.model, last)
        name = call.served_name or made.name
        if len(name) > MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise ServiceError(
                Kind.INVALID,
                f"served_name={shown(name, 60)} is not 1 to {MAX_NAME_CHARS} printable characters; give such a name.",
                field="served_name",
            )
        return replace(made, name=name, config=_config(made.config, call.options))

    def _named(self, model: str, last: Wanted) -> Wanted:
        if not model:
            return last
        if model == self.first.name:
            return self.first
        if model not in self.others:
            raise ServiceError(
                Kind.FORBIDDEN,
                f"model={shown(model, 60)} is not one of those that may be loaded; ask for {', '.join(self.names)}.",
                field="model",
            )
        return Wanted(model, self.others[model], _of_another(self.first.config, model))


def _of_another(config: LLMConfig, name: str) -> LLMConfig:
    """The operator's options for a model that they were not given for."""
    own = {one.name: one.default for one in fields(LLMConfig) if one.name in OF_ONE_MODEL}
    if config.disk_cache is not None:
        # A directory keeps the prefixes of one model: a second one would delete those of the first.
        own["disk_cache"] = Path(config.disk_cache) / hashlib.sha256(name.encode()).hexdigest()[:16]
    return replace(config, **own)


def _config(config: LLMConfig, options: Mapping[str, Any]) -> LLMConfig:
    theirs = sorted(OPERATORS & set(options))
    if theirs:
        raise ServiceError(
            Kind.FORBIDDEN, f"option {theirs[0]} is for the server's operator alone; leave it out.", field="options"
        )
    known = {one.name: one.default for one in fields(LLMConfig)}
    given = {name: known.get(name) if value is None else value for name, value in options.items()}
    try:
        made = llm_config({name: getattr(config, name) for name in known} | given)
        checked_limits(made)
    except MetraleError as error:
        raise ServiceError(Kind.INVALID, str(error), field="options") from error
    return made


def read_models(text: str) -> dict[str, str]:
    """Sources by name out of "name=source, name, ...": a name alone is its own source. Raises `ConfigError` for what
    cannot be read."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, source = (piece.strip() for piece in part.partition("="))
        if not name or ("=" in part and not source):
            raise ConfigError(f"allowed_models={shown(text)} has {shown(part)}; write name=path or a name, by commas.")
        if name in found:
            raise ConfigError(f"allowed_models={shown(text)} names {name!r} twice; give each its own name.")
        found[name] = source or name
    return found
