# SPDX-License-Identifier: Apache-2.0
"""`KeyRing`: who may call. Keys come from a TOML file, and what is kept of a token is its SHA-256.

[[keys]]
id = "alice"                  # in logs and metrics
token_sha256 = "…"            # printf %s "$TOKEN" | sha256sum; or token = "…"
requests_per_minute = 60      # this and the next two: 0 or nothing is no limit
tokens_per_minute = 100000
max_concurrent = 4
salt = "team-a"               # keys of one salt share cached prefixes; without it a key shares with nobody
admin = true                  # may change models, where the server allows it at all; false without it
"""

import hashlib
import hmac
import logging
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from metrale_jax.core.errors import ConfigError, shown
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError

LOG = logging.getLogger(__name__)

MIN_TOKEN_LEN = 16
KEY_ID = re.compile(r"[A-Za-z0-9._@-]{1,64}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")
# What tomllib says of where a mistake is; the rest of its message may quote the file.
PLACE = re.compile(r"\(at (line \d+, column \d+|end of document)\)")


@dataclass(frozen=True)
class KeyLimits:
    """What a key may do; 0 is no limit. Tokens are those of prompts and answers together."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{one.name}={shown(value)} is not an integer from 0; give a count, 0 for no limit.")


LIMIT_NAMES = tuple(one.name for one in fields(KeyLimits))
KEY_NAMES = ("id", "token", "token_sha256", "salt", "admin", *LIMIT_NAMES)


@dataclass(frozen=True)
class Key:
    """A key without its secret: `digest` is the token's SHA-256. Neither it nor the salt is ever shown. `admin` is
    whether it may change models."""

    id: str
    digest: bytes = field(repr=False)
    salt: str = field(repr=False)
    limits: KeyLimits = KeyLimits()
    admin: bool = False


class KeyRing:
    """The keys of a file, or none at all: `open` or `anonymous` makes one. Any thread may ask it."""

    def __init__(self, keys: tuple[Key, ...], path: Path | None, anonymous: KeyLimits | None):
        self._keys, self._path, self._anonymous = keys, path, anonymous

    @classmethod
    def open(cls, path: str | Path) -> "KeyRing":
        """The keys of the file at `path`. Raises `ConfigError`, which shows no token, for a mistake in it."""
        return cls(_read(Path(path)), Path(path), None)

    @classmethod
    def anonymous(cls, limits: KeyLimits = KeyLimits()) -> "KeyRing":
        """Everybody may call, and all share these limits."""
        return cls((), None, limits)

    @property
    def ids(self) -> tuple[str, ...]:
        """The keys' names; none where everybody may call."""
        return tuple(key.id for key in self._keys)

    def reloaded(self) -> int:
        """How many keys there are now that the file was read again. Raises `ConfigError` for a mistake in it, and goes
        on with what it knew."""
        if self._path is not None:
            self._keys = _read(self._path)
        return len(self._keys)

    def authenticate(self, token: str | None, peer: str) -> Caller:
        """Who holds this token. Raises `ServiceError` (UNAUTHENTICATED) for none or an unknown one."""
        if self._anonymous is not None:
            return Caller(peer=peer)
        if not token:
            raise ServiceError(
                Kind.UNAUTHENTICATED, "the call has no key, and this server asks for one; send a bearer token."
            )
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found = None
        for key in self._keys:  # all of them, so that the time tells nothing of which one it was
            found = key if hmac.compare_digest(key.digest, digest) else found
        if found is None:
            raise ServiceError(
                Kind.UNAUTHENTICATED, "the call's key is not known here; send one that the server was given."
            )
        return Caller(key_id=found.id, salt=found.salt, peer=peer, admin=found.admin)

    def caller(self, key_id: str) -> Caller:
        """Who holds the key of that name, for work that goes on without them. Raises `ServiceError` (UNAUTHENTICATED)
        for a key that was taken away meanwhile."""
        if self._anonymous is not None and not key_id:
            return Caller()
        for key in self._keys:
            if key.id == key_id:
                return Caller(key_id=key.id, salt=key.salt)
        raise _taken_back()

    def limits_of(self, key_id: str) -> KeyLimits:
        """What a key may do. Raises `ServiceError` (UNAUTHENTICATED) for one that was taken away meanwhile."""
        if self._anonymous is not None:
            return self._anonymous
        for key in self._keys:
            if key.id == key_id:
                return key.limits
        raise _taken_back()


