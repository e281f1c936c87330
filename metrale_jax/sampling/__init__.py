# SPDX-License-Identifier: Apache-2.0
"""Rank 3: from logits to tokens, on the device.

`params` is what a request asks for (`checks` tells it what it may not), `rows` the same as arrays over a batch,
`constraints` the masks that the host makes, `history` the tokens that rules look back on, `rules` what changes logits
before temperature, `transforms` the filters after it, `sample` Gumbel-max drawing with noise that depends on seed and
position alone, `accept` the rules by which drafts stand, of which the first reproduces the plain stream. Imports core
and jax.
"""
