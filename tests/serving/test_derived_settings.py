# SPDX-License-Identifier: Apache-2.0
"""Each part is told what the whole was told."""

from dataclasses import fields, replace

import pytest

from metrale_jax.core.errors import ConfigError
from serving.config import ServeConfig
from serving.core.service import ServiceSettings
from serving.core.tls import TlsSettings
from serving.derived_settings import (
    catalog,
    exposed,
    grpc_settings,
    http_settings,
    llm_settings,
    service_settings,
    store_settings,
)
from serving.grpc.settings import GrpcSettings
from serving.http.settings import HttpSettings
from serving.settings_sources import resolve
from serving.store.settings import StoreSettings


def test_defaults_are_those_of_the_parts():
    config = ServeConfig(served_name="m")
    assert service_settings(config) == ServiceSettings("m")
    own, derived = GrpcSettings(version="1"), grpc_settings(config, "1")
    different = {field.name for field in fields(own) if getattr(own, field.name) != getattr(derived, field.name)}
    assert different <= {"max_send_message_bytes"}
    assert replace(http_settings(ServeConfig(http_port=8000)), allowed_hosts=()) == HttpSettings()


def test_what_is_set_reaches_its_part(tmp_path):
    for name in ("certificate", "key", "ca"):
        (tmp_path / name).write_text(name)
    config = ServeConfig(
        host="::1",
        grpc_port=7,
        http_port=8,
        allowed_origins="https://a.example",
        tls_certificate=tmp_path / "certificate",
        tls_key=tmp_path / "key",
        tls_client_ca=tmp_path / "ca",
        max_message_mib=3,
        keepalive_s=1.0,
        keepalive_timeout_s=2.0,
        min_ping_interval_s=3.0,
        max_streams=4,
        max_requests_per_stream=5,
        reflection=False,
        compression=True,
        timeout_s=6.0,
        max_timeout_s=7.0,
        stuck_after_s=8.0,
        compile_after_s=9.0,
        log_prompts=True,
        warm_up=False,
        prepare_threads=3,
        load_after_s=10.0,
    )
    tls = TlsSettings(b"certificate", b"key", b"ca")
    assert http_settings(config) == HttpSettings("::1", 8, tls, 3 << 20, allowed_origins=("https://a.example",))
    alone = ("127.0.0.1", "localhost", "::1")
    for told, hosts in (({}, alone), ({"host": "::1"}, alone), ({"host": "0.0.0.0"}, ()), ({"key_file": "k"}, ())):
        assert http_settings(ServeConfig(http_port=8, **told)).allowed_hosts == hosts
    assert http_settings(ServeConfig(http_port=8, allowed_hosts="a.example, b")).allowed_hosts == ("a.example", "b")
    assert grpc_settings(config, "v") == GrpcSettings("::1", 7, tls, 3 << 20, 3 << 20, 1, 2, 3, 4, 5, False, True, "v")
    assert service_settings(config) == ServiceSettings("smollm2-135m", 6.0, 7.0, 8.0, 9.0, True, False, 3, 10.0)
    with pytest.raises(ConfigError, match="tls_key"):
        grpc_settings(ServeConfig(tls_certificate=tmp_path / "certificate", tls_key=tmp_path / "none"), "v")


def test_models_that_there_may_be_are_those_that_the_operator_named():
    told = {
        "model": "/m/a",
        "key_file": "k",
        "allow_model_changes": True,
        "allowed_models": "b = /m/b, c",
        "dtype": "float16",
    }
    made = catalog(resolve(told, {}, {}))
    assert (made.names, made.allow_changes) == (("/m/a", "b", "c"), True)
    assert (made.first.source, made.first.config.dtype, dict(made.others)) == (
        "/m/a",
        "float16",
        {"b": "/m/b", "c": "c"},
    )
    alone = catalog(resolve({"served_name": "x"}, {}, {}))
    assert (alone.names, alone.allow_changes, alone.first.source) == (("x",), False, "smollm2-135m")


def test_files_are_kept_where_a_directory_is_given(tmp_path):
    assert store_settings(ServeConfig()) is None
    kept = ServeConfig(http_port=1, data_dir=str(tmp_path))
    assert store_settings(kept) == StoreSettings(tmp_path)
    kept = replace(kept, max_file_mib=1, max_stored_mib=2, keep_files_h=3)
    assert store_settings(kept) == StoreSettings(tmp_path, 1 << 20, 2 << 20, 3 * 3600)


def test_compiled_programs_are_kept_unless_told_otherwise(tmp_path):
    defaults = {"compile_cache": tmp_path}
    assert llm_settings(resolve({}, {}, {}, defaults)).compile_cache == tmp_path
    assert llm_settings(resolve({"keep_programs": False}, {}, {}, defaults)).compile_cache is None


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "::1"}, ""),
        ({"host": "127.3.2.1"}, ""),
        ({"host": "0.0.0.0"}, "everybody"),
        ({"host": "some.name"}, "everybody"),
        ({"host": "::", "tls_certificate": "c", "tls_key": "k"}, "everybody"),
        ({"host": "0.0.0.0", "key_file": "k"}, "in the clear"),
        ({"host": "0.0.0.0", "key_file": "k", "tls_certificate": "c", "tls_key": "k"}, ""),
        ({"host": "0.0.0.0", "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"}, ""),
    ],
)
def test_what_a_stranger_could_do_is_warned_of(settings, words):
    told = exposed(ServeConfig(**settings))
    assert words in told and bool(told) is bool(words)
