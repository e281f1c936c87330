# SPDX-License-Identifier: Apache-2.0
"""Rank 6: proposers of draft tokens, one file each and a line in `registry`, and the policy of how many to draft.

`models.proposer` is their protocol, `steps.speculate` the step that drafts and verifies. Imports lower ranks only.
"""
