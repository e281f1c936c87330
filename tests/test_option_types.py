# SPDX-License-Identifier: Apache-2.0
"""Options of a type that they cannot have are told in one sentence, before anything is loaded."""

from dataclasses import fields
from pathlib import Path

import pytest

from metrale_jax import LLM
from metrale_jax.core.errors import ConfigError
from metrale_jax.engine.settings import EngineConfig
from metrale_jax.llm_config import LLMConfig
from metrale_jax.run_options import RunOptions


class Odd:
    """Nothing that any option is made of."""

    def __repr__(self):
        return "odd"


@pytest.mark.parametrize("config", [LLMConfig, EngineConfig, RunOptions])
def test_no_option_is_anything(config):
    for field in fields(config):
        # What takes a list is asked for the items' type.
        listed = "list" in str(field.type)
        for value in (Odd(), [Odd()] if listed else [], {}):
            with pytest.raises(ConfigError, match=rf"^{field.name}=.* is not [^.]*\.$"):
                config(**{field.name: value})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prefix_cache": "no"}, "prefix_cache='no' is not True or False; give one."),
        ({"prefix_cache": 0}, "prefix_cache=0 is not True or False; give one."),
        ({"dtype": []}, "dtype=[] is not text or None; give one."),
        ({"kv_dtype": 8}, "kv_dtype=8 is not text or None; give one."),
        ({"max_sequences": 2.0}, "max_sequences=2.0 is not an integer; give one."),
        ({"swap_mib": True}, "swap_mib=True is not an integer; give one."),
        ({"disk_cache": 3}, "disk_cache=3 is not text or a path or None; give one."),
        ({"block_size": "16"}, "block_size='16' is not an integer or None; give one."),
        ({"draft_layer_ids": ["a"]}, "draft_layer_ids=['a'] is not of int alone; give a list of these."),
        ({"draft_layer_ids": [True]}, "draft_layer_ids=[True] is not of int alone; give a list of these."),
        ({"tensor_parallel": None}, "tensor_parallel=None is not an integer; give one."),
    ],
    ids=str,
)
def test_a_wrong_type_is_named_with_its_value(options, words):
    with pytest.raises(ConfigError) as told:
        LLM("no-such-model", **options)
    assert str(told.value) == words


def test_what_options_are_made_of_is_accepted():
    LLMConfig(dtype="float32", disk_cache=Path("somewhere"), prefix_cache=False, snapshot_mib=None, swap_mib=0)
