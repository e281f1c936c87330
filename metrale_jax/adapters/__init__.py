# SPDX-License-Identifier: Apache-2.0
"""Rank 2: banks of low-rank adapters; none yet. Slot 0 is the base model."""
