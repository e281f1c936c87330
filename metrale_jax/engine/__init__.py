# SPDX-License-Identifier: Apache-2.0
"""Rank 7: the host loop, plain Python.

`blocks` counts references on KV blocks, `request` is the life of one request, `scheduler` decides a step as a pure
function, `buckets` is the only source of shapes, `batcher` turns decisions into arrays, `beam` picks the continuations
of a beam search. Only `loop` touches JAX.
"""
