# SPDX-License-Identifier: Apache-2.0
"""However a prompt is cut and whoever shares its step, the logits and tokens are those of the whole prompt alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.generate import first_state
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.pool import make_pool

WIDTH, SIZE = 20, 64
SPLITS = {
    "one-by-one-at-the-start": [1, 1, 1, 1, 1, 1, 1, 1, 1, 30],
    "blocks": [8, 8, 16, 8],
    "across-blocks": [7, 2, 13, 1, 9],
    "large": [63, 64],
}


def scored_in_chunks(golden, tokens, sizes):
    """Logits `[T, V]` of `tokens` run in chunks of `sizes`, the rest in chunks of `SIZE`."""
    layout, config = golden.layout, golden.config
    nan = lambda spec: jnp.full(spec.shape, jnp.nan, spec.dtype)  # noqa: E731
    pool = make_pool(layout, (WIDTH + 1,) * len(layout.groups), nan)
    state = first_state(layout, len(tokens), WIDTH, SamplingParams(temperature=0), 0, (), config.vocab_size)
    pieces, start = [], 0
    for size in [*sizes, *[SIZE] * len(tokens)]:
        size = min(size, len(tokens) - start)
        if not size:
            break
        chunk = np.zeros(SIZE, np.int32)
        chunk[:size] = tokens[start : start + size]
        pool, state, logits = golden.steps.run("score", golden.params, pool, state, chunk, np.asarray([size], np.int32))
        pieces.append(np.asarray(logits)[:size])
        start += size
        assert int(state.seq_len[0]) == start
    return np.concatenate(pieces)


@pytest.mark.parametrize("name", ["llama-default", "gemma2", "phi3-longrope", "llama-dynamic"])
def test_logits_of_a_prompt_in_chunks_are_those_of_the_whole(golden, name):
    golden = golden(name, 8)
    rng = np.random.default_rng(3)
    drawn = {"drawn": rng.integers(1, 30, 9).tolist()}
    for split, sizes in {**SPLITS, **drawn}.items():
        for length in (33, 130):
            logits = scored_in_chunks(golden, golden.prompt[:length], sizes)
            expected = golden.data[f"logits_{length}"]
            np.testing.assert_allclose(
                logits[-len(expected) :], expected, atol=3e-4, rtol=1e-3, err_msg=f"{split} {length}"
            )


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_prompts_of_one_step_do_not_see_each_other(bench, name):
    bench = bench(name)
    prompts = [bench.prompt[:33], bench.prompt[40:41], bench.prompt[50:67], bench.prompt[70:83]]
    sampled = SamplingParams(temperature=0.9, top_p=0.9)
    rows = [bench.row(i, len(p), sampled if i % 2 else SamplingParams(temperature=0), i) for i, p in enumerate(prompts)]
    pool, together, first = bench.prefill(bench.pool(), rows, prompts)
    _, _, later = bench.decode(pool, together, 6)
    for index, prompt in enumerate(prompts):
        pool, alone, token = bench.prefill(bench.pool(), [rows[index]], [prompt])
        assert token[0] == first[index]
        _, _, tokens = bench.decode(pool, alone, 6)
        assert tokens[0].tolist() == later[index].tolist()


@pytest.mark.parametrize("name", ["llama-default", "gemma2"])
def test_prompts_in_chunks_of_one_step_draw_the_tokens_of_whole_prompts(bench, name):
    bench = bench(name)
    prompts = [bench.prompt[:33], bench.prompt[40:60], bench.prompt[60:71]]
    rows = [bench.row(i, len(p)) for i, p in enumerate(prompts)]
    expected = []
    for row, prompt in zip(rows, prompts, strict=True):
        pool, alone, token = bench.prefill(bench.pool(), [row], [prompt])
        expected.append([token[0], *bench.decode(pool, alone, 5)[2][0]])
    rng = np.random.default_rng(0)
    for _ in range(4):
        pool, state, done, first = bench.pool(), list(rows), [0] * 3, [None] * 3
        while any(done[i] < len(prompts[i]) for i in range(3)):
            # A length of 0 leaves a sequence as it was, its token included.
            sizes = [min(int(rng.integers(0, 14)), len(prompts[i]) - done[i]) for i in range(3)]
            chunks = [prompts[i][done[i] : done[i] + sizes[i]] for i in range(3)]
            pool, state, tokens = bench.prefill(pool, state, chunks)
            for i, size in enumerate(sizes):
                done[i] += size
                first[i] = tokens[i] if size else first[i]
                assert state[i].seq_len[0] == done[i]
                assert state[i].last_token[0] == (first[i] or 0)
        later = bench.decode(pool, state, 5)[2]
        assert [[token, *rest] for token, rest in zip(first, later, strict=True)] == expected
