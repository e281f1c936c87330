# SPDX-License-Identifier: Apache-2.0
"""Run by `test_plan.py` in a fresh process: a model from an archive answers, and what was compiled is counted.

Arguments: model, archive or "", options as JSON. Prints JSON: tokens, XLA compiles, programs compiled.
"""

import json
import sys

import jax

from metrale_jax import LLM, SamplingParams

COMPILE = "/jax/core/compile/backend_compile_duration"
compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **facts: compiles.append(seconds) if event == COMPILE else None
)
model, archive, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model, executables=archive or None, **options)
params = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, n=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.3, logprobs=2, max_tokens=12, ignore_eos=True),
]
results = llm.generate([[5, 6, 7], [9] * 30, [11, 12]], params)
tokens = [[list(choice.token_ids) for choice in result.choices] for result in results]
print(json.dumps({"tokens": tokens, "xla": len(compiles), "programs": llm.stats().num_compiles}))
