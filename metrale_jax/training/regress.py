# SPDX-License-Identifier: Apache-2.0
"""The best linear head, found in closed form: where the training of an MTP head begins.

Least squares from what `fc` reads, the embedding of a token and the final row before it, to the token's own final row.
For SmolLM2-135M this alone guesses three in ten tokens, which gradient steps take half an hour to come to.
"""

from collections.abc import Callable, Iterator

import numpy as np

from metrale_jax.layers.linear import Linear
from metrale_jax.speculative.heads import HeadParams
from metrale_jax.training.pack import Packed

# Added to the sums of squares, a sum over as many rows as there are: rows of unit mean square move by little.
RIDGE = 3.0
ROWS = 4096
SCALED_ROWS = 1024
SCALES = tuple(0.2 + 0.05 * number for number in range(25))


def linear_start(
    head: HeadParams, packed: Packed, hidden: np.ndarray, table: np.ndarray, eps: float, scores: Callable
) -> HeadParams:
    """The head whose layer adds nothing yet and whose `fc` is the best linear one. `hidden` are the target's final
    rows by place; `scores(rows)` the target's logits over the draft vocabulary.

    `final_norm` is as large as makes guesses neither too sure nor too vague.
    """
    squares = products = 0.0
    for inputs, wanted in _pairs(packed, hidden, table, eps):
        squares, products = squares + inputs.T @ inputs, products + inputs.T @ wanted
    squares = np.asarray(squares, np.float64) + RIDGE * np.eye(len(squares))
    weight = np.linalg.solve(squares, np.asarray(products, np.float64)).T.astype(np.float32)
    inputs, wanted = next(_pairs(packed, hidden, table, eps))
    some = slice(None, None, max(1, len(inputs) // SCALED_ROWS))
    guessed = _unit(inputs[some] @ weight.T, eps)
    scale = _best_scale(np.asarray(scores(guessed)), np.asarray(scores(wanted[some])))
    (mixer,), mlp = head.layer.mixers, head.layer.mlp
    silent = lambda linear: linear.replace(weight=np.zeros_like(linear.weight))  # noqa: E731
    return head.replace(
        fc=Linear(weight),
        layer=head.layer.replace(
            mixers=(mixer.replace(out=silent(mixer.out)),), mlp=mlp.replace(down=silent(mlp.down))
        ),
        final_norm=np.full(len(weight), scale, np.float32),
    )


def _pairs(packed: Packed, hidden: np.ndarray, table: np.ndarray, eps: float) -> Iterator[tuple]:
    """What `fc` reads of tokens whose successor is asked for, and their final rows."""
    chosen = packed.asked & (packed.positions > 0)
    tokens, places = packed.tokens[chosen], packed.places[chosen]
    for start in range(0, len(tokens), ROWS):
        at = slice(start, start + ROWS)
        before, own = (hidden[places[at] - back].astype(np.float32) for back in (1, 0))
        embeds = table[tokens[at]].astype(np.float32)
        yield np.concatenate([_unit(embeds, eps), _unit(before, eps)], axis=1), own


def _unit(rows: np.ndarray, eps: float) -> np.ndarray:
    return rows / np.sqrt(np.mean(np.square(rows), axis=-1, keepdims=True) + eps)


def _best_scale(guessed: np.ndarray, wanted: np.ndarray) -> float:
    """What to multiply the `guessed` logits by for the least cross-entropy to the `wanted`."""
    chances = np.exp(wanted - wanted.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)

    def lost(scale: float) -> float:
        scaled = guessed * np.float32(scale)
        highest = scaled.max(axis=1, keepdims=True)
        total = np.log(np.exp(scaled - highest).sum(axis=1)) + highest[:, 0]
        return float(np.mean(total - (chances * scaled).sum(axis=1)))

    # In the spread of the target's own logits, which is that of rows of their size.
    spread = float(wanted.std() / max(guessed.std(), 1e-9))
    return min((spread * scale for scale in SCALES), key=lost)
