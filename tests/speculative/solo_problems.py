# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers must not depend on any proposer: the oracle's answers with and without drafts."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from metrale_jax.generate import generate_tokens
from metrale_jax.models.proposer import AbstractProposer, Drafts
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.state.formats import StateFormats

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
HYBRID = StateFormats("float32", "float32", num_pending=8)


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


def assert_solo(model, proposer, drafter=(), num_drafts=3, names=tuple(REQUESTS), fill=None, formats=HYBRID):
    """Asserts equal answers with and without drafts; gives the numbers of steps that drafted, of drafts and of those
    accepted. A `Scripted` proposer is told the answer."""
    steps, params = model.drafted_by(proposer, drafter, 8, replace(formats, num_pending=num_drafts))
    counts = [0, 0, 0]

    def tally(proposed, accepted):
        assert 0 <= accepted <= proposed <= num_drafts
        for index, count in enumerate((1, proposed, accepted)):
            counts[index] += count

    options = {} if fill is None else {"fill": fill}
    for prompt in prompts(model):
        for name in names:
            request = prompt, REQUESTS[name], 7, (3, 11, 17)
            alone = generate_tokens(model.steps, model.params, *request, **options)
            if isinstance(proposer, Scripted):
                params = params.replace(drafter=script(prompt, alone, wrong_every=5))
            drafted = generate_tokens(steps, params, *request, **options, num_drafts=num_drafts, tally=tally)
            assert drafted == alone, (name, drafted, alone)
    return counts
