# SPDX-License-Identifier: Apache-2.0
"""From a model's name to its parameters on devices.

`hub` turns a name into a path. `source` is what every file format offers, and `safetensors_source` and `gguf_source`
are the two that offer it, under Hugging Face names. `plan` compares a source with a tree of `ParamSpec`s before any
data is read; `place` reads, converts and places. `orbax_store` saves and restores params that are already placed,
and `orbax_source` offers what it saved as a source.

Given specs, it knows no family. It may import `core` and `sharding`; never `models`, `engine` or `text`.
"""
