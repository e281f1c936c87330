# SPDX-License-Identifier: Apache-2.0
"""`ServeConfig`: what the server can be told beside `LLMConfig`, which is told of the model."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from metrale_jax.core.errors import ConfigError
from metrale_jax.core.option_types import refuse_wrong_types
from serving.chat.dialects.registry import dialect_named
from serving.core.catalog import read_models
from serving.core.keys import KeyLimits

LOG_FORMATS = ("json", "text")
PORTS = ("grpc_port", "http_port", "side_port")
FRONTS = PORTS[:2]
MAX_MESSAGE_MIB = 2047
ORIGIN = re.compile(r"\*|https?://[^/\s,*]+")
STORED = ("max_file_mib", "max_stored_mib", "keep_files_h", "max_batch_lines")
MIN_ONE = ("max_message_mib", "max_streams", "max_requests_per_stream", "prepare_threads", *STORED)
ABOVE_ZERO = ("keepalive_s", "keepalive_timeout_s", "min_ping_interval_s")


@dataclass(frozen=True)
class ServeConfig:
    """Everything that the server can be told; None is not there, and 0 is off or no limit where nothing else is said.

    `model` is as for `LLM`, `served_name` what clients call it (its own name). Both fronts listen at `host`: gRPC at
    `grpc_port`, HTTP at `http_port`. A front without a port ("none") is not there, and 0 takes any free one. Both speak
    TLS where `tls_certificate` and `tls_key` name PEM files; clients must show a certificate of `tls_client_ca`, where
    it is given. Pages of `allowed_origins`, with commas between them, may call HTTP from browsers ("*": of all).
    HTTP answers to the names `allowed_hosts` alone, with commas between them; where it is not given and everybody
    may call on a loopback address, to those of such addresses: a page whose name was made to lead there is no
    caller. `page` puts a page to chat on at HTTP's `/`. `tool_dialect` names how the model writes calls of tools,
    where its chat template does not tell.
    `/metrics`, `/health` and `/ready` are at `side_host` and `side_port` too.
    `key_file` says who may call (see `serving.core.keys`); without it everybody may, and together they have the limits
    that begin with `anonymous_`. `max_waiting_requests` and `max_waiting_tokens` bound the queue. Calls that name no
    timeout have `timeout_s`, and none has more than `max_timeout_s`. A message has at most `max_message_mib`, a
    connection `max_streams` calls, a call of many requests `max_requests_per_stream`.
    On SIGTERM calls have `grace_s` to end. A step that takes longer than `stuck_after_s`, or `compile_after_s` where it
    compiles, ends the server. `warm_up` compiles all that a load can need before the first call is taken;
    `keep_programs` keeps compiled programs, in `compile_cache` or the cache directory of the command line.
    `prepare_threads` tokenize. With `allow_model_changes` keys that the key file calls admin may have the model loaded
    again, or one of `allowed_models` ("name=path, name, ..."; a name alone is an alias or a hub id) in its place; such
    a load is given up after `load_after_s`. `log_prompts` puts prompts and whole error messages into the log.
    Files and batches of HTTP's callers are kept in `data_dir`, by none where it is not given. A file has at most
    `max_file_mib`, those of a key together `max_stored_mib`, and both are kept for `keep_files_h` hours; a batch has at
    most `max_batch_lines`. Batches have up to `batch_in_flight` answers in the model at a time, by 0 half as many as
    it can have. They run in the time that live calls leave, and count against no limit of a key but these.
    """

    model: str = "smollm2-135m"
    served_name: str | None = None
    host: str = "127.0.0.1"
    grpc_port: int | None = 50051
    http_port: int | None = None
    allowed_origins: str | None = None
    allowed_hosts: str | None = None
    page: bool = True
    tool_dialect: str | None = None
    side_host: str = "127.0.0.1"
    side_port: int = 0
    key_file: str | Path | None = None
    tls_certificate: str | Path | None = None
    tls_key: str | Path | None = None
    tls_client_ca: str | Path | None = None
    anonymous_requests_per_minute: int = 0
    anonymous_tokens_per_minute: int = 0
    anonymous_max_concurrent: int = 0
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 262144
    timeout_s: float = 0.0
    max_timeout_s: float = 0.0
    max_message_mib: int = 32
    max_streams: int = 1024
    max_requests_per_stream: int = 256
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    min_ping_interval_s: float = 10.0
    grace_s: float = 30.0
    stuck_after_s: float = 60.0
    compile_after_s: float = 600.0
    prepare_threads: int = 2
    warm_up: bool = True
    keep_programs: bool = True
    reflection: bool = True
    compression: bool = False
    tracing: bool = False
    log_format: str = "json"
    log_prompts: bool = False
    allow_model_changes: bool = False
    allowed_models: str | None = None
    load_after_s: float = 1800.0
    data_dir: str | Path | None = None
    max_file_mib: int = 200
    max_stored_mib: int = 4096
    keep_files_h: int = 720
    max_batch_lines: int = 100_000
    batch_in_flight: int = 0

    def __post_init__(self):
        refuse_wrong_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and isinstance(value, int | float):
                self._check_number(field.name, value)
            if value == "":
                raise ConfigError(f"{field.name}='' is empty; give a name, or leave it out.")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format={self.log_format!r} is not one of {', '.join(LOG_FORMATS)}; choose one.")
        self._check_together()

    def _check_number(self, name: str, value: float) -> None:
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}={value!r} is not a finite number from 0; give one.")
        if name in PORTS and value > 65535:
            raise ConfigError(f"{name}={value} is above 65535; give a port.")
        if name == "max_message_mib" and value > MAX_MESSAGE_MIB:
            raise ConfigError(f"max_message_mib={value} is above {MAX_MESSAGE_MIB}, which gRPC can count; give less.")
        if (name in MIN_ONE and value < 1) or (name in ABOVE_ZERO and value == 0):
            raise ConfigError(f"{name}={value} is too small; give {1 if name in MIN_ONE else 'a number of seconds'}.")

    def _check_together(self) -> None:
        if all(getattr(self, name) is None for name in FRONTS):
            raise ConfigError(f"{' and '.join(FRONTS)} are both not set, so that nobody could call; give one.")
        if self.allowed_origins is not None and self.http_port is None:
            raise ConfigError("allowed_origins is given without http_port; give http_port too, or leave it out.")
        if self.allowed_hosts is not None and self.http_port is None:
            raise ConfigError("allowed_hosts is given without http_port; give http_port too, or leave it out.")
        if self.tool_dialect is not None:
            dialect_named(self.tool_dialect)
        if self.data_dir is not None and self.http_port is None:
            raise ConfigError("data_dir is given without http_port; give http_port too, or leave it out.")
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins has {origin!r}, which is no origin; write https://host:port, or *.")
        if (self.tls_certificate is None) != (self.tls_key is None):
            there, missing = ("tls_certificate", "tls_key") if self.tls_key is None else ("tls_key", "tls_certificate")
            raise ConfigError(
                f"{there} is given without {missing}; give both, or neither for connections in the clear."
            )
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("tls_client_ca is given without tls_certificate; give tls_certificate and tls_key too.")
        if self.key_file is not None and self.anonymous_limits != KeyLimits():
            raise ConfigError(
                "anonymous_* limits are given with a key_file, which lets nobody in without a key; drop one."
            )
        if self.allow_model_changes and self.key_file is None:
            # An address proves nothing: whoever is behind a proxy or a browser here has that of this machine.
            raise ConfigError(
                "allow_model_changes is given without a key_file, so that everybody could; name one with an admin key."
            )
        if self.allowed_models is not None:
            if not self.allow_model_changes:
                raise ConfigError("allowed_models is given without allow_model_changes; give both, or neither.")
            source = read_models(self.allowed_models).get(self.name, self.model)
            if source not in (self.name, self.model):
                raise ConfigError(
                    f"allowed_models has {self.name}={source}, and {self.name!r} is the name of {self.model!r}, with "
                    "which the server begins; give one of them another name."
                )

    @property
    def anonymous_limits(self) -> KeyLimits:
        """What all callers together may do where there are no keys."""
        return KeyLimits(
            self.anonymous_requests_per_minute, self.anonymous_tokens_per_minute, self.anonymous_max_concurrent
        )

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins whose pages may call."""
        return _listed(self.allowed_origins)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names that HTTP answers to; none where nothing was said."""
        return _listed(self.allowed_hosts)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.model


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
