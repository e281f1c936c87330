# SPDX-License-Identifier: Apache-2.0
"""Offline batches: a file of requests in, a file of answers out, safe to kill at any instant and to start again.

Read `run` first, the loop over a `backend`. `lines` reads what an input still asks for, `requests` turns a line into a
job, `records` its result into an output line, `window` puts jobs with a common prefix side by side. An output line
carries the number of its input line, so the output itself says what is done; `done` keeps that and the ids, `sink` the
writing, `sidecar` the lock and what must be the same when a batch goes on. `jsonl` and `parquet` are the formats, which
`formats` lists; `command` is the command. A server answers batches beside live calls (`serving.http.batch_work`).
"""
