# SPDX-License-Identifier: Apache-2.0
"""Rank 7: compiling steps for machines that are not attached.

`chips` and `targets` describe the machines, `shapes` the models, `compile_steps` lowers and compiles every step for a
target, `inspect_module` reads the compiled text for copies of the pool and `collectives` what devices tell each other.
`plan` says what fits and how fast it can be, from `budget`, `roofline` and `workspace`; `archive` keeps programs.
"""
