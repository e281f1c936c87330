# SPDX-License-Identifier: Apache-2.0
"""Rank 10.5: training of draft heads on what the target itself says.

`prompts` asks, `collect` has the target answer and records what it computes, `forward` and `loss` are the head over
whole sequences, `fit` is the loop, and `command` the command line. May import all below the composition root, and
`llm`.
"""
