# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers must not depend on any proposer: the oracle's answers with and without drafts."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from metrale_jax.generate import generate_speculative, generate_tokens
from metrale_jax.models.proposer import AbstractProposer, Drafts
from metrale_jax.sampling.params import SamplingParams

NEW = 20
REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NEW),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4, max_tokens=NEW
    ),
    "bias": SamplingParams(temperature=1.1, top_k=20, logit_bias={5: 4.0, 9: -50.0}, max_tokens=NEW),
    "min_tokens": SamplingParams(temperature=1.2, min_tokens=9, max_tokens=NEW),
}


def prompts(model):
    """Two prompts of one length, so that one set of programs serves both: with a repeated passage, and without."""
    tokens = [int(token) for token in model.prompt]
    return [[*tokens[:9], *tokens[2:9]], tokens[:16]]


@dataclass(frozen=True)
class Scripted(AbstractProposer):
    """Drafts what its weights, int32 `[C]` by position, say: to try whatever may be accepted or rejected."""

    def observe(self, model, params, pool, batch, hidden, captured):
        """The pool as it is."""
        return pool

    def propose(self, model, params, pool, state, limits, wish):
        """The script after each row's last token."""
        places = state.seq_len[:, None] + 1 + jnp.arange(wish.num_drafts, dtype=jnp.int32)
        return Drafts(params.drafter.at[places].get(mode="clip"), limits), pool


def script(prompt, answer, wrong_every: int):
    """The tokens of an answer by position, each `wrong_every`th of them another one."""
    tokens = np.zeros(256, np.int32)
    for index, token in enumerate(answer):
        tokens[len(prompt) + index] = token + (index % wrong_every == wrong_every - 1)
    return jnp.asarray(tokens)


def assert_solo(model, proposer, drafter=(), num_drafts=3, names=tuple(REQUESTS), fill=None, stop_ids=(3, 11, 17)):
    """Asserts equal answers with and without drafts; gives the numbers of steps that drafted, of drafts and of those
    accepted. A `Scripted` proposer is told the answer."""
    steps, params = model.drafted_by(proposer, drafter, 8, num_drafts)
    pairs = []
    options = {} if fill is None else {"fill": fill}
    for prompt in prompts(model):
        for name in names:
            request = prompt, REQUESTS[name], 7, stop_ids
            alone = generate_tokens(model.steps, model.params, *request, **options)
            if isinstance(proposer, Scripted):
                params = params.replace(drafter=script(prompt, alone, wrong_every=5))
            drafted = generate_speculative(steps, params, *request, **options)
            assert drafted.tokens == alone, (name, drafted, alone)
            assert all(0 <= accepted <= proposed <= num_drafts for proposed, accepted in drafted.steps)
            pairs += drafted.steps
    return len(pairs), sum(proposed for proposed, _ in pairs), sum(accepted for _, accepted in pairs)
