# SPDX-License-Identifier: Apache-2.0
"""Errors speak of the fields that the caller wrote, whatever they are called within."""

import pytest

from serving.core.errors import Kind, ServiceError
from tests.serving.http.fronts import fronted, run
from tests.serving.scripted import ScriptedService

CHAT, COMPLETIONS = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    (
        "/v1/completions",
        {"prompt": "a"},
    ),
)
RESPONSES, MESSAGES = ("/v1/responses", {"input": "a"}), ("/v1/messages", {**CHAT[1], "max_tokens": 9})
FORM = {"type": "json_schema", "schema": {"type": "object"}}
GIVEN = [
    (CHAT, {"response_format": FORM | {"json_schema": FORM}}, "json_schema", "response_format.json_schema.schema"),
    (
        COMPLETIONS,
        {"response_format": FORM | {"json_schema": FORM}},
        "json_schema",
        "response_format.json_schema.schema",
    ),
    (CHAT, {"guided_regex": "a"}, "regex", "guided_regex"),
    (CHAT, {"structured_outputs": {"json": {}}}, "json_schema", "structured_outputs.json"),
    (CHAT, {"json_schema": {}}, "json_schema", "json_schema"),
    (RESPONSES, {"text": {"format": FORM}}, "json_schema", "text.format.schema"),
    (MESSAGES, {"output_config": {"format": FORM}}, "json_schema", "output_config.format.schema"),
    (MESSAGES, {"output_format": FORM}, "json_schema", "output_format.schema"),
]
WRONG = [
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"guided_choice": []}, "guided_choice"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "more", "ours", "theirs"), GIVEN)
def test_what_the_engine_refuses_is_told_under_the_callers_name(api, more, ours, theirs, stream):
    error = ServiceError(Kind.INVALID, f"{ours}='x' is refused (no); mend it.", field=f"params.{ours}")

    async def act():
        async with fronted(ScriptedService((error,))) as world:
            told = await world.client.post(api[0], json={**api[1], **more, "stream": stream})
            assert told.status_code == 400
            told = told.json()["error"]
            assert told["message"] == f"{theirs}='x' is refused (no); mend it."
            assert told.get("param", theirs) == theirs

    run(act())


@pytest.mark.parametrize(("api", "more", "theirs"), WRONG)
def test_so_is_what_the_body_has_wrong(api, more, theirs):
    async def act():
        async with fronted(ScriptedService()) as world:
            told = await world.client.post(api[0], json={**api[1], **more})
            assert told.status_code == 400 and told.json()["error"]["message"].startswith(theirs)
            assert told.json()["error"].get("param", theirs) == theirs

    run(act())
