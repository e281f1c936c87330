# SPDX-License-Identifier: Apache-2.0
"""/v1/models, asked with the clients of OpenAI and of Anthropic."""

import anthropic
import openai
import pytest

from tests.serving.http.fronts import fronted, run
from tests.serving.scripted import CARD, ScriptedService


def test_each_client_finds_its_own_fields():
    async def act():
        async with fronted(ScriptedService()) as world:
            base = world.base_url
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as asking:
                [model] = (await asking.models.list()).data
                assert (model.id, model.object, model.created) == (CARD.id, "model", CARD.created)
                assert await asking.models.retrieve(CARD.id) == model
            async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as asking:
                listed = await asking.models.list(limit=5)
                assert (listed.first_id, listed.last_id, listed.has_more) == (CARD.id, CARD.id, False)
                [info] = [one async for one in listed]
                assert (info.id, info.type, info.display_name, info.lifecycle) == (CARD.id, "model", CARD.id, "active")
                assert info.created_at.timestamp() == CARD.created
                assert info.max_input_tokens == CARD.max_context_tokens
                assert await asking.models.retrieve(CARD.id) == info

    run(act())


def test_each_client_is_told_what_is_wrong_in_its_form():
    async def act():
        async with fronted(ScriptedService()) as world:
            base = world.base_url
            async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as asking:
                with pytest.raises(anthropic.NotFoundError) as told:
                    await asking.models.retrieve("other")
                assert told.value.body["type"] == "error" and told.value.body["error"]["type"] == "not_found_error"
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as asking:
                with pytest.raises(openai.NotFoundError) as told:
                    await asking.models.retrieve("other")
                assert told.value.code == "model_not_found"

    run(act())


def test_there_are_none_while_one_loads():
    async def act():
        service = ScriptedService()
        service.cards = ()
        async with fronted(service) as world:
            listed = (await world.client.get("/v1/models")).json()
            assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}

    run(act())
