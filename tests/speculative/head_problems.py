# SPDX-License-Identifier: Apache-2.0
"""Draft heads of random weights for stored models, and what they must draft, computed from whole sequences."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from metrale_jax.core.config import AttentionConfig, LayerConfig, MlpConfig, RopeConfig
from metrale_jax.generate import first_state
from metrale_jax.models.decoder import forward_probed, head_logits
from metrale_jax.models.proposer import Wish
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.sampling.sample import gumbel
from metrale_jax.speculative.head_specs import PLAIN, head_specs
from metrale_jax.speculative.heads import head_config
from metrale_jax.state.pool import make_pool
from metrale_jax.steps.batches import ragged_batch

N, K, H = 4, 2, 8
ROPE = RopeConfig(tuple(float(x) for x in 100.0 ** -(np.arange(H // 2) / (H // 2))))
LAYER = LayerConfig((AttentionConfig(N, K, H, H**-0.5, ROPE),), MlpConfig(24, "silu"))
# Tokens of a sequence that the target is asked for at once; shorter ones are filled up.
LONGEST = 32
GREEDY = SamplingParams(temperature=0)


def head_of(kind, target, draft_vocab_size=0, capture=()):
    """The config of a head for `target`."""
    return head_config(kind, target, LAYER, draft_vocab_size, capture)


def random_params(config, seed=0, scale=0.4, names=PLAIN):
    """Weights of a head that draws on all of its inputs."""
    draw = np.random.default_rng(seed)

    def leaf(spec):
        if spec.integer:
            return jnp.asarray(np.sort(draw.choice(config.vocab_size, spec.shape[0], replace=False)), jnp.int32)
        return jnp.asarray(draw.normal(size=spec.shape) * scale + (len(spec.shape) == 1), jnp.float32)

    return jax.tree.map(leaf, head_specs(config, names))


class Target:
    """What a stored model computes for a whole sequence in a pool of its own, without any proposer."""

    def __init__(self, golden, captures):
        self.params, self.model, self.captures = golden.params, golden.steps.model, captures
        self.run = jax.jit(partial(self._run, self.model, captures))

    @staticmethod
    def _run(model, captures, params, tokens):
        state = first_state(model.layout, LONGEST, 8, SamplingParams(), 0, (), model.config.vocab_size)
        state = jax.tree.map(jnp.asarray, state)
        batch = ragged_batch(state, tokens, jnp.asarray([LONGEST], jnp.int32), model.layout.block_size)
        pool = make_pool(model.layout, (9,) * len(model.layout.groups))
        hidden, _, captured = forward_probed(model, params, pool, batch, captures)
        return hidden, captured, head_logits(model, params, hidden, jnp.arange(LONGEST))

    def rows(self, tokens):
        """Final rows, captured rows and logits of each token, in float64."""
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens)] = tokens
        found = self.run(self.params, padded)
        return jax.tree.map(lambda array: np.asarray(array, np.float64)[: len(tokens)], found)

    def likeliest(self, tokens, count):
        """The `count` tokens that follow by the greatest logits."""
        made = [int(token) for token in tokens]
        for _ in range(count):
            made.append(int(self.rows(made)[2][-1].argmax()))
        return made[len(tokens) :]


@dataclass(frozen=True)
class Dense:
    """A head over whole sequences, one entry after the other, in float64."""

    head: Any
    weights: Any
    target: Target

    def drafts(self, tokens, count, temperature=0.0, seed=0, unknown=()):
        """The `count` drafts after `tokens`, the last of which the target has not run, and the scores of each over
        the draft vocabulary. Positions in `unknown` have no feature."""
        p = jax.tree.map(lambda array: np.asarray(array, np.float64), self.weights)
        params, config = self.target.params, self.target.model.config
        embed = np.asarray(params.embed, np.float64) * config.embed_scale
        matrix = p.head if not isinstance(p.head, tuple) else np.asarray(self._target_head(params), np.float64)
        tokens = [int(token) for token in tokens]
        hidden, captured, _ = self.target.rows(tokens[:-1])
        features = np.concatenate(captured, axis=1) @ p.fc.weight.T if captured else hidden
        features = features * ~np.isin(np.arange(len(features)), unknown)[:, None]
        features = [np.zeros(config.hidden_dim), *features]
        keys, values, drafts, scores = [], [], [], []
        for position in range(len(tokens) + count - 1):
            feedback, output = self._entry(p, position, features[position], embed[tokens[position]], keys, values)
            if position < len(tokens) - 1 - len(drafts):
                continue
            scores.append(matrix @ output * config.logit_scale)
            noisy = scores[-1]
            if temperature:
                noise = gumbel(jnp.asarray([seed], jnp.uint32), jnp.asarray([position + 1]), config.vocab_size)[0]
                noisy = noisy / temperature + self._among(np.asarray(noise))
            drafts.append(int(self._among(np.arange(config.vocab_size))[noisy.argmax()]))
            tokens.append(drafts[-1])
            features.append(feedback)
            if len(drafts) == count:
                break
        return drafts, np.asarray(scores)

    @staticmethod
    def _target_head(params):
        return params.embed if isinstance(params.head, tuple) else params.head

    def _among(self, array):
        ids = self.weights.token_ids
        return array if isinstance(ids, tuple) else array[np.asarray(ids)]

    def _norm(self, x, weight):
        return x / np.sqrt((x * x).mean() + self.head.norm_eps) * weight

    def _entry(self, p, position, feature, embed, keys, values):
        eagle = bool(self.head.capture)
        pair = np.concatenate([self._norm(embed, p.embed_norm), self._norm(feature, p.hidden_norm)])
        residual = feature if eagle else p.fc.weight @ pair
        x = pair if eagle else self._norm(residual, p.layer.mixer_norm)
        q, k, v = np.split(p.layer.mixers[0].qkv.weight @ x, [N * H, (N + K) * H])
        keys.append(_turned(k.reshape(K, H), position))
        values.append(v.reshape(K, H))
        scores = np.einsum("kgh,skh->kgs", _turned(q.reshape(N, H), position).reshape(K, -1, H), np.stack(keys))
        shares = np.exp(scores * H**-0.5)
        shares = shares / shares.sum(axis=-1, keepdims=True)
        x = residual + p.layer.mixers[0].out.weight @ np.einsum("kgs,skh->kgh", shares, np.stack(values)).reshape(-1)
        gate, up = np.split(p.layer.mlp.gate_up.weight @ self._norm(x, p.layer.mlp_norm), 2)
        x = x + p.layer.mlp.down.weight @ (gate / (1 + np.exp(-gate)) * up)
        output = self._norm(x, p.final_norm)
        return x if eagle else output, output


def _turned(x, position):
    angles = position * np.asarray(ROPE.inv_freq)
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def drafter_after(steps, params, num_drafts, fill):
    """`drafts(tokens)`: greedy drafts after `tokens`, of which all but the last are run."""
    model = steps.model
    propose = jax.jit(partial(model.proposer.propose, model, wish=Wish(num_drafts, True)))

    def drafts(tokens):
        padded = np.zeros(LONGEST, np.int32)
        padded[: len(tokens) - 1] = tokens[:-1]
        state = first_state(model.layout, len(tokens), 6, GREEDY, 0, (), model.config.vocab_size)
        pool = steps.make_pool((7,) * len(model.layout.groups), fill)
        pool = steps.run("begin_slots", pool, np.asarray([1], np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool))
        pool, state, _ = steps.run("prefill", params, pool, state, padded, np.asarray([len(tokens) - 1], np.int32))
        state = state.replace(last_token=jnp.asarray(tokens[-1:], jnp.int32))
        found, _ = propose(params, pool, state, jnp.asarray([num_drafts], jnp.int32))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[0], found)

    return drafts
