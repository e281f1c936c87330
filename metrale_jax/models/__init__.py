# SPDX-License-Identifier: Apache-2.0
"""Rank 4: model families over one shared decoder.

A family is one file (config mapping, weight specs) and a line in `registry`. `decoder` is the forward pass they
share, `hf_config` the reader that turns both spellings of a Hugging Face config into plain values. Imports core,
state, layers and sampling; knows no file format, engine or step.
"""
