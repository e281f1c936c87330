# SPDX-License-Identifier: Apache-2.0
"""The server on Ray Serve: two replicas on a local Ray, over HTTP, of which one is killed."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from metrale_jax import LLM, SamplingParams
from tests.serving.ray_serve_run import LIMITS, NUM_CHATS
from tests.serving.tiny_chat import write_tiny_chat


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_chat(tmp_path_factory.mktemp("ray") / "model")


@pytest.fixture(scope="module")
def told(model):
    """What the run told."""
    # Ray listens on all interfaces; in a network namespace of its own nothing hears it, where one can be had.
    alone = ["unshare", "-rn", "bash", "-c", 'ip link set lo up && exec "$@"', "-"]
    command = [sys.executable, "-m", "tests.serving.ray_serve_run", str(model)]
    if shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        command = [*alone, *command]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"refused"')))


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_calls_go_through_with_the_tokens_of_the_model_alone(told, model):
    llm = LLM(model, **LIMITS)
    whole = [answer for status, answer in [*told["whole"], *told["after"]] if status == 200]
    answers = [answer for chat in told["chats"] for answer in chat] + whole
    for answer in answers:
        (choice,) = answer["choices"]
        params = SamplingParams(temperature=0, max_tokens=len(choice["token_ids"]), ignore_eos=True)
        (alone,) = llm.generate([choice["prompt_token_ids"]], params)
        assert list(alone.token_ids) == choice["token_ids"]
    assert [card["id"] for card in told["models"]["data"]] == ["tiny"]


def test_mistakes_are_answered_by_a_replica_and_what_each_would_have_for_itself_is_not_served(told):
    assert told["wrong"] == [400, 404, 404]


def test_chats_are_spread_and_their_turns_stay_where_their_prefix_is(told):
    assert [cached(first) for first, _ in told["chats"]] == [0] * NUM_CHATS
    assert all(cached(second) > 150 for _, second in told["chats"])
    assert len(told["calls"]) == 2 and min(told["calls"]) >= NUM_CHATS, "two turns of half of the chats at least"


def test_a_stream_on_a_replica_that_dies_ends_with_an_error_and_the_other_goes_on(told):
    broken, whole = sorted(told["streams"], key=lambda events: events[-1] == "[DONE]")
    assert whole[-1] == "[DONE]" and "error" not in json.loads(whole[-2])
    error = json.loads(broken[-1])["error"]
    assert error["type"] == "service_unavailable_error" and "send it again" in error["message"]
    assert len(broken) > 1, "it had begun"


def test_calls_that_had_not_begun_are_answered_by_the_other_replica_or_told_to_come_again(told):
    for status, answer in told["whole"]:
        assert status == 200 or (status == 503 and "again" in answer["error"]["message"]), answer
    assert any(status == 200 for status, _ in told["whole"])


def test_after_a_death_a_prompt_goes_to_who_is_there_and_stays(told):
    assert [status for status, _ in told["after"]] == [200] * 3
    assert all(cached(answer) > 150 for _, answer in told["after"][1:])


def test_arguments_of_the_application_are_settings_and_mistakes_are_told(told):
    listening, unknown, no_number, too_small = told["refused"]
    assert "http_port is for a server that stands alone" in listening
    assert "METRALE_MAX_SEQUENCES is the nearest" in unknown
    assert "num_replicas='two' is not a number" in no_number and "max_imbalance=-1" in too_small
