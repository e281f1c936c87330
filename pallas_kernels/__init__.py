# SPDX-License-Identifier: Apache-2.0
"""Kernels over paged state, one folder an op, each with the same cast of files.

`op.py` is the signature, the contract and the table of implementations; `reference.py` the obvious float32 oracle;
`xla.py` the portable implementation and the CPU path; one file more for each backend; `cases.py` the named shapes
that tests and benchmarks share. Rank 0: imports jax and numpy, nothing of metrale_jax. `shapes.py` holds the legend
of axis letters that the whole project uses.
"""
