# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build in float32, its compiled graphs and thread binding as it chooses them."""

import os
from collections.abc import Sequence
from pathlib import Path

from protocol import Setup, run_peer


class VllmPeer:
    """`vllm.LLM` with a float32 KV cache of 2 GiB."""

    def __init__(self, setup: Setup):
        # The engine's processes read these when they start, so they are set before it is imported.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if setup.cache_dir is not None:
            cache = Path(setup.cache_dir).resolve()
            os.environ["VLLM_CACHE_ROOT"] = str(cache / "vllm")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
            os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model=str(setup.model),
            dtype="float32",
            max_model_len=setup.context_tokens + 64,
            max_num_seqs=max(setup.max_sequences, 8),
            disable_log_stats=True,
            seed=0,
            **{key: int(value) if value.isdigit() else value for key, value in setup.options.items()},
        )

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        return self.answer(prompts, [max_tokens] * len(prompts))

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """The new token ids of each prompt."""
        common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        params = [self._params(max_tokens=limit, **common) for limit in limits]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in self._llm.generate(requests, params, use_tqdm=False)]


if __name__ == "__main__":
    run_peer("vllm", ("vllm-cpu", "vllm", "torch"), VllmPeer)
