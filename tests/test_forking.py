# SPDX-License-Identifier: Apache-2.0
"""Branches over one pool: each is what it would be alone, and nothing is held that no branch holds."""

import random
from dataclasses import replace

import numpy as np
import pytest

from metrale_jax.core.errors import RequestError
from metrale_jax.evaluation import chunked_logits
from metrale_jax.forking import start
from metrale_jax.generate import generate_tokens
from metrale_jax.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=10)
# Two groups of attention, one with a window; recurrent state.
MODELS = ["gemma2", "qwen3-next"]
PROMPT, MOST = 21, 88


@pytest.fixture
def live(golden, nan_pool):
    """`live(name)`: an empty pool of NaN."""

    def make(name, max_branches=6):
        model = golden(name, 8)
        empty = start(model.steps, model.params, max_branches, max_tokens=MOST, rows=3, num_likeliest=5)
        num_blocks = (empty.limits.num_blocks + 1,) * len(model.layout.groups)
        return replace(empty, pool=model.steps.make_pool(num_blocks, nan_pool, max_branches + 1))

    return make


def continued(live, branches, count):
    for _ in range(count):
        live, branches = live.advance(branches)
    return live, branches


def prompt_of(golden, name):
    return golden(name, 8).prompt[:PROMPT].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_branches_of_prompts_give_the_tokens_of_transformers(live, golden, name):
    data, here, roots = golden(name, 8).data, live(name), []
    lengths = sorted(int(key[7:]) for key in data if key.startswith("greedy") and int(key[7:]) + 20 <= MOST)
    assert len(lengths) >= 3 and lengths[0] == 1 and lengths[-1] >= 33
    for length in lengths:
        here, root = here.begin(data["prompt"][:length], GREEDY)
        roots.append(root)
    here, ends = continued(here, roots, 20)
    assert [end.answer for end in ends] == [tuple(data[f"greedy_{length}"].tolist()) for length in lengths]


def test_forks_by_seed_draw_what_each_seed_draws_alone(live, golden):
    model, prompt = golden("gemma2", 8), prompt_of(golden, "gemma2")
    seeds = (3, 4, 5, 6)
    expected = [tuple(generate_tokens(model.steps, model.params, prompt, SAMPLED, seed)) for seed in seeds]
    assert len(set(expected)) == len(seeds)
    here, root = live("gemma2").begin(prompt, SAMPLED)
    here, forks = here.fork(root, seeds=seeds)
    here, forks = continued(here, forks, 10)
    assert [fork.answer for fork in forks] == expected
    here, (alone,) = here.fork(root, seeds=[4])
    here, (alone,) = continued(here, (alone,), 10)
    assert alone.answer == expected[1], "and so it does long after the others"


@pytest.mark.parametrize("name", MODELS)
def test_a_kept_fork_is_a_way_back(live, golden, name):
    here, root = live(name).begin(prompt_of(golden, name), GREEDY)
    here, (root,) = continued(here, (root,), 4)
    here, (kept,) = here.fork(root)
    here, (first,) = continued(here, (root,), 9)
    here, (other,) = here.fork(kept, tokens=kept.likeliest[3:4])
    here, (other,) = continued(here, (other,), 9)
    here, (again,) = continued(here, (kept,), 9)
    assert again.tokens == first.tokens != other.tokens
    assert again.logprobs == first.logprobs, "the same state, to the bit"


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_one_pass_over_the_tokens(live, golden, name):
    model = golden(name, 8)
    here, root = live(name).begin(prompt_of(golden, name), SAMPLED)
    here, (root,) = continued(here, (root,), 3)
    here, chosen = here.fork(root, tokens=root.likeliest[1:3])
    here, chosen = continued(here, chosen, 5)
    for branch in chosen:
        logits = np.concatenate(list(chunked_logits(model.steps, model.params, branch.tokens))).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        wanted = [logprobs[at - 1, branch.tokens[at]] for at in range(PROMPT, len(branch.tokens))]
        np.testing.assert_allclose(branch.logprobs, wanted, atol=2e-4)
        assert branch.logprob == pytest.approx(sum(wanted), abs=2e-3)
        np.testing.assert_allclose(branch.likeliest_logprobs, np.sort(logprobs[-2])[:-6:-1], atol=2e-4)


