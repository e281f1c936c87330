# SPDX-License-Identifier: Apache-2.0
"""Rank 9: what serves requests over the engine. It sees requests and tokens only, never JAX.

`openai_body` reads OpenAI's request bodies and `openai_answer` writes its answers, whatever carries them. `batch/`
answers files of requests; `ray_batch` does the same as a stage over a Ray Dataset. `metrics` shows the engine's
figures to Prometheus.

`core/` is the service behind all fronts, `chat/` what they know of tools and reasoning. `grpc/` and `http/` are fronts,
`client/` is a client of gRPC's. `serve_command` is `metrale-jax serve`: it resolves settings (`config`,
`settings_sources`), and `server` puts the parts together.
"""
