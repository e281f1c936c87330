# SPDX-License-Identifier: Apache-2.0
"""Matrix products of groups of rows, each with a weight of its own: a mixture's experts. Imports jax only."""
