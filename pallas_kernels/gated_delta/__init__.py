# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over sequences whose state lies in slots. See `op`."""
