# SPDX-License-Identifier: Apache-2.0
"""Writing new keys and values into the paged pool, in place."""
