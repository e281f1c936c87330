# SPDX-License-Identifier: Apache-2.0
"""Short depthwise causal convolution whose last inputs are kept in slots. See `op`."""
