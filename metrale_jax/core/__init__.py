# SPDX-License-Identifier: Apache-2.0
"""Rank 1: the values that a run is made of (config, states, batches, weight specs) and the errors.

Imports numpy, jax types and flax.struct; nothing else of metrale_jax. What lives here is data with a docstring:
`config` a model's frozen description, `sequence` the state of sequences, `batch` what layers see of a step,
`specs` where each weight comes from, `errors` what a user can meet.
"""
