# SPDX-License-Identifier: Apache-2.0
"""One rule says which setting holds, and what is no setting is told with the nearest that is one."""

import argparse
import tomllib
from dataclasses import fields

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.flags import add_flags, chosen
from metrale_jax.llm_config import LLMConfig
from serving.config import ServeConfig
from serving.core.keys import KeyLimits
from serving.derived_settings import catalog
from serving.settings_sources import Resolved, printed, read_file, resolve


def test_a_flag_beats_the_environment_that_beats_the_file_that_beats_the_default():
    given = ({"grpc_port": 1}, {"METRALE_GRPC_PORT": "2", "PATH": "/bin"}, {"grpc_port": 3}, {"grpc_port": 4})
    for first, origin in enumerate(("flag", "environment", "file", "default")):
        resolved = resolve(*({} if place < first else source for place, source in enumerate(given)))
        assert (resolved.serve.grpc_port, resolved.origins["grpc_port"]) == (first + 1, origin)
    nothing = resolve({}, {}, {})
    assert nothing.serve == ServeConfig() and nothing.llm == LLMConfig()
    assert set(nothing.origins.values()) == {"default"}


def test_no_two_settings_share_a_name():
    names = [field.name for config in (ServeConfig, LLMConfig) for field in fields(config)]
    assert len(names) == len(set(names))


def test_variables_are_read_by_the_type_of_their_setting():
    resolved = resolve(
        {},
        {
            "METRALE_MODEL": "a/b",
            "METRALE_REFLECTION": "No",
            "METRALE_GRACE_S": "2",
            "METRALE_MAX_CONTEXT_TOKENS": "64",
            "METRALE_KEY_FILE": "",
            "METRALE_CONFIG": "/etc/x.toml",
        },
        {},
    )
    assert (resolved.serve.model, resolved.serve.reflection, resolved.serve.grace_s) == ("a/b", False, 2.0)
    assert resolved.llm.max_context_tokens == 64 and resolved.serve.key_file is None
    assert resolved.origins["key_file"] == "default"


@pytest.mark.parametrize(
    "environment, file, words",
    [
        ({"METRALE_GRPC_PROT": "1"}, {}, "METRALE_GRPC_PORT is the nearest"),
        ({"METRALE_grpc_port": "1"}, {}, "METRALE_GRPC_PORT is the nearest"),
        ({"METRALE_ZZZZZZZ": "1"}, {}, "--print-config"),
        ({"METRALE_GRPC_PORT": "x"}, {}, "METRALE_GRPC_PORT='x' is not an integer"),
        ({"METRALE_GRACE_S": "soon"}, {}, "is not a number"),
        ({"METRALE_WARM_UP": "2"}, {}, "is not true or false"),
        ({}, {"grpc-port": 1}, "grpc_port is the nearest"),
        ({}, {"serve": {"grpc_port": 1}}, "'serve' is no setting"),
        ({}, {"max_sequence": 1}, "max_sequences is the nearest"),
        ({}, {"grpc_port": "1"}, "grpc_port='1' is not an integer"),
        ({}, {"grpc_port": True}, "grpc_port=True is not an integer"),
        ({}, {"grpc_port": 65536}, "above 65535"),
        ({}, {"http_port": 65536}, "above 65535"),
        ({"METRALE_HTTP_PORT": "x"}, {}, "METRALE_HTTP_PORT='x' is not an integer"),
        ({}, {"allowed_origins": "*"}, "without http_port"),
        ({}, {"data_dir": "data"}, "without http_port"),
        ({}, {"max_file_mib": 0}, "max_file_mib=0 is too small"),
        ({}, {"allowed_origins": "https://a.example, b", "http_port": 0}, "'b', which is no origin"),
        ({}, {"grace_s": -1}, "grace_s=-1"),
        ({"METRALE_GRACE_S": "nan"}, {}, "grace_s=nan"),
        ({}, {"max_message_mib": 0}, "max_message_mib=0"),
        ({}, {"keepalive_s": 0}, "keepalive_s=0"),
        ({}, {"host": ""}, "host=''"),
        ({}, {"log_format": "xml"}, "json, text"),
        ({}, {"tls_key": "k"}, "tls_key is given without tls_certificate"),
        ({}, {"tls_certificate": "k"}, "tls_certificate is given without tls_key"),
        ({}, {"tls_client_ca": "k"}, "without tls_certificate"),
        ({}, {"key_file": "k", "anonymous_max_concurrent": 1}, "anonymous_*"),
        ({}, {"allow_model_changes": True}, "without a key_file"),
        ({}, {"allowed_models": "a"}, "without allow_model_changes"),
        ({}, {"allow_model_changes": True, "key_file": "k", "allowed_models": "smollm2-135m=/b"}, "another name"),
        ({}, {"allow_model_changes": True, "key_file": "k", "allowed_models": "a=b,"}, "allowed_models='a=b,'"),
    ],
)
def test_a_mistake_is_told_with_its_name(environment, file, words):
    with pytest.raises(ConfigError) as told:
        resolve({}, environment, file)
    assert words in str(told.value) and str(told.value).endswith(".")


