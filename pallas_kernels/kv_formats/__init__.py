# SPDX-License-Identifier: Apache-2.0
"""How keys and values lie in their pages: one file a format, listed in `registry.py`.

A format is a pair of tile functions that trace inside any kernel. `pages.py` is the storage that ops take.
Imports jax and numpy.
"""
