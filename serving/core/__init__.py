# SPDX-License-Identifier: Apache-2.0
"""What every front of the service shares and none of them owns.

`calls` and `events` are the plain data that go in and come out, `errors` what a caller can be told. `EngineThread`
owns the model; `Service` takes calls from the fronts' event loop, admits them, prepares them beside the engine and
hands out events. Keys, limits, lifecycle, logs, traces and the watchdog live here too. May import metrale_jax; knows
no protocol.
"""
