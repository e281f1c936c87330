# SPDX-License-Identifier: Apache-2.0
"""EleutherAI's harness against a whole server: what it measures is what a direct computation gives."""

import asyncio
import json
import math
import os
import sys
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest

from metrale_jax import LLM, SamplingParams
from metrale_jax.evaluation import token_nlls
from tests.serving.http.fronts import run
from tests.serving.tiny_chat import write_tiny_chat
from tests.serving.whole_server import whole_server

HERE = Path(__file__).parent
CLIENT, TASKS = HERE / "lm_eval_client.py", HERE / "lm_eval_tasks"
MAX_LENGTH = 128
RUNS = {
    # It finds the server's tokenizer by itself and sends lists of token ids.
    "batches": {
        "api": "local-completions",
        "args": {"batch_size": 4, "max_length": MAX_LENGTH},
        "tasks": ["tiny_choice", "tiny_rolling", "tiny_generate"],
    },
    "side by side": {
        "api": "local-completions",
        "args": {"num_concurrent": 3, "tokenizer_backend": "remote", "max_length": MAX_LENGTH},
        "tasks": ["tiny_choice"],
    },
    "texts": {
        "api": "local-completions",
        "args": {"tokenized_requests": False, "batch_size": 3, "max_length": MAX_LENGTH},
        "tasks": ["tiny_choice", "tiny_generate"],
    },
    "chats": {"api": "local-chat-completions", "chat": True, "tasks": ["tiny_generate"], "args": {"num_concurrent": 4}},
}
SCORED = ("batches", "side by side", "texts")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = write_tiny_chat(tmp_path_factory.mktemp("tiny"))
    return LLM(directory, max_sequences=4, max_context_tokens=256, prefill_tokens=64, kv_cache_mib=1)


@pytest.fixture(scope="module")
def told(model, tmp_path_factory):
    """What the harness found, by run."""
    caches = tmp_path_factory.mktemp("caches")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(caches), "HOME": str(caches)}
    found = {}

    async def ask():
        async with whole_server(model) as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(CLIENT), server.url, "tiny", json.dumps(RUNS)),
                cwd=TASKS,
                env={**os.environ, **offline},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()[-4000:]
            found.update(json.loads(out))
            await server.quiet()

    run(ask(), 300)
    return found


@cache
def likelihood(model, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the likeliest at every token."""
    # The harness gives a continuation the spaces that its context ends with, and an empty context the BOS.
    before, whole = (model.tokenize(text, False) for text in (context.rstrip(), context + continuation))
    if not before:
        before, whole = [model.tokenizer.bos_token_id], [model.tokenizer.bos_token_id, *whole]
    logits = model.logits(whole)[len(before) - 1 : -1]
    nlls = token_nlls(model.loaded.steps, model.loaded.params, whole)[len(before) - 1 :]
    return -nlls.sum(), logits.argmax(axis=1).tolist() == whole[len(before) :]


def rolled(model, text: str) -> float:
    """The log-likelihood of a whole text, in windows as the harness cuts it, the first behind the BOS."""
    tokens = [model.tokenizer.bos_token_id, *model.tokenize(text, False)]
    most, total = MAX_LENGTH - 2, 0.0
    for start in range(1, len(tokens), most):
        end = min(start + most, len(tokens))
        window = tokens[max(0, end - most - 1) : end]
        total -= token_nlls(model.loaded.steps, model.loaded.params, window)[-(end - start) :].sum()
    return total


def test_it_needs_neither_torch_nor_transformers(told):
    assert told["imported"] == []


@pytest.mark.parametrize("name", SCORED)
def test_choices_have_the_models_own_likelihoods(name, told, model):
    right, num_greedy = [], 0
    for sample in told[name]["samples"]["tiny_choice"]:
        expected = [likelihood(model, *pair) for pair in sample["arguments"]]
        assert [greedy for _, greedy in sample["kept"]] == [greedy for _, greedy in expected]
        measured = [float(value) for value, _ in sample["kept"]]
        assert measured == pytest.approx([value for value, _ in expected], abs=2e-4)
        right.append(int(np.argmax([value for value, _ in expected])) == sample["doc"]["answer"])
        num_greedy += sum(greedy for _, greedy in expected)
    assert len(right) == 6 and 0 < sum(right) < 6 and num_greedy
    assert told[name]["results"]["tiny_choice"]["acc,none"] == pytest.approx(np.mean(right))


def test_rolling_likelihoods_are_those_of_whole_texts(told, model):
    total, num_words = 0.0, 0
    for sample in told["batches"]["samples"]["tiny_rolling"]:
        text = sample["doc"]["text"]
        expected = rolled(model, text)
        assert float(sample["kept"][0]) == pytest.approx(expected, abs=1e-3)
        total, num_words = total + expected, num_words + len(text.split())
    found = told["batches"]["results"]["tiny_rolling"]["word_perplexity,none"]
    assert found == pytest.approx(math.exp(-total / num_words), rel=1e-4)


@pytest.mark.parametrize("name", ["batches", "texts", "chats"])
def test_answers_are_those_that_the_prompt_has_alone(name, told, model):
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=("\n", "Q:"))
    for sample in told[name]["samples"]["tiny_generate"]:
        prompt = f"Q: {sample['doc']['question']}\nA:"
        tokens = model.chat_tokens([{"role": "user", "content": prompt}]) if RUNS[name].get("chat") else prompt
        assert sample["answers"] == [[model.generate([tokens], params)[0].text]]


def test_a_prompt_is_scored_whole_where_the_token_behind_it_ends_the_answer(model):
    prompts = [list(b"The end"), list(b"Of all")]

    async def check():
        async with whole_server(model) as server, httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = {"prompt": prompts, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
            # The harness leaves out the last entry, whatever it is.
            told = await client.post(
                "/v1/completions", json=asked | {"logit_bias": {model.loaded.eos_token_ids[0]: 100}}
            )
            for prompt, choice in zip(prompts, told.json()["choices"], strict=True):
                assert choice["finish_reason"] == "stop"
                nlls = token_nlls(model.loaded.steps, model.loaded.params, prompt)
                logprobs = choice["logprobs"]["token_logprobs"]
                assert logprobs[0] is None and len(logprobs) == len(prompt) + 1
                assert logprobs[1:-1] == pytest.approx(-nlls, abs=1e-4)

    run(check(), 300)
