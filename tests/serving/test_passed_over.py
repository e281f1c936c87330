# SPDX-License-Identifier: Apache-2.0
"""Every field that clients of OpenAI and Anthropic can send is served, passed over, or refused with a way out."""

from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.types.beta import message_create_params as beta
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from metrale_jax.core.errors import RequestError
from serving.http import chat, completions, embeddings
from serving.http.chat_schemas import COUNT_ABOUT, MESSAGES_ABOUT, RESPONSES_ABOUT
from serving.passed_over import MESSAGES_REFUSED, OPENAI_REFUSED, RESPONSES_REFUSED, Refusal, refuse

SENT = {
    "chat": (ChatParams, chat.ABOUT, OPENAI_REFUSED),
    "completions": (CompletionCreateParamsBase, completions.ABOUT, OPENAI_REFUSED),
    "embeddings": (EmbeddingCreateParams, embeddings.ABOUT, {}),
    "responses": (ResponseCreateParamsBase, RESPONSES_ABOUT, RESPONSES_REFUSED),
    "messages": (MessageCreateParamsBase, MESSAGES_ABOUT, MESSAGES_REFUSED),
    "beta": (beta.MessageCreateParamsBase, MESSAGES_ABOUT, MESSAGES_REFUSED),
    "count": (MessageCountTokensParams, COUNT_ABOUT, MESSAGES_REFUSED),
}
# A header.
ELSEWHERE = {"betas"}


@pytest.mark.parametrize("name", SENT)
def test_every_field_is_decided(name):
    params, about, refused = SENT[name]
    sent = set(params.__annotations__) - ELSEWHERE
    assert len(sent) > 4 and sent <= about.body["properties"].keys() | refused.keys()


@pytest.mark.parametrize("refused", [OPENAI_REFUSED, RESPONSES_REFUSED, MESSAGES_REFUSED])
def test_what_is_refused_says_the_way_out_and_what_asks_for_nothing_is_none(refused: Mapping[str, Any]):
    for name, one in refused.items():
        for value in (None, *one.harmless):
            refuse({name: value}, refused)
        with pytest.raises(RequestError) as told:
            refuse({name: {"a": 1}}, refused)
        assert told.value.field == name and str(told.value).endswith(f"leave it out and {one.remedy}.")
        assert "leave it out and leave" not in str(told.value)


def test_true_is_no_one_and_false_no_zero():
    with pytest.raises(RequestError, match="count=False"):
        refuse({"count": False}, {"count": Refusal("count yourself", (0,))})
    with pytest.raises(RequestError, match="background=0"):
        refuse({"background": 0}, RESPONSES_REFUSED)
