# SPDX-License-Identifier: Apache-2.0
"""Where settings come from, and which holds: flag, then environment METRALE_<NAME>, then file, then default."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_type_hints

from metrale_jax.core.errors import ConfigError, shown
from metrale_jax.flags import is_none, kinds_of
from metrale_jax.llm_config import LLMConfig
from serving.config import ServeConfig

PREFIX = "METRALE_"
# Names the file itself, so it is no setting.
FILE_VARIABLE = PREFIX + "CONFIG"
TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
CONFIGS = (ServeConfig, LLMConfig)
HINTS = {name: hint for config in CONFIGS for name, hint in get_type_hints(config).items()}
DEFAULTS = {field.name: field.default for config in CONFIGS for field in fields(config)}

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Resolved:
    """Both configs, and of each name whether a "flag", the "environment", the "file" or the "default" gave it."""

    serve: ServeConfig
    llm: LLMConfig
    origins: Mapping[str, str]


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
    defaults: Mapping[str, Any] = NOTHING,
) -> Resolved:
    """The settings: `flags` by name, a whole `environment`, the entries of a `file`, and `defaults` in the place of the
    configs' own. A variable that is empty counts as not set; "none" or "off" says of a number that may be None that
    there is none. Raises `ConfigError` for a name that is none, or a value
    that cannot be read."""
    for name in file:
        if name not in HINTS:
            raise ConfigError(f"config file: {shown(name, 60)} is no setting; {_nearest(name, HINTS)}.")
    sources = (
        ("default", DEFAULTS | dict(defaults)),
        ("file", {name: None if _is_unset(value, HINTS[name]) else value for name, value in file.items()}),
        ("environment", _from_environment(environment)),
        ("flag", flags),
    )
    values = {name: (value, origin) for origin, source in sources for name, value in source.items()}
    made = (config(**{field.name: values[field.name][0] for field in fields(config)}) for config in CONFIGS)
    return Resolved(*made, MappingProxyType({name: values[name][1] for name in HINTS}))


def read_file(path: str | Path) -> dict[str, Any]:
    """The entries of a TOML file. Raises `ConfigError` for one that cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config file {str(path)!r} cannot be read ({error.strerror}); name a readable file."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {str(path)!r} is not UTF-8; save it as UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(path)!r} is no TOML: {error}; write lines of name = value.") from None


def printed(resolved: Resolved) -> str:
    """All settings as the TOML of a config file, with where each came from; those that are not set as comments, unless
    they are by default."""
    lines = []
    for config in (resolved.serve, resolved.llm):
        lines.append(f"# {type(config).__name__}")
        for field in fields(config):
            value, origin = getattr(config, field.name), resolved.origins[field.name]
            is_unset = value is None and field.default is None
            lines.append(f"# {field.name} is not set" if is_unset else f"{field.name} = {_toml(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    variables = {PREFIX + name.upper(): name for name in HINTS}
    found = {}
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not text:
            continue
        if variable not in variables:
            raise ConfigError(
                f"{shown(variable, 60)} is no setting; {_nearest(variable, (*variables, FILE_VARIABLE))}."
            )
        found[variables[variable]] = _read(variable, text, HINTS[variables[variable]])
    return found


def _read(variable: str, text: str, hint: Any) -> Any:
    kinds = kinds_of(hint)
    if bool in kinds:
        if text.lower() not in TRUTHS:
            raise ConfigError(f"{variable}={shown(text)} is not true or false; give one.")
        return TRUTHS[text.lower()]
    if _is_unset(text, hint):
        return None
    for kind, what in ((int, "an integer"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{variable}={shown(text)} is not {what}; give one.") from None
    return text


def _is_unset(value: Any, hint: Any) -> bool:
    """Whether a text says of a number that may be None that there is none."""
    kinds = kinds_of(hint)
    return isinstance(value, str) and NoneType in kinds and not kinds & {str, Path, bool} and is_none(value)


def _nearest(name: str, known: Any) -> str:
    close = get_close_matches(name.lower().replace("-", "_"), [one.lower() for one in known], 1)
    by_lower = {one.lower(): one for one in known}
    return f"{by_lower[close[0]]} is the nearest" if close else "metrale-jax serve --print-config shows all there are"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
