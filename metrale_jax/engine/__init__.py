# SPDX-License-Identifier: Apache-2.0
"""Rank 7: the host loop, plain Python.

`blocks` counts references on KV blocks, `lease` is what a sequence holds of them, `radix` keeps written ones for
requests with the same prefix (`leaves`: its nodes and the order of their eviction, `pin`: its tie to a lease),
`request` is the life of one request, `scheduler` decides a step as a pure function, `buckets` is the only source of
shapes, `batcher` turns decisions into arrays. Only `loop` touches JAX.
"""
