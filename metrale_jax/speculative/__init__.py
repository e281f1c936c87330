# SPDX-License-Identifier: Apache-2.0
"""Rank 6: what proposes draft tokens. `heads` defines draft heads and what they compute, `head_specs` their weights,
`drafter_files` a head as a directory. `steps.verify` takes drafts from any caller. May import steps and below.
"""
