# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for machines that are not here, and figures that the compilers give, recorded and gated.

`rows` lists the kernels, `cuda` and its like read a platform's figures, `traffic` counts bytes, `gates` judges.
"""
