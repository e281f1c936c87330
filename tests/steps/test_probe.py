# SPDX-License-Identifier: Apache-2.0
"""Rows seen between layers are those that pass there, an edit does what it says, and none costs nothing."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from metrale_jax.core.errors import ConfigError
from metrale_jax.evaluation import chunked_logits
from metrale_jax.generate import first_state, generate_tokens
from metrale_jax.models.decoder import make_model
from metrale_jax.models.edit import AbstractEdit
from metrale_jax.probing import AddVectors, RemoveDirections, captured, lens_logits, with_edit
from metrale_jax.sampling.params import SamplingParams
from metrale_jax.steps.build import Steps, jitted_step
from metrale_jax.steps.home import placed_as
from tests.conftest import FORMATS

GREEDY = SamplingParams(temperature=0, max_tokens=3)
LENGTH = 13


@pytest.fixture(scope="module")
def model(golden):
    return golden("qwen3", 8)


def tokens_of(model):
    return model.prompt[:LENGTH].tolist()


def logits_of(steps, params, tokens):
    return np.concatenate(list(chunked_logits(steps, params, tokens)))


def later_layers(model, rows, first):
    """Logits of a smaller model whose embeddings are `rows` and whose layers are those from `first` on."""
    config = replace(model.config, layers=model.config.layers[first:], embed_scale=1.0)
    static = make_model(config, "cpu", 8, FORMATS)
    head = model.params.embed if isinstance(model.params.head, tuple) else model.params.head
    table = np.zeros((config.vocab_size, rows.shape[1]), np.float32)
    table[: len(rows)] = rows
    params = model.params.replace(embed=jnp.asarray(table), layers=model.params.layers[first:], head=head)
    return logits_of(Steps(static, model.steps.home), params, list(range(len(rows))))


def test_what_is_captured_is_what_the_later_layers_run_on(model):
    tokens, depth = tokens_of(model), len(model.config.layers)
    rows = captured(model.steps, model.params, tokens, (0, 1, depth))
    assert rows.shape == (3, LENGTH, model.config.hidden_dim)
    np.testing.assert_array_equal(rows[0], np.asarray(model.params.embed)[tokens])
    expected = logits_of(model.steps, model.params, tokens)
    np.testing.assert_allclose(later_layers(model, rows[1], 1), expected, atol=2e-5)
    np.testing.assert_allclose(lens_logits(model.steps, model.params, rows[2]), expected, atol=2e-5)
    assert np.abs(lens_logits(model.steps, model.params, rows[1]) - expected).max() > 0.1


def test_a_vector_added_is_one_that_the_later_layers_see(model):
    tokens = tokens_of(model)
    steered = with_edit(model.steps, AddVectors((1,)))
    vector = np.random.default_rng(0).normal(size=model.config.hidden_dim).astype(np.float32)
    plain = logits_of(model.steps, model.params, tokens)
    none = logits_of(steered, model.params.replace(edits=(0 * vector,)), tokens)
    np.testing.assert_array_equal(none, plain)
    moved = logits_of(steered, model.params.replace(edits=(vector,)), tokens)
    (rows,) = captured(model.steps, model.params, tokens, (1,))
    np.testing.assert_allclose(moved, later_layers(model, rows + vector, 1), atol=2e-5)
    assert np.abs(moved - plain).max() > 0.1
    compiled = steered.num_compiles
    params = model.params.replace(edits=(2 * vector,))
    seen = captured(steered, params, tokens, (1,))[0]
    np.testing.assert_allclose(seen, rows + 2 * vector, atol=1e-6)
    assert steered.num_compiles == compiled + 1, "the probe's program; another vector needs none"


def test_an_answer_is_steered_in_every_step_of_it(model):
    prompt, steered = tokens_of(model), with_edit(model.steps, AddVectors((1,)))
    vector = 3 * np.random.default_rng(1).normal(size=model.config.hidden_dim).astype(np.float32)
    params = model.params.replace(edits=(vector,))
    answer = generate_tokens(steered, params, prompt, GREEDY)
    logits, plain = (logits_of(*each, [*prompt, *answer]) for each in ((steered, params), (model.steps, model.params)))
    assert answer == logits[LENGTH - 1 : -1].argmax(axis=1).tolist()
    assert answer != plain[LENGTH - 1 : -1].argmax(axis=1).tolist()


def test_a_direction_removed_is_gone_from_the_rows(model):
    tokens, steered = tokens_of(model), with_edit(model.steps, RemoveDirections((0, 1)))
    vectors = np.random.default_rng(2).normal(size=(2, model.config.hidden_dim)).astype(np.float32)
    rows = captured(steered, model.params.replace(edits=tuple(vectors)), tokens, (0, 1))
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for seen, unit in zip(rows, units, strict=True):
        assert np.abs(seen @ unit).max() < 1e-5 * np.abs(seen).max()
    embeddings = np.asarray(model.params.embed)[tokens]
    np.testing.assert_allclose(rows[0], embeddings - np.outer(embeddings @ units[0], units[0]), atol=1e-6)


class Silent(AbstractEdit):
    """Asked at every layer, and changes nothing."""

    layers = tuple(range(99))

    def apply(self, number, x, batch, arrays):
        return x


def program(model, edit, params):
    """The text of a decode step before any compiler has seen it."""
    state = first_state(model.layout, LENGTH, 4, GREEDY, 0, (), model.config.vocab_size)
    pool = model.steps.abstract_pool((5,) * len(model.layout.groups))
    static = replace(model.steps.model, edit=edit)
    return jitted_step("decode", static, num_logprobs=0).lower(params, pool, state).as_text()


def test_a_model_that_is_not_edited_has_the_program_it_would_have_without_edits(model):
    plain = program(model, None, model.params)
    assert program(model, Silent(), model.params) == plain
    vector = placed_as(np.zeros(model.config.hidden_dim, np.float32), None)
    assert program(model, AddVectors((1,)), model.params.replace(edits=(vector,))) != plain


def test_layers_that_are_not_there_and_vectors_that_are_missing_are_told(model):
    with pytest.raises(ConfigError, match=r"layers=\[99\] are no numbers of layers from 0 to"):
        with_edit(model.steps, AddVectors((1, 99)))
    with pytest.raises(ConfigError, match="are no numbers of layers"):
        captured(model.steps, model.params, tokens_of(model), (99,))
    with pytest.raises(ConfigError, match=r"params.edits holds 0 vectors and the model edits .* layers=\(1,\)"):
        generate_tokens(with_edit(model.steps, AddVectors((1,))), model.params, [1, 2], GREEDY)
