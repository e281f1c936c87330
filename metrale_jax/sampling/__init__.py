# SPDX-License-Identifier: Apache-2.0
"""Rank 3: from logits to tokens, on the device.

`params` is what a request asks for, `state` the same as arrays over a batch, `transforms` the filters,
`sample` Gumbel-max drawing with noise that depends on seed and position alone, `accept` the rule that makes
speculation reproduce the plain stream. Imports core and jax.
"""
