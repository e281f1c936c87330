# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts (Shazeer et al. 2017): a router chooses for each token which few of many small feed-forward layers
it goes through. No capacity: every token gets all the experts that it chose, whatever others chose."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from metrale_jax.core.config import MlpConfig
from metrale_jax.core.errors import ConfigError
from metrale_jax.layers.linear import Linear, project
from metrale_jax.layers.mlp import mlp
from metrale_jax.layers.placement import Placement
from pallas_kernels.activations import Activation
from pallas_kernels.grouped_matmul.op import grouped_matmul

SCORINGS = ("softmax", "sigmoid")
# Keeps weights finite where the sigmoids of all that is chosen vanish.
LEAST_SUM = 1e-20


@dataclass(frozen=True)
class RouterConfig:
    """How `top_k` of `num_experts` are chosen and weighted.

    Scores are the softmax over all experts or each expert's sigmoid. Experts are `num_groups` equal runs, of which only
    the `top_groups` whose two best scores have the highest sums are looked at. Weights are the scores of the chosen,
    divided by their sum where `renormalised`, times `scale`.
    """

    num_experts: int
    top_k: int
    scoring: str
    renormalised: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self):
        if self.scoring not in SCORINGS:
            raise ConfigError(f"router scoring {self.scoring!r} is not known; known are {', '.join(SCORINGS)}.")
        if not 0 < self.top_k <= self.num_experts:
            raise ConfigError(
                f"{self.top_k} experts cannot be chosen of {self.num_experts}; correct num_experts_per_tok."
            )
        if self.num_groups > 1:
            self._check_groups()

    def _check_groups(self):
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or size < 2:
            raise ConfigError(
                f"{self.num_experts} experts are not {self.num_groups} groups of two or more each; correct n_group."
            )
        if not 0 < self.top_groups <= self.num_groups:
            raise ConfigError(f"{self.top_groups} groups cannot be chosen of {self.num_groups}; correct topk_group.")
        if self.top_groups * size < self.top_k:
            raise ConfigError(
                f"{self.top_groups} groups of {size} experts hold fewer than the {self.top_k} to choose; correct "
                "topk_group or num_experts_per_tok."
            )


@dataclass(frozen=True)
class MoeConfig:
    """Static facts of one mixture layer: `hidden_dim` is an expert's width, `shared` the expert that every token goes
    through, None where there is none."""

    router: RouterConfig
    hidden_dim: int
    activation: Activation
    shared: MlpConfig | None = None


@struct.dataclass
class MoeParams:
    """`router` is a linear layer `[E, D]`; `correction [E]` moves its choice and never the weights, or `()`.

    `gate_up [E, 2F, D]` holds each expert's gate rows above its up rows, or `[E, F, D]` the rows of an activation that
    is not gated; `down` is `[E, D, F]`. Both are linear layers whose bias is `[E, 2F]`, `[E, D]` or `()`. `shared` are
    the shared expert's params, or `()`, and `shared_gate` the linear layer `[1, D]` whose sigmoid weighs it, or `()`.
    """

    router: Linear
    gate_up: Linear
    down: Linear
    correction: Any = ()
    shared: Any = ()
    shared_gate: Any = ()


def moe(x: Float[Array, "T D"], params: MoeParams, config: MoeConfig, place: Placement) -> Float[Array, "T D"]:
    """The weighted sum of what each token's experts make of it, and of what the shared expert does."""
    with jax.named_scope("router"):
        logits = project(x.astype(params.router.weight.dtype), params.router)
        experts, weights = route(logits, params.correction, config.router)
    with jax.named_scope("experts"):
        out = _mixed(x, params, config, experts, weights, place)
    if config.shared is not None:
        with jax.named_scope("shared_expert"):
            shared = mlp(x, params.shared, config.shared, place).astype(jnp.float32)
            if not isinstance(params.shared_gate, tuple):
                shared *= jax.nn.sigmoid(project(x, params.shared_gate))
            out += shared
    return out.astype(x.dtype)


def chosen_weights(params: MoeParams, config: MoeConfig) -> tuple[tuple[Linear, Linear], float]:
    """The weights of all experts, and the share of them that one token goes through."""
    return (params.gate_up, params.down), config.router.top_k / config.router.num_experts


def route(
    logits: Float[Array, "T E"], correction: Any, router: RouterConfig
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Each token's experts, the best first, and their float32 weights.

    `correction [E]` or `()` is added to the scores that are compared and is no part of a weight. Of equal scores the
    lowest expert's counts as the highest, which transformers leaves open.
    """
    if router.scoring == "softmax":
        scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    else:
        scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    choice = scores if isinstance(correction, tuple) else scores + correction.astype(jnp.float32)
    if router.num_groups > 1:
        choice = _within_best_groups(choice, router)
    _, experts = jax.lax.top_k(choice, router.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if router.renormalised:
        weights /= jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), LEAST_SUM)
    return experts, weights * router.scale


def _within_best_groups(choice: Float[Array, "T E"], router: RouterConfig) -> Float[Array, "T E"]:
    groups = choice.reshape(choice.shape[0], router.num_groups, -1)
    best_two, _ = jax.lax.top_k(groups, 2)
    _, kept = jax.lax.top_k(jnp.sum(best_two, axis=-1), router.top_groups)
    inside = jnp.any(kept[:, :, None] == jnp.arange(router.num_groups), axis=1)
    return jnp.where(inside[:, :, None], groups, -jnp.inf).reshape(choice.shape)


def _mixed(x, params, config, experts, weights, place) -> Float[Array, "T D"]:
    """The float32 sum over each token's experts, in the order of its choice."""
    num_tokens, top_k = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    group_sizes = jnp.zeros(config.router.num_experts, jnp.int32).at[flat].add(1, mode="drop")
    rows = x.at[order // top_k].get(mode="clip")
    up, down = params.gate_up, params.down
    hidden = grouped_matmul(rows, up.weight, group_sizes, place.platform, up.bias, config.activation)
    out = grouped_matmul(hidden, down.weight, group_sizes, place.platform, down.bias)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    out = out.at[places].get(mode="clip").reshape(num_tokens, top_k, -1)
    return jnp.sum(out.astype(jnp.float32) * weights[:, :, None], axis=1)
