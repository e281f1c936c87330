# SPDX-License-Identifier: Apache-2.0
"""`RawConfig`: a checkpoint's config as plain values, read with checks instead of with defaults that hide."""

from collections.abc import Mapping
from typing import Any

from metrale_jax.core.errors import ConfigError


class RawConfig:
    """Fields of a config.json (or of a GGUF header spelled alike), over a family's documented defaults.

    A field that is absent from both, or null where a number is needed, is an error that names it. `given` are those of
    the file, `read` those that somebody has asked for.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], origin: str):
        self.null = {key for key, value in values.items() if value is None}
        self.given = {key: value for key, value in values.items() if value is not None}
        self.defaults, self.values = defaults, {**defaults, **self.given}
        self.origin = origin
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or `default` where it is absent or null."""
        self.read.add(key)
        return self.values.get(key, default)

    def given_as_null(self, key: str) -> bool:
        """Whether the file has the field and says null, which some read otherwise than its absence."""
        self.read.add(key)
        return key in self.null

    def positive(self, key: str) -> int:
        """An integer above zero."""
        value = self._required(key, "an integer above 0")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "an integer above 0")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._required(key, "a number")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean. Null, which others take for false, is an error unless absence means that."""
        if key in self.null and self.defaults.get(key) is not False:
            raise self._wrong(key, None, "true or false")
        value = self._required(key, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def choice(self, key: str, allowed) -> str:
        """One of `allowed`."""
        value = self._required(key, f"one of {sorted(allowed)}")
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(key, value, f"one of {sorted(allowed)}")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where the field is absent."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def token_ids(self, key: str, vocab_size: int | None = None) -> tuple[int, ...]:
        """One id or a list of them, from 0 and below `vocab_size` where that is given; empty where it is absent."""
        value = self.get(key)
        listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self._wrong(key, value, "a token id or a list of them")
        if vocab_size is not None and not all(0 <= item < vocab_size for item in listed):
            raise self._wrong(key, value, f"a token id from 0 to {vocab_size - 1} or a list of them")
        return tuple(listed)

    def _required(self, key: str, expected: str) -> Any:
        if self.get(key) is None:
            raise ConfigError(f"{self.origin} has no field {key!r}, which must be {expected}; add it.")
        return self.values[key]

    def _wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{key}={value!r} in {self.origin} is not {expected}; correct the config.")
