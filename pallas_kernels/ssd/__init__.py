# SPDX-License-Identifier: Apache-2.0
"""State space duality (Mamba-2): a scan over tokens whose state is one matrix a head."""