def test_what_is_printed_says_where_it_came_from_and_is_a_config_file(tmp_path):
    resolved = resolve(
        {"served_name": 'a "name"\n\x7fé'},
        {"METRALE_REFLECTION": "0"},
        {"kv_cache_mib": 64, "tls_key": "k", "tls_certificate": "c"},
        {"compile_cache": tmp_path},
    )
    text = printed(resolved)
    lines = text.splitlines()
    assert "reflection = false  # environment" in lines and "kv_cache_mib = 64  # file" in lines
    assert "grpc_port = 50051  # default" in lines and "# key_file is not set" in lines
    (tmp_path / "again.toml").write_text(text, encoding="utf-8")
    again = resolve({}, {}, read_file(tmp_path / "again.toml"))
    assert again.serve == resolved.serve
    assert {**vars(again.llm), "compile_cache": None} == {**vars(resolved.llm), "compile_cache": None}
    assert again.llm.compile_cache == str(tmp_path)
    assert set(tomllib.loads(text)) | {line.split()[1] for line in lines if "is not set" in line} == set(again.origins)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_file(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text("a = \n")
    with pytest.raises(ConfigError, match="line 1"):
        read_file(tmp_path / "a.toml")


def test_every_setting_has_a_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    given = parser.parse_args(["--grpc-port", "7", "--no-reflection", "--grace-s", "1.5", "--key-file", "k"])
    assert chosen(given, ServeConfig) == {"grpc_port": 7, "reflection": False, "grace_s": 1.5, "key_file": "k"}
    options = {option for action in parser._actions for option in action.option_strings}
    assert options >= {"--" + field.name.replace("_", "-") for field in fields(ServeConfig)}


def test_a_front_without_a_port_is_not_there_and_one_has_to_be():
    assert (ServeConfig().grpc_port, ServeConfig().http_port) == (50051, None)
    assert ServeConfig(grpc_port=None, http_port=0).http_port == 0
    with pytest.raises(ConfigError, match="nobody could call"):
        ServeConfig(grpc_port=None)


@pytest.mark.parametrize("word", ["none", "off", "None"])
def test_a_front_that_is_there_by_default_can_be_switched_off(word, tmp_path):
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    add_flags(parser, LLMConfig)
    flags = chosen(parser.parse_args(["--grpc-port", word]), ServeConfig)
    for given in ((flags, {}, {}), ({}, {"METRALE_GRPC_PORT": word}, {}), ({}, {}, {"grpc_port": word})):
        resolved = resolve(given[0], given[1], {"http_port": 0} | given[2])
        assert (resolved.serve.grpc_port, resolved.serve.http_port) == (None, 0)
        (tmp_path / "again.toml").write_text(printed(resolved), encoding="utf-8")
        assert resolve({}, {}, read_file(tmp_path / "again.toml")).serve == resolved.serve
    assert (
        resolve({}, {"METRALE_HTTP_PORT": word, "METRALE_BLOCK_SIZE": word}, {"http_port": 1}).serve.http_port is None
    )
    with pytest.raises(ConfigError, match="side_port='none'"):
        resolve({}, {}, {"side_port": "none"})


def test_the_models_own_name_may_stand_among_those_allowed():
    changing = {"allow_model_changes": True, "key_file": "k"}
    for given in ("a=/b,smollm2-135m", "smollm2-135m=smollm2-135m"):
        assert ServeConfig(**changing, allowed_models=given).allowed_models == given
    config = ServeConfig("/models/a", served_name="a", **changing, allowed_models="b,a=/models/a")
    resolved = Resolved(config, LLMConfig(), {})
    assert catalog(resolved).names == ("a", "b") and catalog(resolved).first.source == "/models/a"


def test_origins_stand_between_commas():
    assert ServeConfig(http_port=0).origins == ()
    config = ServeConfig(http_port=0, allowed_origins="https://a.example, http://localhost:3000,")
    assert config.origins == ("https://a.example", "http://localhost:3000")


def test_limits_of_those_without_a_key_are_a_keys_limits():
    config = ServeConfig(anonymous_requests_per_minute=1, anonymous_tokens_per_minute=2, anonymous_max_concurrent=3)
    assert config.anonymous_limits == KeyLimits(1, 2, 3)
    assert config.name == "smollm2-135m" and ServeConfig(served_name="x").name == "x"
