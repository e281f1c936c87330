# SPDX-License-Identifier: Apache-2.0
"""This engine, through its public door."""

from collections.abc import Sequence

from protocol import Setup, run_peer

# Above so many sequences the KV pool is given the size that a full engine needs, as the other engines' pools have.
MANY_SEQUENCES, POOL_MIB = 32, 384


class MetralePeer:
    """`metrale_jax.LLM` with its defaults, but for the KV pool of a crowd."""

    def __init__(self, setup: Setup):
        from metrale_jax import LLM, SamplingParams

        self._params = SamplingParams
        # `--option` passes any other field of LLMConfig; numbers are read as such.
        options = {key: int(value) if value.isdigit() else value for key, value in setup.options.items()}
        if setup.max_sequences > MANY_SEQUENCES:
            options = {"kv_cache_mib": POOL_MIB} | options
        self._llm = LLM(str(setup.model), compile_cache=setup.cache_dir, **options)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt."""
        params = self._params(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [list(result.token_ids) for result in self._llm.generate(prompts, params)]

    def answer(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """The new token ids of each prompt."""
        params = [self._params(temperature=0, max_tokens=limit, ignore_eos=True) for limit in limits]
        return [list(result.token_ids) for result in self._llm.generate(prompts, params)]


if __name__ == "__main__":
    run_peer("metrale", ("metrale-jax", "jax", "jaxlib"), MetralePeer)
