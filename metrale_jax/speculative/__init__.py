# SPDX-License-Identifier: Apache-2.0
"""Rank 6: proposers of draft tokens; none yet. `steps.verify` takes drafts from any caller."""
