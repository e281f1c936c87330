# SPDX-License-Identifier: Apache-2.0
"""Prompts and parameters as they go out, without a server."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from metrale_jax.sampling.params import STRUCTURES as SERVED_STRUCTURES
from metrale_jax.sampling.params import SamplingParams
from serving.client import Chat, Text, calls
from serving.client.params import NAMES, STRUCTURES, params_message
from serving.client.prompts import prompt_message
from serving.grpc.stubs import generate_pb2 as pb

ROOT = Path(__file__).parents[3]


def test_importing_the_client_imports_no_model_and_no_jax():
    code = (
        "import sys, serving.client\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'numpy', 'flax', 'metrale_jax'}\n"
        "found |= {name for name in sys.modules if name.startswith(('serving.core', 'serving.batch'))}\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_parameters_are_those_of_the_engine_and_of_the_contract():
    assert set(NAMES) == {field.name for field in fields(SamplingParams)}
    assert set(NAMES) | {"max_tokens_unlimited"} == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert STRUCTURES == SERVED_STRUCTURES


def test_parameters_keep_their_values():
    made = params_message(
        {
            "temperature": 0,
            "max_tokens": 64,
            "stop": ["a", "b"],
            "logit_bias": {3: 1.5, "4": -2},
            "allowed_token_ids": [1, 2],
            "banned_token_ids": (3,),
            "bad_words": ["no", [1, 2]],
            "seed": 2**64 - 1,
            "ignore_eos": True,
            "top_k": -1,
            "early_stopping": "never",
            "choice": ["yes", "no"],
            "deadline_s": 1.5,
        }
    )
    assert made.HasField("temperature") and made.temperature == 0
    assert list(made.stop) == ["a", "b"] and dict(made.logit_bias) == {3: 1.5, 4: -2}
    assert list(made.allowed_token_ids.ids) == [1, 2] and list(made.banned_token_ids) == [3]
    assert made.bad_words[0].text == "no" and list(made.bad_words[1].token_ids.ids) == [1, 2]
    assert made.seed == 2**64 - 1 and made.ignore_eos and made.top_k == -1
    assert made.early_stopping == pb.EARLY_STOPPING_NEVER and list(made.choice.texts) == ["yes", "no"]
    assert not made.HasField("top_p") and not made.max_tokens_unlimited


def test_none_is_the_default_but_for_the_limit_of_tokens():
    made = params_message({"max_tokens": None, "seed": None, "stop": None, "json_schema": None, "regex": "a+"})
    assert made.max_tokens_unlimited and not made.HasField("seed") and made.regex == "a+"


def test_an_empty_list_of_allowed_ids_is_sent_as_one():
    assert params_message({"allowed_token_ids": []}).HasField("allowed_token_ids")


def test_one_stop_string_is_a_stop():
    assert list(params_message({"stop": "END"}).stop) == ["END"]


@pytest.mark.parametrize("schema", [{"b": 1, "a": 2}, '{"b": 1, "a": 2}'], ids=["mapping", "text"])
def test_a_schema_keeps_the_order_of_its_properties(schema):
    assert list(json.loads(params_message({"json_schema": schema}).json_schema)) == ["b", "a"]


def test_an_unknown_parameter_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match="max_token is no parameter .* nearest is max_tokens"):
        params_message({"max_token": 3})
    with pytest.raises(TypeError, match="nearest is"):
        params_message({"q": 3})


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"temperature": "hot"}, TypeError),
        ({"n": 1.5}, TypeError),
        ({"n": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"stop": 3}, TypeError),
        ({"logit_bias": [1]}, TypeError),
        ({"logit_bias": {"x": 1}}, ValueError),
        ({"choice": "yes"}, TypeError),
        ({"bad_words": [[-1]]}, ValueError),
        ({"early_stopping": "maybe"}, ValueError),
    ],
    ids=str,
)
def test_what_does_not_fit_names_the_parameter(params, kind):
    with pytest.raises(kind, match=next(iter(params))):
        params_message(params)


def test_two_structures_are_refused_before_one_could_win():
    with pytest.raises(ValueError, match="json_schema and regex"):
        params_message({"json_schema": "{}", "regex": "a"})


def test_prompts_of_all_forms():
    assert prompt_message("a").text == "a" and not prompt_message("a").HasField("add_special_tokens")
    assert list(prompt_message([1, 2]).token_ids.ids) == [1, 2]
    assert list(prompt_message(range(3)).token_ids.ids) == [0, 1, 2]
    assert prompt_message([]).WhichOneof("input") == "token_ids"
    framed = prompt_message(Text("a", add_special_tokens=False))
    assert framed.HasField("add_special_tokens") and not framed.add_special_tokens


def test_a_chat_keeps_what_its_template_may_want():
    messages = [{"role": "user", "content": "Hi", "name": "Ann", "tool": {"id": 3}}]
    made = prompt_message(Chat(messages, add_generation_prompt=False, template={"mood": "dry"})).chat
    assert made.messages[0].name == "Ann" and made.messages[0].extra["tool"]["id"] == 3
    assert made.HasField("add_generation_prompt") and not made.add_generation_prompt
    assert dict(made.template) == {"mood": "dry"}
    assert prompt_message(messages).chat.messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [(3, TypeError), (b"a", TypeError), ({"role": "user"}, TypeError), (["a"], TypeError), ([-1], ValueError)],
    ids=str,
)
def test_what_is_no_prompt_is_refused(prompt, kind):
    with pytest.raises(kind, match=r"prompt"):
        prompt_message(prompt)


def test_a_message_without_text_is_refused():
    with pytest.raises(TypeError, match="content"):
        prompt_message([{"role": "user", "content": None}])


def test_one_prompt_is_no_list_of_them():
    for inputs in ("a", [1, 2], [{"role": "user", "content": "a"}]):
        with pytest.raises(TypeError, match="inputs is one prompt"):
            calls.embed(inputs, "mean", True, "", "")
    with pytest.raises(ValueError, match="pooling"):
        calls.embed(["a"], "max", True, "", "")


def test_branches_differ_from_the_common_parameters():
    request = calls.fork(
        "a", [{"continuation": " b", "seed": 2}, {"max_tokens": None}], "", "", {"max_tokens": 3}
    ).request
    first, second = request.branches
    assert (first.continuation.text, first.params.seed, first.params.max_tokens) == (" b", 2, 3)
    assert not second.HasField("continuation") and second.params.max_tokens_unlimited
    with pytest.raises(TypeError, match="continuation is a chat"):
        calls.fork("a", [{"continuation": [{"role": "user", "content": "a"}]}], "", "", {})
