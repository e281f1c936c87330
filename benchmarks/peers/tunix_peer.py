# SPDX-License-Identifier: Apache-2.0
"""Google's tunix: its Llama model and vanilla sampler, both halves of a generation compiled, float32 throughout."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from protocol import Setup, run_peer, static_batches

# Outside every vocabulary: no prompt token is taken for padding and no answer ends early.
NO_TOKEN = -1
# Prompts a batch where there are more. Larger ones take fewer steps and pad more.
OFFLINE_BATCH = 16


class IdTokenizer:
    """What the sampler wants of a tokenizer; its texts are lists of ids."""

    def encode(self, text: list[int], **_) -> list[int]:
        """The ids themselves."""
        return list(text)

    def decode(self, ids: list[int], **_) -> list[int]:
        """The ids themselves."""
        return ids

    def bos_id(self) -> int:
        """Zero, which the sampler reads as none."""
        return 0

    def eos_id(self) -> int:
        """No token."""
        return NO_TOKEN

    def pad_id(self) -> int:
        """No token."""
        return NO_TOKEN


class TunixPeer:
    """`tunix.generate.sampler.Sampler` over `Llama3`, one sampler for each cache length that is asked for."""

    def __init__(self, setup: Setup):
        import jax

        if setup.cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", str(setup.cache_dir))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        import jax.numpy as jnp
        from tunix.generate import sampler
        from tunix.models.llama3 import model, params

        values = json.loads((Path(setup.model) / "config.json").read_text())
        # Its attention never passes the config's base on, and the default is another model's.
        model.apply_rope = functools.partial(model.apply_rope, rope_theta=values["rope_theta"])
        self._config = model.ModelConfig(
            num_layers=values["num_hidden_layers"],
            vocab_size=values["vocab_size"],
            embed_dim=values["hidden_size"],
            hidden_dim=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            head_dim=values["hidden_size"] // values["num_attention_heads"],
            num_kv_heads=values["num_key_value_heads"],
            rope_theta=values["rope_theta"],
            norm_eps=values["rms_norm_eps"],
            weight_tying=True,
        )
        self._sampler = sampler
        self._batch = int(setup.options.get("batch", OFFLINE_BATCH))
        self._model = params.create_model_from_safe_tensors(str(setup.model), self._config, dtype=jnp.float32)
        self._samplers: dict[int, sampler.Sampler] = {}

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        length = len(prompts[0])
        generate = self._sampler_of(128 if length <= 64 else length + 64)
        out = generate(prompts, max_generation_steps=max_tokens, max_prompt_length=length, temperature=0.0)
        return [tokens[:max_tokens].tolist() for tokens in out.tokens]

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """The new token ids of each prompt, in padded batches that run to their longest answer."""
        answers: list[list[int]] = [[]] * len(prompts)
        for batch in static_batches(prompts, limits, self._batch):
            length, steps = max(len(prompts[index]) for index in batch), max(limits[index] for index in batch)
            generate = self._sampler_of(length + steps)
            asked = [prompts[index] for index in batch]
            out = generate(asked, max_generation_steps=steps, max_prompt_length=length, temperature=0.0)
            for index, tokens in zip(batch, out.tokens, strict=True):
                answers[index] = tokens[: limits[index]].tolist()
        return answers

    def _sampler_of(self, cache_tokens: int):
        # A cache as long as the run and no longer: attention reads all of it in each step.
        if cache_tokens not in self._samplers:
            cache = self._sampler.CacheConfig(
                cache_tokens, self._config.num_layers, self._config.num_kv_heads, self._config.head_dim
            )
            self._samplers[cache_tokens] = self._sampler.Sampler(self._model, IdTokenizer(), cache)
        return self._samplers[cache_tokens]


if __name__ == "__main__":
    run_peer("tunix", ("google-tunix", "jax", "jaxlib", "flax"), TunixPeer)
