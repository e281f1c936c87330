# SPDX-License-Identifier: Apache-2.0
"""Vectors of whole sequences, held to the stored logits: the head makes these of the rows that vectors are made of."""

import numpy as np
import pytest

from metrale_jax import LLM
from metrale_jax.core.errors import RequestError
from metrale_jax.evaluation import chunked, embedding_chunks
from tests.conftest import GOLDENS


@pytest.fixture(scope="module")
def tiny():
    return LLM(GOLDENS / "llama-default", max_context_tokens=64, max_sequences=1)


def vector(golden, tokens, pooling, normalize=True, chunk_tokens=128):
    chunks, seen = embedding_chunks(golden.steps, golden.params, tokens, pooling, normalize, chunk_tokens), []
    while True:
        try:
            seen.append(next(chunks))
        except StopIteration as ended:
            assert seen == [min(start + chunk_tokens, len(tokens)) for start in range(0, len(tokens), chunk_tokens)]
            return ended.value


def test_vectors_are_of_the_rows_that_the_head_makes_logits_of(golden):
    model, prompt = golden("llama-default"), golden("llama-default").prompt[:33]
    ((rows,), count), *_ = chunked(model.steps, model.params, prompt, "record")
    rows = np.asarray(rows)[:count]
    head = model.params.embed if isinstance(model.params.head, tuple) else model.params.head
    np.testing.assert_allclose(rows @ np.asarray(head).reshape(-1, rows.shape[1]).T, model.data["logits_33"], atol=1e-4)
    np.testing.assert_allclose(vector(model, prompt, "mean", False), rows.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(vector(model, prompt, "last", False), rows[-1], atol=1e-5)


@pytest.mark.parametrize("name", ["llama-default", "mistral-window", "mamba2"])
def test_how_a_sequence_is_cut_does_not_change_its_vector(golden, name):
    model, prompt = golden(name), golden(name).prompt[:33]
    for pooling in ("mean", "last"):
        whole = vector(model, prompt, pooling)
        assert whole.dtype == np.float32 and abs(np.linalg.norm(whole) - 1) < 1e-6
        np.testing.assert_allclose(vector(model, prompt, pooling, chunk_tokens=8), whole, atol=1e-5)


def test_vectors_come_in_order_through_the_door(tiny, golden):
    prompts = [golden("llama-default").prompt[:9].tolist(), [3, 4, 5]]
    found = tiny.embed(prompts, "last")
    for prompt, one in zip(prompts, found, strict=True):
        np.testing.assert_allclose(one, vector(golden("llama-default"), prompt, "last"), atol=1e-5)
    with pytest.raises(RequestError, match="pooling='max' is not one of mean, last"):
        tiny.embed([[3]], "max")
    with pytest.raises(RequestError, match="prompt of 0 tokens"):
        tiny.embed([[]])
