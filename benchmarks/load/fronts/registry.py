# SPDX-License-Identifier: Apache-2.0
"""The fronts that can be loaded, by the names that the server's log and flags give them."""

from importlib import import_module

from benchmarks.load.fronts.api import AbstractDriver

FRONTS = {
    "grpc": "benchmarks.load.fronts.grpc:GrpcDriver",
    "http": "benchmarks.load.fronts.http:HttpDriver",
}


def driver_of(front: str) -> AbstractDriver:
    """The driver of that front."""
    module, name = FRONTS[front].split(":")
    return getattr(import_module(module), name)()
