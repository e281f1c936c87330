# SPDX-License-Identifier: Apache-2.0
"""Rank 1: logical axis names, the table that maps them to mesh axes, and the mesh.

A mesh with axes `data`, `expert` and `tensor` is always there, of size one unless asked otherwise. Params and
pools name their dimensions logically; `rules` is the only place that knows where those names go. Imports jax only.
"""
