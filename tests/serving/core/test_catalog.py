# SPDX-License-Identifier: Apache-2.0
"""What callers may have loaded is what the operator named, and paths are nobody's but the operator's."""

import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.llm_config import LLMConfig
from serving.core.calls import Caller, LoadCall
from serving.core.catalog import OPERATORS, Catalog, Wanted, read_models
from serving.core.errors import Kind, ServiceError

OWN = LLMConfig(
    dtype="float16",
    max_sequences=3,
    max_context_tokens=100,
    executables="programs.zip",
    proposer="eagle3",
    drafter="/drafter",
    num_drafts=2,
    draft_mode="always",
    compile_cache="/programs",
)
FIRST = Wanted("first", "/models/first", OWN)
CATALOG = Catalog(FIRST, True, {"second": "/models/second"})


def refused(call, catalog=CATALOG):
    with pytest.raises(ServiceError) as caught:
        catalog.wanted(call, FIRST)
    return caught.value


def test_changes_need_the_operators_leave_and_an_admin():
    CATALOG.refuse_unless_allowed(Caller(admin=True))
    for catalog, caller in ((CATALOG, Caller("alice")), (Catalog(FIRST), Caller(admin=True))):
        with pytest.raises(ServiceError) as caught:
            catalog.refuse_unless_allowed(caller)
        assert caught.value.kind is Kind.FORBIDDEN


@pytest.mark.parametrize("model", ["/models/second", "/etc/passwd", "third", "org/model", "../first", "second "])
def test_only_names_that_the_operator_gave_are_loaded(model):
    error = refused(LoadCall(model))
    assert error.kind is Kind.FORBIDDEN and error.field == "model" and "first, second" in str(error)
    assert "/models" not in str(error).replace(model, "")


def test_options_that_are_paths_are_the_operators():
    expected = {"swap_dir", "disk_cache", "compile_cache", "cache_dir", "request_log", "executables", "drafter"}
    assert expected == OPERATORS
    for name in OPERATORS:
        error = refused(LoadCall("first", options={name: "/etc"}))
        assert error.kind is Kind.FORBIDDEN and name in str(error)


@pytest.mark.parametrize(
    "options", [{"max_sequence": 1}, {"max_sequences": "many"}, {"kv_cache_mib": 0}, {"max_sequences": 0}]
)
def test_options_that_are_wrong_are_told_before_anything_is_loaded(options):
    error = refused(LoadCall("second", options=options))
    assert error.kind is Kind.INVALID and error.field == "options"


def test_the_models_own_options_hold_and_others_get_none_that_fit_one_model_alone():
    assert CATALOG.wanted(LoadCall("first"), FIRST) == FIRST
    other = CATALOG.wanted(LoadCall("second", options={"max_sequences": 5}), FIRST)
    assert (other.name, other.source) == ("second", "/models/second")
    assert other.config == LLMConfig(dtype="float16", max_sequences=5, compile_cache="/programs")
    plain = CATALOG.wanted(LoadCall("first", options={"dtype": None, "max_sequences": None}), FIRST)
    assert (plain.config.dtype, plain.config.max_sequences) == (None, LLMConfig().max_sequences)


def test_without_a_name_it_is_the_last_one_as_it_was():
    last = Wanted("other", "/models/second", LLMConfig(max_sequences=7))
    assert CATALOG.wanted(LoadCall(), last) == last
    assert CATALOG.wanted(LoadCall(options={"dtype": "float32"}), last).config.max_sequences == 7


def test_prefixes_on_disk_are_kept_apart():
    catalog = Catalog(Wanted("a", "a", LLMConfig(disk_cache="/kept")), True, {"b": "b", "c": "c"})
    places = {str(catalog.wanted(LoadCall(name), catalog.first).config.disk_cache) for name in "abc"}
    assert len(places) == 3 and all(place.startswith("/kept") for place in places)


@pytest.mark.parametrize("name", [" x", "a\nb", "x" * 129, "\x00"])
def test_a_name_that_clients_could_not_use_is_refused(name):
    error = refused(LoadCall("second", served_name=name))
    assert error.kind is Kind.INVALID and error.field == "served_name"
    assert CATALOG.wanted(LoadCall("second", served_name="first"), FIRST).name == "first"


def test_names_and_sources_are_read():
    assert read_models("a=/x/y=z, b ,org/c") == {"a": "/x/y=z", "b": "b", "org/c": "org/c"}
    for text in ("", "a,,b", "=x", "a=", "a,a=b"):
        with pytest.raises(ConfigError, match="allowed_models"):
            read_models(text)