def _taken_back() -> ServiceError:
    return ServiceError(Kind.UNAUTHENTICATED, "the call's key was taken back; send one that the server was given.")


def _read(path: Path) -> tuple[Key, ...]:
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"key file {str(path)!r} cannot be read ({error.strerror}); name a readable file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"key file {str(path)!r} is not UTF-8; save it as UTF-8 text.") from None
    if mode & stat.S_IROTH:
        LOG.warning(
            "key file %r can be read by everybody on this machine; chmod 600 keeps its tokens secret.", str(path)
        )
    try:
        entries = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = PLACE.search(str(error))
        raise ConfigError(
            f"key file {str(path)!r} is no TOML{f' at {where[1]}' if where else ''}; write [[keys]] tables."
        ) from None
    return _keys(entries, f"key file {str(path)!r}")


def _keys(entries: Mapping[str, Any], file: str) -> tuple[Key, ...]:
    if set(entries) - {"keys"}:
        raise ConfigError(f"{file}: it holds something beside [[keys]] tables; write nothing else.")
    listed = entries.get("keys", [])
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{file}: no [[keys]] tables are in it, so that nobody could call; write one for each key.")
    keys: list[Key] = []
    for index, entry in enumerate(listed, start=1):
        key = _key(entry, f"{file}, [[keys]] number {index}")
        for number, other in enumerate(keys, start=1):
            for name, same in (("id", other.id == key.id), ("token", other.digest == key.digest)):
                if same:
                    raise ConfigError(
                        f"{file}: {name} of [[keys]] number {index} is that of number {number}; give it its own."
                    )
        keys.append(key)
    return tuple(keys)


def _key(entry: Mapping[str, Any], where: str) -> Key:
    """Raises `ConfigError`s that name fields and never values: any of them may be a token in the wrong place."""
    for name in entry:
        if name not in KEY_NAMES:
            close = get_close_matches(name, KEY_NAMES, 1)
            raise ConfigError(
                f"{where}: it has a field that is none; "
                + (f"did you mean {close[0]}?" if close else f"known are {', '.join(KEY_NAMES)}.")
            )
    key_id = entry.get("id")
    if not isinstance(key_id, str) or not KEY_ID.fullmatch(key_id):
        raise ConfigError(f"{where}: id is not 1 to 64 letters, digits and . _ @ -; give it a name for logs.")
    for name in LIMIT_NAMES:
        value = entry.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{where}: {name} is not an integer from 0; give a count, 0 for no limit.")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}: admin is not true or false; give one, or leave it out.")
    digest, salt = _digest(entry, where), entry.get("salt")
    if salt is None:
        # Stable over restarts, the same for token and token_sha256, and no way back to either.
        salt = hmac.new(digest, b"metrale-jax prefix cache", hashlib.sha256).hexdigest()
    elif not isinstance(salt, str) or not salt:
        raise ConfigError(f"{where}: salt is not a text of one character or more; give one, or leave it out.")
    return Key(key_id, digest, salt, KeyLimits(**{name: entry.get(name, 0) for name in LIMIT_NAMES}), admin)


def _digest(entry: Mapping[str, Any], where: str) -> bytes:
    token, sha256 = entry.get("token"), entry.get("token_sha256")
    if (token is None) == (sha256 is None):
        raise ConfigError(f"{where}: it has {'both' if token else 'neither'} of token and token_sha256; give one.")
    if sha256 is not None:
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise ConfigError(f"{where}: token_sha256 is not 64 hexadecimal digits; give the token's SHA-256.")
        return bytes.fromhex(sha256)
    if not isinstance(token, str) or not re.fullmatch(r"[!-~]*", token):
        raise ConfigError(f"{where}: token is not printable ASCII without spaces; take one from openssl rand -hex 32.")
    if len(token) < MIN_TOKEN_LEN:
        raise ConfigError(
            f"{where}: token has {len(token)} characters and can be guessed; give {MIN_TOKEN_LEN} or more, say by "
            "openssl rand -hex 32."
        )
    return hashlib.sha256(token.encode()).digest()
