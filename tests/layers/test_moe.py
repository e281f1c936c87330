# SPDX-License-Identifier: Apache-2.0
"""Routing rule by rule, and a mixture against a loop over tokens and experts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.config import MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.linear import Linear
from metrale_jax.layers.mlp import MlpParams
from metrale_jax.layers.moe import MoeConfig, MoeParams, RouterConfig, moe, route
from metrale_jax.layers.placement import Placement
from pallas_kernels.grouped_matmul.cases import SQUARED, SWIGLU
from tests.conftest import GOLDENS

SOFTMAX = RouterConfig(num_experts=7, top_k=3, scoring="softmax", renormalised=True)
SIGMOID = replace(SOFTMAX, scoring="sigmoid")
PLACE = Placement(0, 1e-6, "cpu")


def logits_of(num_tokens, num_experts, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_tokens, num_experts)), jnp.float32)


def softmax(row):
    shifted = np.exp(row - row.max())
    return shifted / shifted.sum()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalised", [True, False])
def test_weights_are_the_scores_of_the_best(scoring, renormalised):
    logits = logits_of(9, 7)
    experts, weights = route(logits, (), replace(SOFTMAX, scoring=scoring, renormalised=renormalised, scale=1.5))
    for row, chosen, weight in zip(np.asarray(logits, np.float64), experts, weights, strict=True):
        scores = softmax(row) if scoring == "softmax" else 1 / (1 + np.exp(-row))
        assert chosen.tolist() == np.argsort(-scores)[:3].tolist()
        expected = scores[chosen] / (scores[chosen].sum() if renormalised else 1) * 1.5
        np.testing.assert_allclose(weight, expected, rtol=1e-5)


ROUTERS = {
    "softmax": RouterConfig(11, 4, "softmax", renormalised=False),
    "softmax-renormalised": RouterConfig(128, 8, "softmax", renormalised=True),
    "mixtral": RouterConfig(8, 2, "softmax", renormalised=True),
    "gpt-oss": RouterConfig(32, 4, "softmax", renormalised=True),
    "minimax": RouterConfig(37, 8, "sigmoid", renormalised=True),
    "groups": RouterConfig(24, 6, "sigmoid", True, 2.5, num_groups=6, top_groups=3),
    "groups-plain": RouterConfig(24, 5, "sigmoid", False, num_groups=4, top_groups=2),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routes_are_those_of_transformers(name):
    stored = np.load(GOLDENS / "routers.npz")
    correction = stored.get(f"{name}/correction", ())
    experts, weights = route(jnp.asarray(stored[f"{name}/logits"]), correction, ROUTERS[name])
    # Some of transformers' routers leave the order of the chosen open.
    for ours, theirs in zip((experts, weights), ("experts", "weights"), strict=True):
        keys = np.argsort(experts, axis=-1)
        their_keys = np.argsort(stored[f"{name}/experts"], axis=-1)
        expected = np.take_along_axis(stored[f"{name}/{theirs}"], their_keys, axis=-1)
        np.testing.assert_allclose(np.take_along_axis(np.asarray(ours), keys, axis=-1), expected, rtol=1e-5)


def test_the_correction_changes_the_choice_and_not_the_weight():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    router = RouterConfig(4, 2, "sigmoid", renormalised=False)
    plain, _ = route(logits, (), router)
    experts, weights = route(logits, jnp.asarray([0.0, -5.0, 0.0, 5.0]), router)
    assert plain.tolist() == [[0, 1]]
    assert experts.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, jax.nn.sigmoid(jnp.asarray([[-1.0, 2.0]])), rtol=1e-6)


def test_of_equal_scores_the_lowest_experts_are_taken():
    for router in (SOFTMAX, SIGMOID):
        experts, weights = route(jnp.zeros((2, 7)), (), router)
        assert experts.tolist() == [[0, 1, 2]] * 2
        np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    groups = RouterConfig(8, 2, "sigmoid", True, num_groups=4, top_groups=2)
    assert route(jnp.zeros((1, 8)), jnp.asarray([0.0] * 6 + [1.0] * 2), groups)[0].tolist() == [[6, 7]]
    assert route(jnp.zeros((1, 8)), (), replace(groups, top_k=4))[0].tolist() == [[0, 1, 2, 3]]


def test_only_the_best_groups_are_looked_at():
    # The best expert of all is in a group whose two best have a lower sum than those of the others.
    scores = jnp.asarray([[0.9, 0.1, 0.7, 0.6, 0.65, 0.5]])
    logits = jnp.log(scores / (1 - scores))
    router = RouterConfig(6, 2, "sigmoid", False, num_groups=3, top_groups=1)
    assert route(logits, (), router)[0].tolist() == [[2, 3]]
    assert route(logits, (), replace(router, top_groups=2))[0].tolist() == [[2, 4]]
    assert route(logits, (), replace(router, top_groups=3))[0].tolist() == [[0, 2]]
    # Scores below zero, as a correction makes them, are still better than those of groups left out.
    assert route(logits, jnp.full((6,), -3.0), router)[0].tolist() == [[2, 3]]


def test_scores_that_vanish_make_no_weight_infinite():
    _, weights = route(jnp.full((1, 7), -200.0), (), SIGMOID)
    assert np.isfinite(weights).all()


FAULTS = [
    ({"top_k": 8}, "8 experts cannot be chosen of 7; correct num_experts_per_tok"),
    ({"top_k": 0}, "0 experts cannot be chosen of 7"),
    ({"scoring": "cosine"}, "'cosine' is not known"),
    ({"num_groups": 2}, "7 experts are not 2 groups"),
    ({"num_groups": 7}, "7 experts are not 7 groups of two"),
    ({"num_experts": 8, "num_groups": 2, "top_groups": 3}, "3 groups cannot be chosen of 2"),
    ({"num_experts": 8, "num_groups": 4, "top_groups": 1}, "1 groups of 2 experts hold fewer than the 3"),
]


@pytest.mark.parametrize("changes, words", FAULTS, ids=[words for _, words in FAULTS])
def test_a_faulty_router_is_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(SOFTMAX, **changes)


class Mixture:
    """Random weights of a small mixture, and its output token by token in float64."""

    def __init__(self, router=SOFTMAX, shared=False, activation=SWIGLU, width=10, hidden=6, seed=3):
        self.rng = np.random.default_rng(seed)
        count = router.num_experts
        rows = 2 * hidden if activation.gated else hidden
        self.config = MoeConfig(router, hidden, activation, MlpConfig(hidden, "silu") if shared else None)
        self.params = MoeParams(
            router=Linear(self.drawn(count, width)),
            gate_up=Linear(self.drawn(count, rows, width), self.drawn(count, rows)),
            down=Linear(self.drawn(count, width, hidden), self.drawn(count, width)),
            correction=self.drawn(count),
            shared=MlpParams(Linear(self.drawn(2 * hidden, width)), Linear(self.drawn(width, hidden)))
            if shared
            else (),
            shared_gate=Linear(self.drawn(1, width)) if shared else (),
        )

    def drawn(self, *shape):
        return jnp.asarray(0.5 * self.rng.normal(size=shape), jnp.float32)

    def run(self, x):
        return np.asarray(jax.jit(lambda x, params: moe(x, params, self.config, PLACE))(x, self.params))

    def expected(self, x):
        params, config = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), self.params), self.config
        x = np.asarray(x, np.float64)
        experts, weights = route(
            jnp.asarray(x @ params.router.weight.T, jnp.float32), self.params.correction, config.router
        )
        out = np.zeros_like(x)
        for token, row in enumerate(x):
            for expert, weight in zip(np.asarray(experts)[token], np.asarray(weights)[token], strict=True):
                hidden = self.activated(params.gate_up.weight[expert] @ row + params.gate_up.bias[expert])
                out[token] += weight * (params.down.weight[expert] @ hidden + params.down.bias[expert])
            if config.shared is not None:
                whole = params.shared.down.weight @ self.silu_gated(params.shared.gate_up.weight @ row)
                out[token] += whole / (1 + np.exp(-params.shared_gate.weight[0] @ row))
        return out

    def activated(self, sums):
        return self.silu_gated(sums) if self.config.activation.gated else np.maximum(sums, 0) ** 2

    @staticmethod
    def silu_gated(sums):
        gate, up = np.split(sums, 2)
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("num_tokens", [1, 2, 65])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"router": SIGMOID, "shared": True},
        {"router": RouterConfig(12, 4, "sigmoid", True, 2.5, num_groups=3, top_groups=2)},
        {"router": RouterConfig(5, 5, "softmax", False)},
        {"router": RouterConfig(1, 1, "sigmoid", False)},
        {"activation": SQUARED},
    ],
    ids=["softmax", "shared", "groups", "all", "one", "ungated"],
)
def test_a_mixture_is_the_sum_over_its_experts(options, num_tokens):
    mixture = Mixture(**options)
    x = mixture.drawn(num_tokens, 10)
    np.testing.assert_allclose(mixture.run(x), mixture.expected(x), rtol=0, atol=3e-5)


def test_a_token_does_not_depend_on_its_neighbours():
    mixture = Mixture(RouterConfig(9, 2, "sigmoid", True), shared=True)
    x = mixture.drawn(33, 10)
    alone = mixture.run(x)[:5]
    # All the others crowd one expert, or are no numbers at all, as padding may be.
    crowd, broken = (jnp.concatenate([x[:5], jnp.broadcast_to(row, (28, 10))]) for row in (x[6], x[6] * jnp.nan))
    np.testing.assert_allclose(mixture.run(crowd)[:5], alone, rtol=0, atol=1e-6)
    np.testing.assert_allclose(mixture.run(broken)[:5], alone, rtol=0, atol=1e-6)


def test_experts_that_nobody_chose_are_not_looked_at():
    mixture = Mixture()
    x = mixture.drawn(2, 10)
    expected = mixture.run(x)
    experts, _ = route(x @ mixture.params.router.weight.T, mixture.params.correction, mixture.config.router)
    unused = jnp.asarray(sorted(set(range(7)) - set(np.asarray(experts).ravel().tolist())))
    assert len(unused)
    for name in ("gate_up", "down"):
        spoilt = jax.tree.map(lambda leaf: leaf.at[unused].set(jnp.nan), getattr(mixture.params, name))
        mixture.params = mixture.params.replace(**{name: spoilt})
    np.testing.assert_array_equal(mixture.run(x), expected)
