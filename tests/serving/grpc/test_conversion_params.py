# SPDX-License-Identifier: Apache-2.0
"""Every field of `SamplingParams` arrives, and what is wrong is named."""

import dataclasses
import math
import struct

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_jax.sampling.params import SamplingParams
from serving.core.errors import Kind, ServiceError
from serving.grpc.conversion_params import sampling_params, shortest
from serving.grpc.stubs import generate_pb2 as pb

# Field of SamplingParams -> (fields of the message, its value): none of them is the default.
GIVEN = {
    "n": (dict(n=3), 3),
    "temperature": (dict(temperature=0.7), 0.7),
    "top_n_sigma": (dict(top_n_sigma=1.1), 1.1),
    "top_k": (dict(top_k=-1), -1),
    "top_p": (dict(top_p=0.95), 0.95),
    "min_p": (dict(min_p=0.05), 0.05),
    "typical_p": (dict(typical_p=0.3), 0.3),
    "repetition_penalty": (dict(repetition_penalty=1.2), 1.2),
    "presence_penalty": (dict(presence_penalty=-0.1), -0.1),
    "frequency_penalty": (dict(frequency_penalty=1.9), 1.9),
    "logit_bias": (dict(logit_bias={9: 0.1, 3: -99.9}), ((3, -99.9), (9, 0.1))),
    "allowed_token_ids": (dict(allowed_token_ids=pb.TokenIds(ids=[4, 5])), (4, 5)),
    "banned_token_ids": (dict(banned_token_ids=[7, 2]), (7, 2)),
    "bad_words": (
        dict(bad_words=[pb.BadWord(text="no"), pb.BadWord(token_ids=pb.TokenIds(ids=[1, 2]))]),
        ("no", (1, 2)),
    ),
    "seed": (dict(seed=2**64 - 1), 2**64 - 1),
    "max_tokens": (dict(max_tokens_unlimited=True), None),
    "min_tokens": (dict(min_tokens=2), 2),
    "stop": (dict(stop=["\n\n", "END"]), ("\n\n", "END")),
    "stop_token_ids": (dict(stop_token_ids=[11]), (11,)),
    "ignore_eos": (dict(ignore_eos=True), True),
    "include_stop_str_in_output": (dict(include_stop_str_in_output=True), True),
    "skip_special_tokens": (dict(skip_special_tokens=False), False),
    "logprobs": (dict(logprobs=0), 0),
    "prompt_logprobs": (dict(prompt_logprobs=20), 20),
    "echo": (dict(echo=True), True),
    "json_schema": (dict(json_schema='{"type": "object"}'), '{"type": "object"}'),
    "regex": (dict(regex="a+"), "a+"),
    "choice": (dict(choice=pb.Choices(texts=["yes", "no"])), ("yes", "no")),
    "grammar": (dict(grammar="start: /a/"), "start: /a/"),
    "beam_width": (dict(beam_width=4), 4),
    "length_penalty": (dict(length_penalty=0.6), 0.6),
    "early_stopping": (dict(early_stopping=pb.EARLY_STOPPING_NEVER), "never"),
    "priority": (dict(priority=-5), -5),
    "deadline_s": (dict(deadline_s=0.1), 0.1),
    "cache_salt": (dict(cache_salt="tenant"), "tenant"),
}


def over_the_wire(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplingParams)])
def test_each_field_of_the_params_arrives_and_no_other_moves(field):
    fields, value = GIVEN[field]
    params = sampling_params(over_the_wire(pb.SamplingParams(**fields)), "params")
    assert getattr(SamplingParams(), field) != value
    assert params == SamplingParams(**{field: value})


def test_the_message_has_the_fields_of_the_params_and_one_more():
    own = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == own | {"max_tokens_unlimited"}


def test_no_message_gives_the_defaults():
    assert sampling_params(pb.SamplingParams(), "params") == SamplingParams()


def test_a_count_of_tokens_arrives():
    assert sampling_params(pb.SamplingParams(max_tokens=77), "params").max_tokens == 77


def test_what_is_set_to_its_zero_is_not_taken_for_unset():
    params = sampling_params(over_the_wire(pb.SamplingParams(temperature=0, skip_special_tokens=False)), "params")
    assert (params.temperature, params.skip_special_tokens) == (0.0, False)


@settings(deadline=None)
@given(st.integers(-999_999, 999_999), st.integers(-12, 3))
def test_a_decimal_of_few_digits_comes_back_from_float32(digits, exponent):
    decimal = float(f"{digits}e{exponent}")
    assert shortest(struct.unpack("f", struct.pack("f", decimal))[0]) == decimal


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_the_shortest_decimal_is_the_same_float32(value):
    assert np.float32(shortest(value)) == np.float32(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(value):
    assert fault_of(pb.SamplingParams(temperature=value)) == "params.temperature"


WRONG = {
    "params.n": dict(n=0),
    "params.top_p": dict(top_p=1.5),
    "params.max_tokens": dict(max_tokens=0),
    "params.max_tokens_unlimited": dict(max_tokens_unlimited=True, max_tokens=3),
    "params.min_tokens": dict(min_tokens=17),
    "params.logprobs": dict(logprobs=21),
    "params.logit_bias": dict(logit_bias={2**31: 1.0}),
    "params.stop_token_ids": dict(stop_token_ids=[2**32 - 1]),
    "params.banned_token_ids": dict(banned_token_ids=[2**31]),
    "params.allowed_token_ids": dict(allowed_token_ids=pb.TokenIds()),
    "params.allowed_token_ids.ids": dict(allowed_token_ids=pb.TokenIds(ids=[2**31])),
    "params.bad_words[1]": dict(bad_words=[pb.BadWord(text="a"), pb.BadWord()]),
    "params.bad_words[0].token_ids.ids": dict(bad_words=[pb.BadWord(token_ids=pb.TokenIds(ids=[2**31]))]),
    "params.bad_words": dict(bad_words=[pb.BadWord(text=" ")]),
    "params.early_stopping": dict(early_stopping=9),
    "params.choice": dict(choice=pb.Choices()),
    "params.json_schema": dict(json_schema="{"),
    "params.deadline_s": dict(deadline_s=-1),
    "params.stop": dict(stop=[""]),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_named(field):
    assert fault_of(pb.SamplingParams(**WRONG[field])) == field


def test_a_bias_that_is_no_number_is_refused():
    assert fault_of(pb.SamplingParams(logit_bias={1: math.nan})) == "params.logit_bias"


def fault_of(message: pb.SamplingParams) -> str:
    with pytest.raises(ServiceError) as caught:
        sampling_params(over_the_wire(message), "params")
    assert caught.value.kind is Kind.INVALID
    return caught.value.field
