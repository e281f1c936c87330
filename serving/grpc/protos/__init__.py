# SPDX-License-Identifier: Apache-2.0
"""The protos, and in `stubs` beside this folder what `generate.py` makes of them."""
