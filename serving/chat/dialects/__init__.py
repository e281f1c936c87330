# SPDX-License-Identifier: Apache-2.0
"""How models write calls of tools: a dialect is one file here and one line in `registry.py`."""
