# SPDX-License-Identifier: Apache-2.0
"""/tokenizer_info: what is asked by who counts tokens at a distance."""

from serving.chat.model import ChatModel
from serving.core.calls import Caller
from serving.core.errors import Kind, ServiceError
from tests.serving.http.fronts import error_of, fronted, run
from tests.serving.scripted import ScriptedService

URL = "/tokenizer_info"
NONE = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None, "chat_template": None}


def test_it_is_the_models_tokenizer_config_with_its_template():
    async def act():
        service = ScriptedService()
        service.chat = ChatModel(config={"eos_token": "</s>", "chat_template": "{{ messages }}", "audio_token": "<a>"})
        async with fronted(service) as world:
            told = (await world.client.get(URL)).json()
            own = {"eos_token": "</s>", "chat_template": "{{ messages }}", "audio_token": "<a>"}
            assert told == NONE | {"model_max_length": 4096} | own
            service.chat = ChatModel()
            assert (await world.client.get(URL)).json() == NONE | {"model_max_length": 4096}

    run(act())


def test_strangers_are_not_told_and_nobody_is_before_there_is_a_model():
    async def act():
        service = ScriptedService(keys={"secret": Caller("alice")})
        async with fronted(service) as world:
            error_of(await world.client.get(URL), 401)
            known = {"authorization": "Bearer secret"}
            assert (await world.client.get(URL, headers=known)).status_code == 200

            def refuse():
                raise ServiceError(Kind.UNAVAILABLE, "the model loads.", retry_after_s=1)

            service.chat_model = refuse
            error_of(await world.client.get(URL, headers=known), 503)

    run(act())
