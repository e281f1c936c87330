# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.serving_load` drives a server with: workloads, client processes, the bare engine, figures, rules.

Client processes import the project's client and no JAX; `bare_engine` alone loads a model.
"""
