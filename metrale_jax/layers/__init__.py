# SPDX-License-Identifier: Apache-2.0
"""Rank 3: the parts of a transformer, each a pure function on params and a `TokenBatch`.

`linear` is the only matmul entry, so a number format is a file and a registry line here and nowhere else. No layer
knows a family, a platform or whether the step is prefill, decode or verify. Imports core, state, sharding and
pallas_kernels.
"""
