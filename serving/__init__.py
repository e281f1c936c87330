# SPDX-License-Identifier: Apache-2.0
"""Rank 9: servers over the engine; none yet. They see requests and tokens only."""
