# SPDX-License-Identifier: Apache-2.0
"""Write `sampling.npz`: what transformers' logits processors make of random logits under random mixtures of parameters.

`python tests/goldens/make_sampling_goldens.py`; needs torch and transformers, the tests do not. Processors run in
float64, one row at a time, in the order that `SamplingParams` documents. A row is kept if its filters cut where small
changes of their parameters, and float32, cut too: a search need not agree with a sort to the last bit. Of rows with a
single token left, which show little, a few are kept.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers.generation.logits_process as processors

HERE = Path(__file__).resolve().parent
VOCAB, ROWS, MAX_LEN, STOPS = 131, 96, 24, (7, 40)
SHAKE = 1e-3


def some_params(rng: np.random.Generator, tokens: list[int]) -> dict:
    """Fields of `SamplingParams`, each off more often than not; biases fall on `tokens` too."""
    biased = sorted({*tokens[:4], *map(int, rng.choice(VOCAB, 3, replace=False))})
    choices = {
        "temperature": lambda: float(rng.choice([0.0, 0.3, 0.8, 1.7])),
        "top_k": lambda: int(rng.choice([1, 3, 10, 40, 1000])),
        "top_p": lambda: float(rng.choice([0.1, 0.5, 0.8, 0.95])),
        "min_p": lambda: float(rng.choice([0.01, 0.1, 0.4])),
        "typical_p": lambda: float(rng.choice([0.2, 0.5, 0.9])),
        "repetition_penalty": lambda: float(rng.choice([0.7, 1.1, 1.8])),
        "logit_bias": lambda: [[token, float(rng.normal() * 5)] for token in biased],
        "allowed_token_ids": lambda: sorted(map(int, rng.choice(VOCAB, 60, replace=False))),
        "banned_token_ids": lambda: sorted(map(int, rng.choice(VOCAB, 10, replace=False))),
        "min_tokens": lambda: 5,
    }
    return {name: choose() for name, choose in choices.items() if rng.random() < 0.4}


def chain(params: dict, prompt_len: int, shake: float):
    """The processors of `params`; `shake` moves the filters' parameters a little, one way or the other."""
    made = []
    if "allowed_token_ids" in params:
        made.append(processors.PrefixConstrainedLogitsProcessor(lambda _, __: params["allowed_token_ids"], 1))
    if "banned_token_ids" in params:
        made.append(processors.SuppressTokensLogitsProcessor(params["banned_token_ids"]))
    if "min_tokens" in params:
        made.append(processors.MinNewTokensLengthLogitsProcessor(prompt_len, params["min_tokens"], list(STOPS)))
    if "repetition_penalty" in params:
        made.append(processors.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "logit_bias" in params:
        made.append(processors.SequenceBiasLogitsProcessor([[[i], bias] for i, bias in params["logit_bias"]]))
    if not params.get("temperature", 1.0):
        return made
    if "temperature" in params:
        made.append(processors.TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        made.append(processors.TopKLogitsWarper(params["top_k"]))
    warpers = {
        "top_p": processors.TopPLogitsWarper,
        "min_p": processors.MinPLogitsWarper,
        "typical_p": processors.TypicalLogitsWarper,
    }
    return made + [warper(params[name] * (1 + shake)) for name, warper in warpers.items() if name in params]


def processed(logits: np.ndarray, tokens: list[int], prompt_len: int, params: dict, shake=0.0, dtype=torch.float64):
    """The row that transformers would draw from."""
    scores = torch.tensor(logits[None], dtype=dtype)
    ids = torch.tensor([tokens])
    for processor in chain(params, prompt_len, shake):
        scores = processor(ids, scores)
    return scores[0].double().numpy()


def main() -> None:
    rng = np.random.default_rng(0)
    cases, rows, results = [], [], []
    while len(cases) < ROWS:
        length = int(rng.integers(2, MAX_LEN))
        tokens = [int(token) for token in rng.integers(0, VOCAB, length)]
        params = some_params(rng, tokens)
        prompt_len = int(rng.integers(1, length + 1))
        logits = (rng.normal(size=VOCAB) * rng.choice([0.5, 2, 6])).astype(np.float32)
        want = processed(logits, tokens, prompt_len, params)
        again = [processed(logits, tokens, prompt_len, params, shake) for shake in (-SHAKE, SHAKE)]
        again.append(processed(logits, tokens, prompt_len, params, dtype=torch.float32))
        if np.isfinite(want).sum() == 1 and rng.random() < 0.9:
            continue
        if all(np.array_equal(np.isfinite(other), np.isfinite(want)) for other in again):
            cases.append({"params": params, "tokens": tokens, "prompt_len": prompt_len})
            rows.append(logits)
            results.append(want.astype(np.float32))
    np.savez_compressed(
        HERE / "sampling.npz",
        cases=np.asarray(json.dumps({"stop_ids": STOPS, "rows": cases})),
        logits=np.stack(rows),
        processed=np.stack(results),
    )
    kept = np.isfinite(results).sum(axis=1)
    print(f"{len(cases)} rows; tokens left: {np.sort(kept).tolist()}")


if __name__ == "__main__":
    main()
