# SPDX-License-Identifier: Apache-2.0
"""How the load speaks with each front: a driver a file, listed in `registry`, with what its clients do beside it."""