def test_given_tokens_and_cut_forks_go_on_as_prompts_do(live, golden):
    prompt = prompt_of(golden, "gemma2")
    here, whole = live("gemma2").begin(prompt, GREEDY)
    here, part = here.begin(prompt[:1], GREEDY)
    here, part = here.extend(part, prompt[1:])
    assert part.logprob == 0 and len(part.logprobs) == PROMPT - 1
    here, (whole, part) = continued(here, (whole, part), 8)
    assert whole.tokens == part.tokens
    here, (cut,) = here.fork(whole, length=PROMPT + 2)
    assert cut.tokens == whole.tokens[: PROMPT + 2] and cut.logprobs == whole.logprobs[:2]
    here, (cut,) = continued(here, (cut,), 6)
    assert cut.tokens == whole.tokens
    here, (short,) = here.fork(whole, length=1)
    here, (short,) = here.advance([short])
    alone = generate_tokens(here.steps, here.params, prompt[:1], replace(GREEDY, max_tokens=1))
    assert short.tokens == (prompt[0], *alone), "nothing of a branch has run before its second token"


def test_random_commands_leave_every_branch_as_it_is_alone(live, golden):
    choose, reference = random.Random(7), live("qwen3-next")
    here = live("qwen3-next")
    prompts = [golden("qwen3-next", 8).prompt[i : i + 5 + 6 * i].tolist() for i in range(4)]
    for _ in range(50):
        branches, free = here.branches, here.limits.max_branches - len(here.branches)
        branch = choose.choice(branches) if branches else None
        command = choose.choice(["begin", "advance", "advance", "fork", "drop", "extend"])
        if command == "begin" and free:
            here, _ = here.begin(choose.choice(prompts), GREEDY)
        elif command == "fork" and branch and free:
            here, _ = here.fork(branch, tokens=choose.sample(branch.likeliest, min(len(branch.likeliest), free, 2)))
        elif command == "drop" and len(branches) > 3:
            here = here.drop([branch])
        elif command == "extend" and branch and len(branch.tokens) < 36:
            here, _ = here.extend(branch, choose.choice(prompts)[:6])
        elif branch and max(len(one.tokens) for one in branches) < 40:
            here, _ = here.advance(choose.sample(branches, choose.randint(1, len(branches))))
        held = {block for one in here.branches for block in one.blocks}
        assert len({one.slot for one in here.branches}) == len(here.branches)
        assert here.num_free_blocks == here.limits.num_blocks - len(held)
    assert len(here.branches) > 3
    here, ends = here.advance(here.branches)
    for end in ends:
        reference, alone = reference.begin(end.tokens[:-1], GREEDY)
        reference, (alone,) = reference.advance([alone])
        assert alone.tokens == end.tokens
        np.testing.assert_allclose(alone.likeliest_logprobs, end.likeliest_logprobs, atol=1e-4)
        reference = reference.drop([alone])


def test_forks_share_full_blocks_and_what_nobody_holds_is_free(live, golden):
    here, root = live("gemma2").begin(prompt_of(golden, "gemma2"), GREEDY)
    assert here.num_free_blocks == 66 - 3
    here, forks = here.fork(root, 3)
    assert here.num_free_blocks == 66 - 3 - 3, "of three blocks two are full"
    assert all(fork.blocks[:2] == root.blocks[:2] for fork in forks)
    assert len({root.blocks[2], *(fork.blocks[2] for fork in forks)}) == 4
    here = here.drop([root, *forks[:2]])
    assert here.num_free_blocks == 66 - 3 and here.branches == forks[2:]


def test_what_is_no_branch_any_more_is_refused(live, golden):
    first, root = live("qwen3-next").begin(prompt_of(golden, "qwen3-next"), GREEDY)
    second, (moved,) = first.advance([root])
    with pytest.raises(RequestError, match="go on from the Live that came back from it"):
        first.advance([root])
    with pytest.raises(RequestError, match="a branch of 21 tokens was advanced or dropped; keep a fork"):
        second.advance([root])
    with pytest.raises(RequestError, match="a branch of 22 tokens is named twice"):
        second.advance([moved, moved])
    with pytest.raises(RequestError, match="7 branches are above max_branches=6; drop some"):
        second.fork(moved, 6)
    with pytest.raises(RequestError, match="length=5 is not this branch's 22, and this model keeps recurrent state"):
        second.fork(moved, length=5)
    unlikely = next(token for token in range(131) if token not in moved.likeliest)
    with pytest.raises(RequestError, match=f"token {unlikely} is not among the 5 likeliest"):
        second.fork(moved, tokens=[unlikely])
    with pytest.raises(RequestError, match="a branch of 89 tokens is above max_tokens=88"):
        second.extend(moved, [1] * 68)
    with pytest.raises(RequestError, match="token id 500 is not from 0 to"):
        second.extend(moved, [500])
    with pytest.raises(RequestError, match="need a history of tokens"):
        second.begin([1, 2], SamplingParams(presence_penalty=1))
    with pytest.raises(RequestError, match="prompt of 0 tokens"):
        second.begin([], GREEDY)
    with pytest.raises(RequestError, match="rows=0 is below 1"):
        start(second.steps, second.params, rows=0)
    second, _ = second.advance([moved])
