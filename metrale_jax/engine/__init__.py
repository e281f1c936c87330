# SPDX-License-Identifier: Apache-2.0
"""Rank 7: the host loop, plain Python but for `device`, which owns the pool and the compiled programs.

`loop` is the engine. It decides by `scheduler` (a pure function) and `waiting` (who enters next); `memory` leases
blocks (`blocks`, `lease`) and keeps written ones for prompts that begin the same (`radix`, `leaves`, `pin`); `slots`,
`arrays` and `draws` turn decisions into arrays of the shapes in `buckets`; `reader` applies what was drawn. `request`
is the life of one answer, `beam` the bookkeeping of a search, `stats` what is counted, `hooks` who is told of an end,
`make` puts an engine together and `warmup` compiles ahead.
"""
