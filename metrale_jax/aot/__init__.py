# SPDX-License-Identifier: Apache-2.0
"""Rank 7: compiling steps for machines that are not attached.

`targets` describes the chips, `shapes` the models, `compile_steps` lowers and compiles every step for a target,
`inspect_module` reads the compiled text for copies of the pool.
"""
