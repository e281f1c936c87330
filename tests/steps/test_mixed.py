# SPDX-License-Identifier: Apache-2.0
"""One pass over the weights for decode and prefill gives what the two give one after the other."""

import dataclasses

import jax
import numpy as np
import pytest

from metrale_jax.sampling.params import SamplingParams

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9)


@pytest.mark.parametrize("name, extras", [("gemma2", False), ("llama-default", True)])
def test_mixed_is_decode_and_prefill_apart(bench, name, extras):
    bench = bench(name)
    params = dataclasses.replace(SAMPLED, repetition_penalty=1.5) if extras else SAMPLED
    prompts = [bench.prompt[:30], bench.prompt[30:37]]
    late = [bench.prompt[40:62], bench.prompt[70:75]]

    def started():
        wishes = [SamplingParams(temperature=0), params]
        rows = [bench.row(i, len(p), wishes[i], i, extras) for i, p in enumerate(prompts)]
        pool, rows, _ = bench.prefill(bench.pool(), rows, prompts)
        fresh = [bench.row(2 + i, len(p), params, 9 + i, extras) for i, p in enumerate(late)]
        # The first of the late ones is half done.
        pool, (half,), _ = bench.prefill(pool, fresh[:1], [late[0][:9]])
        return pool, bench.padded(rows, 8), bench.padded([half, fresh[1]], 4), bench.chunk([late[0][9:], late[1]])

    pool, decoding, filling, chunk = started()
    pool, decoding, decoded = bench.run("decode", pool, decoding)
    pool, filling, filled = bench.run("prefill", pool, filling, *chunk)
    apart = (decoding, filling, decoded, filled)
    other_pool, other_decoding, other_filling, other_chunk = started()
    other_pool, *together = bench.run("mixed", other_pool, other_decoding, other_filling, *other_chunk)
    rows = {"decode": 2, "prefill": 2}
    for left, right, count in zip(apart, together, [*rows.values()] * 2, strict=True):
        jax.tree.map(lambda x, y, n=count: np.testing.assert_array_equal(x[:n], y[:n]), left, right)
    for left, right in zip(jax.tree.leaves(pool), jax.tree.leaves(other_pool), strict=True):
        np.testing.assert_allclose(np.asarray(left)[:, 1:], np.asarray(right)[:, 1:], atol=1e-5, rtol=1e-4)
    if extras:
        states, outs, known = together[:2], together[2:], [prompts, late]
        for state, out, tokens in zip(states, outs, known, strict=True):
            for row, prompt in enumerate(tokens):
                after = np.asarray(state.sampling.extras.history)[row, : state.seq_len[row] + 1]
                assert after[: len(prompt)].tolist() == list(prompt) and after[-1] == out.tokens[row, 0]
    assert np.asarray(together[0].seq_len).tolist() == [31, 8, 0, 0, 0, 0, 0, 0]
    assert np.asarray(together[1].seq_len).tolist() == [22, 5, 0, 0]
