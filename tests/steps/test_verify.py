# SPDX-License-Identifier: Apache-2.0
"""Verify gives the stream of decode token for token, whatever the drafts, greedy or sampled."""

import numpy as np
import pytest

from metrale_jax.sampling.params import SamplingParams

ROWS, WIDTH, TOKENS = 8, 3, 14
STARTS = (9, 20, 7, 5, 8, 6)  # Prompt lengths.
SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.9),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[5, 6, 7, 8, 9, 10, 11, 12]),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.01),
    SamplingParams(temperature=0.9, min_tokens=5, stop_token_ids=[100, 29, 95]),
    SamplingParams(temperature=0),
]
# Rules that look back, on drafts too.
RULES = [
    SamplingParams(temperature=0, repetition_penalty=1.8),
    SamplingParams(temperature=0.9, frequency_penalty=1.0, presence_penalty=1.0),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=[5, 6, 7, 8, 9, 10, 11, 12], frequency_penalty=2.0),
    SamplingParams(temperature=1.2, top_n_sigma=1.5, typical_p=0.9, logit_bias={3: 4.0, 4: 4.0}),
    SamplingParams(temperature=0.8, allowed_token_ids=list(range(40)), repetition_penalty=1.3),
    SamplingParams(temperature=0),
]


def started(bench, wishes):
    """Pool and rows after their prompts, of which each has drawn a token."""
    pool, rows, offset = bench.pool(), [], 0
    for half in (range(0, 3), range(3, 6)):
        prompts = []
        for index in half:
            prompts.append(bench.prompt[offset : offset + STARTS[index]])
            offset += STARTS[index]
        extras = wishes is RULES
        fresh = [bench.row(i, STARTS[i], wishes[i], 40 + i, extras) for i in half]
        pool, done, _ = bench.prefill(pool, fresh, prompts)
        rows += done
    return pool, rows


def right_drafts(rng, wanted):
    return wanted, WIDTH


def wrong_drafts(rng, wanted):
    return [(token + 1) % 131 for token in wanted], WIDTH


def up_to_a_stop(drafts, stop_ids):
    """How many tokens a row of right drafts gives: a run ends where an answer does."""
    ends = [index + 1 for index, token in enumerate(drafts) if token in stop_ids]
    return min([*ends, WIDTH + 1])


def mixed_drafts(rng, wanted):
    """Right up to a place, of any length, with rubbish behind it."""
    right, length = rng.integers(0, WIDTH + 1), int(rng.integers(0, WIDTH + 1))
    drafts = [token if i < right else (token + 7) % 131 for i, token in enumerate(wanted)]
    return [*drafts[:length], *rng.integers(0, 131, WIDTH - length)], length


@pytest.mark.parametrize("propose", [right_drafts, wrong_drafts, mixed_drafts])
@pytest.mark.parametrize("name, wishes", [("llama-default", SETTINGS), ("gemma2", SETTINGS), ("llama-default", RULES)])
def test_any_drafts_reproduce_the_stream_of_decode(bench, name, wishes, propose):
    bench = bench(name)
    _, _, stream = bench.decode(*started(bench, wishes), TOKENS + WIDTH + 1)
    pool, rows = started(bench, wishes)
    state = bench.padded(rows, ROWS)
    before = np.asarray(state.seq_len)
    rng = np.random.default_rng(1)
    got = [[] for _ in rows]
    num_steps = 0
    while min(len(tokens) for tokens in got) < TOKENS:
        # A row that has its tokens proposes nothing, so that rows stand at different lengths.
        wanted = [stream[i, len(tokens) : len(tokens) + WIDTH] for i, tokens in enumerate(got)]
        drafts = np.full((ROWS, WIDTH), 130, np.int32)
        lens = np.zeros(ROWS, np.int32)
        for i, tokens in enumerate(wanted):
            tokens = [*tokens, *[0] * (WIDTH - len(tokens))]
            drafts[i], lens[i] = propose(rng, tokens) if len(got[i]) < TOKENS else (tokens, 0)
        if max(len(tokens) for tokens in got) > TOKENS + 4 * WIDTH:
            break
        pool, state, out = bench.run("verify", pool, state, drafts, lens)
        num_steps += 1
        counts = np.asarray(out.num_tokens)
        assert not counts[len(rows) :].any() and not np.asarray(state.seq_len)[len(rows) :].any()
        for i, tokens in enumerate(got):
            tokens += np.asarray(out.tokens)[i, : counts[i]].tolist()
            assert np.asarray(state.seq_len)[i] == before[i] + len(tokens)
            assert np.asarray(state.last_token)[i] == tokens[-1]
            if propose is right_drafts and lens[i]:
                assert counts[i] == up_to_a_stop(wanted[i], wishes[i].stop_token_ids)
            if propose is wrong_drafts:
                assert counts[i] == 1
            known = min(len(tokens), stream.shape[1])
            assert tokens[:known] == stream[i, :known].tolist()
    assert min(len(tokens) for tokens in got) >= TOKENS
    assert num_steps >= TOKENS // (WIDTH + 1)
