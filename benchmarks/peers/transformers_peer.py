# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: `generate` on a padded-free batch, SDPA attention, dynamic cache, eager PyTorch."""

from collections.abc import Sequence

from protocol import Setup, run_peer, static_batches

# Prompts a batch where there are more. Larger ones take fewer steps and pad more.
OFFLINE_BATCH = 16


class TransformersPeer:
    """`AutoModelForCausalLM` in float32."""

    def __init__(self, setup: Setup):
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        # Without an end id every sequence runs to its last token.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._batch = int(setup.options.get("batch", OFFLINE_BATCH))

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        # Padded on the left, as a model that goes on from the last column wants it.
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask = self._torch.tensor(rows), self._torch.tensor(mask)
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return out[:, width:].tolist()

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """The new token ids of each prompt, in padded batches that run to their longest answer."""
        answers: list[list[int]] = [[]] * len(prompts)
        for batch in static_batches(prompts, limits, self._batch):
            out = self.generate([prompts[index] for index in batch], max(limits[index] for index in batch))
            for index, tokens in zip(batch, out, strict=True):
                answers[index] = tokens[: limits[index]]
        return answers


if __name__ == "__main__":
    run_peer("transformers", ("transformers", "torch"), TransformersPeer)
