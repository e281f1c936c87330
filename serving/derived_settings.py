# SPDX-License-Identifier: Apache-2.0
"""What each part of the server is told, out of the settings of the whole."""

from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from metrale_jax.core.errors import ConfigError
from metrale_jax.llm_config import LLMConfig
from serving.config import ServeConfig
from serving.core.catalog import Catalog, Wanted, read_models
from serving.core.service import ServiceSettings
from serving.core.tls import TlsSettings
from serving.grpc.settings import MIB, GrpcSettings
from serving.http.settings import HttpSettings
from serving.settings_sources import Resolved
from serving.store.settings import StoreSettings

# What browsers call a loopback address by; an address of 127.0.0.0/8 counts as the first.
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def service_settings(config: ServeConfig) -> ServiceSettings:
    """The service's."""
    return ServiceSettings(
        served_name=config.name,
        timeout_s=config.timeout_s,
        max_timeout_s=config.max_timeout_s,
        stuck_after_s=config.stuck_after_s,
        compile_after_s=config.compile_after_s,
        keep_prompts=config.log_prompts,
        warm_up=config.warm_up,
        threads=config.prepare_threads,
        load_after_s=config.load_after_s,
    )


def grpc_settings(config: ServeConfig, version: str) -> GrpcSettings:
    """The gRPC front's. Raises `ConfigError` for a TLS file that cannot be read."""
    return GrpcSettings(
        host=config.host,
        port=config.grpc_port,
        tls=_tls(config),
        max_receive_message_bytes=config.max_message_mib * MIB,
        max_send_message_bytes=config.max_message_mib * MIB,
        keepalive_time_s=config.keepalive_s,
        keepalive_timeout_s=config.keepalive_timeout_s,
        min_ping_interval_s=config.min_ping_interval_s,
        max_concurrent_streams=config.max_streams,
        max_requests_per_stream=config.max_requests_per_stream,
        reflection=config.reflection,
        compression=config.compression,
        version=version,
    )


def http_settings(config: ServeConfig) -> HttpSettings:
    """The HTTP front's. Raises `ConfigError` for a TLS file that cannot be read."""
    return HttpSettings(
        host=config.host,
        port=config.http_port,
        tls=_tls(config),
        max_body_bytes=config.max_message_mib * MIB,
        allowed_origins=config.origins,
        allowed_hosts=config.hosts or _own_hosts(config),
        page=config.page,
        tool_dialect=config.tool_dialect or "",
    )


def store_settings(config: ServeConfig) -> StoreSettings | None:
    """Those of where files and batches are kept; None where none are."""
    if config.data_dir is None:
        return None
    return StoreSettings(
        directory=Path(config.data_dir),
        max_file_bytes=config.max_file_mib * MIB,
        max_owner_bytes=config.max_stored_mib * MIB,
        keep_s=config.keep_files_h * 3600,
    )


def llm_settings(resolved: Resolved) -> LLMConfig:
    """The model's."""
    return resolved.llm if resolved.serve.keep_programs else replace(resolved.llm, compile_cache=None)


def catalog(resolved: Resolved) -> Catalog:
    """The models that there may be."""
    config = resolved.serve
    first = Wanted(config.name, config.model, llm_settings(resolved))
    others = {} if config.allowed_models is None else read_models(config.allowed_models)
    return Catalog(first, config.allow_model_changes, others)


def exposed(config: ServeConfig) -> str:
    """What a stranger on the network could do, for a warning; "" where none can reach it or nothing is amiss."""
    found = []
    if not _is_loopback(config.host):
        if config.key_file is None and config.tls_client_ca is None:
            found.append(
                f"everybody who reaches {config.host} may call; name a key_file or a tls_client_ca, or host 127.0.0.1."
            )
        if config.tls_certificate is None:
            found.append(
                f"what is said crosses the network to {config.host} in the clear; name tls_certificate and tls_key."
            )
    if config.side_port and not _is_loopback(config.side_host):
        found.append(f"everybody who reaches {config.side_host} may read the metrics; use side_host 127.0.0.1.")
    return " ".join(found)


def _own_hosts(config: ServeConfig) -> tuple[str, ...]:
    """The names of a server that only its machine reaches and that asks for no key; none, where any will do."""
    open_to_all = config.key_file is None and config.tls_client_ca is None
    return LOOPBACK if open_to_all and _is_loopback(config.host) else ()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tls(config: ServeConfig) -> TlsSettings | None:
    if config.tls_certificate is None:
        return None
    client_ca = None if config.tls_client_ca is None else _pem("tls_client_ca", config.tls_client_ca)
    return TlsSettings(_pem("tls_certificate", config.tls_certificate), _pem("tls_key", config.tls_key), client_ca)


def _pem(name: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be read ({error.strerror}); name a PEM file.") from None
