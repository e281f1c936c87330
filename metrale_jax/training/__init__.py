# SPDX-License-Identifier: Apache-2.0
"""Rank 10.5: training of draft heads on what the target itself says.

`prompts` and `questions` ask, `answers` and `features` have the target answer and record what it computes, `unroll` and
`loss` are the head over whole sequences, `fit` is the loop, `places` keeps runs apart, and `command` is the command
line. May import all below the composition root, and `llm`.
"""
