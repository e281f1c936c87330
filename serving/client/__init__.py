# SPDX-License-Identifier: Apache-2.0
"""A Python client of the gRPC service, sync and async. Needs grpcio and protobuf only: no JAX, no model."""
