# SPDX-License-Identifier: Apache-2.0
"""What a client is told of a model."""

import time
from typing import TYPE_CHECKING

from serving.chat.model import ChatModel
from serving.core.events import ModelCard

if TYPE_CHECKING:
    from metrale_jax.llm import LLM


def model_card(llm: "LLM", name: str) -> ModelCard:
    """The card of a loaded model under the name that clients know it by."""
    config, tokenizer = llm.loaded.config, llm.loaded.tokenizer
    return ModelCard(
        id=name,
        architecture=config.family,
        dtype=config.dtype,
        vocab_size=config.vocab_size,
        max_context_tokens=llm.engine.limits.max_context_tokens,
        max_sequences=llm.config.max_sequences,
        embedding_width=config.hidden_dim,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        eos_token_ids=tuple(llm.loaded.eos_token_ids),
        fingerprint=llm.identity["weights"],
        created=int(time.time()),
    )


def chat_model(llm: "LLM") -> ChatModel:
    """What has to be known of a loaded model to chat with it."""
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None:
        return ChatModel()
    special = {tokenizer.id_to_token(token): token for token in tokenizer.special_token_ids}
    config = tokenizer.config | {"chat_template": tokenizer.default_chat_template}
    return ChatModel(tokenizer.chat_template_source, tokenizer.apply_chat_template, special, config)
