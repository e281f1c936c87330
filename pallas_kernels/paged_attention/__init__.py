# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens over a paged past: `decode_attention` for equal rows, `prefill_attention` for ragged ones."""
