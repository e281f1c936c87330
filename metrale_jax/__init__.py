# SPDX-License-Identifier: Apache-2.0
"""metrale-jax: a functional LLM runtime compiled by XLA for CPUs, GPUs and TPUs.

    from metrale_jax import LLM, SamplingParams
    llm = LLM("smollm2-135m")
    print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=16))[0].text)

`LLM` is the door for most; below it everything is values and pure functions: `load_model`, `make_pool`, and the step
functions of `metrale_jax.steps` over an immutable `SequenceState`. Importing this starts no backend and reads no
environment: names are resolved when first used.
"""

import importlib

_PUBLIC = {
    "LLM": "metrale_jax.llm",
    "GenerationResult": "metrale_jax.results",
    "SamplingParams": "metrale_jax.sampling.params",
    "MetraleError": "metrale_jax.core.errors",
    "RunOptions": "metrale_jax.run_options",
    "load_model": "metrale_jax.runtime",
    "generate_speculative": "metrale_jax.generate",
    "generate_tokens": "metrale_jax.generate",
}
__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'metrale_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
