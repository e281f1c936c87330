# SPDX-License-Identifier: Apache-2.0
"""Rank 2: kinds of layer state and the pool that stores them.

A kind is a handful of pure functions in one file (`paged` for KV blocks) and a line in `registry`. `pool` stacks
equal specs into one set of arrays. The planner, snapshots and offload work from these functions and know no layer by
name. Imports core, sharding and pallas_kernels.
"""
