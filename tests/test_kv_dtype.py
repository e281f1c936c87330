# SPDX-License-Identifier: Apache-2.0
"""A narrow KV cache changes a model a little, and never by what runs beside a request."""

import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.core.errors import ConfigError
from tests.conftest import GOLDENS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True)
SHORT = {"max_context_tokens": 128, "max_sequences": 4, "kv_cache_mib": 1}
# Mean error of the logits, of unit scale, that rounding keys and values may cost a tiny model.
ALLOWED = {"bfloat16": 0.01, "fp8_e4m3": 0.1, "int8": 0.02}


MORE = [(name, kv_dtype) for name in ("llama-default", "gemma2") for kv_dtype in ALLOWED][:-1]


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("gemma2", "int8"), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_tokens_are_those_of_the_request_alone(name, kv_dtype):
    rng = np.random.default_rng(0)
    prompts = [list(map(int, rng.integers(3, 90, length))) for length in (40, 7, 61, 23)]
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    llm = LLM(GOLDENS / name, kv_dtype=kv_dtype, prefill_tokens=16, **SHORT)
    alone = LLM(GOLDENS / name, kv_dtype=kv_dtype, prefix_cache=False, **SHORT)
    wanted = [alone.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    for _ in range(2):  # cold, then with the prefixes in the cache
        assert [result.token_ids for result in llm.generate(prompts, params)] == wanted
    assert llm.stats().cached_tokens > 0
    exact = LLM(GOLDENS / name, **SHORT)
    error = np.abs(llm.logits(prompts[2]) - exact.logits(prompts[2])).mean()
    assert 0 < error < ALLOWED[kv_dtype]


def test_what_is_not_known_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="kv_dtype='int3' is not one of float32, bfloat16, .*int8; choose one"):
        LLM(GOLDENS / "llama-default", kv_dtype="int3")
    with pytest.raises(ConfigError, match="attention='cudnn' is not one of auto, cpu, triton, .*xla"):
        LLM(GOLDENS / "llama-default", attention="cudnn")
