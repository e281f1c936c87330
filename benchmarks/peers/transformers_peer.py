# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: `generate` on a padded-free batch, SDPA attention, dynamic cache, eager PyTorch."""

from collections.abc import Sequence

from protocol import Setup, run_peer


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

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
        return out[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    run_peer("transformers", ("transformers", "torch"), TransformersPeer)
