# SPDX-License-Identifier: Apache-2.0
"""Rank 5: prefill, decode, verify and mixed: about thirty lines each over one forward.

All are pure functions of (params, pool, state, ...). `build` is the only place of `jax.jit` on the serving path: it
fixes the statics, donates the pool and the state, and counts compiles. Imports lower ranks only.
"""
