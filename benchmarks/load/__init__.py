# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.serving_load` drives a server with: workloads, client processes, the bare engine, figures, rules;
and in `fronts` how each front is spoken to.

Client processes import no JAX; `bare_engine` alone loads a model.
"""
