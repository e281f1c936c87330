# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of training: one step of the optimiser, and a measurement. The one place of `jax.jit` here."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from metrale_jax.speculative.heads import HeadParams
from metrale_jax.training.loss import acceptance, head_loss
from metrale_jax.training.unroll import Texts


@dataclass(frozen=True)
class Recipe:
    """How a head is trained: the height of the learning rate, steps in all, of which the first few climb to it, turns
    of drafting and how many steps at first train one turn alone, what of a weight decays each step, and how much of
    the rate `fc` moves by."""

    learning_rate: float
    num_steps: int
    num_turns: int
    single_steps: int = 0
    weight_decay: float = 0.01
    warm_steps: int = 20
    max_norm: float = 1.0
    fc_share: float = 1.0

    def turns(self, step: int) -> int:
        """The turns that step `step` trains."""
        return 1 if step < self.single_steps else self.num_turns


@struct.dataclass
class Progress:
    """What a run stands at: `weights`, a `HeadParams` without head and token ids, the optimiser's `memory`, int32
    `step`."""

    weights: Any
    memory: Any
    step: Any


class Programs:
    """Training's programs for one head, made on demand. `platform` is what they are lowered for."""

    def __init__(self, config, recipe: Recipe, platform: str):
        self.config, self.recipe, self.platform = config, recipe, platform
        warm = min(recipe.warm_steps, max(1, recipe.num_steps // 2))
        rate = optax.warmup_cosine_decay_schedule(
            0.0, recipe.learning_rate, warm, max(warm + 1, recipe.num_steps), recipe.learning_rate * 0.02
        )
        self.optimiser = optax.chain(
            optax.clip_by_global_norm(recipe.max_norm),
            optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay, mask=_matrices),
        )
        self._step = jax.jit(self._stepped, static_argnums=3, donate_argnums=0)
        self._measure = jax.jit(self._measured)

    def begun(self, params: HeadParams) -> Progress:
        """The run before its first step. A head's rows stay the target's: few texts have most tokens a few times only,
        and what is not trained costs no memory."""
        weights = jax.tree.map(jnp.array, params.replace(head=(), token_ids=()))  # copies: steps take them over
        return Progress(weights, self.optimiser.init(weights), jnp.zeros((), jnp.int32))

    def step(self, progress: Progress, texts: Texts, scorer: Any, num_turns: int) -> tuple[Progress, Any, Any]:
        """The run one step of `num_turns` turns on (`progress` is donated), the loss before it, and each turn's share
        of right guesses."""
        return self._step(progress, texts, scorer, num_turns)

    def measure(self, params: HeadParams, texts: Texts, scorer: Any, draws: tuple):
        """`acceptance` of a head by the target's whole `scorer`, one turn further than it was trained for."""
        return self._measure(params, texts, scorer, draws)

    def _stepped(self, progress: Progress, texts: Texts, scorer: Any, num_turns: int):
        def lost(weights):
            return head_loss(self.config, weights, texts, scorer, num_turns, self.platform)

        (loss, right), slopes = jax.value_and_grad(lost, has_aux=True)(progress.weights)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to counts
            changes, memory = self.optimiser.update(slopes, progress.memory, progress.weights)
        slower = jax.tree.map(lambda change: change * self.recipe.fc_share, changes.fc)
        weights = optax.apply_updates(progress.weights, changes.replace(fc=slower))
        return Progress(weights, memory, progress.step + 1), loss, right

    def _measured(self, params, texts, scorer, draws):
        return acceptance(self.config, params, texts, scorer, draws, self.recipe.num_turns + 1, self.platform)


def _matrices(weights):
    return jax.tree.map(lambda array: array.ndim > 1, weights)
