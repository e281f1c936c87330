# SPDX-License-Identifier: Apache-2.0
"""The batch command over the fake model, for tests that kill it: `python -m tests.serving.batch.fake_run ...`."""

import argparse
import functools
import os
import resource
import sys
import time

from metrale_jax.core.errors import MetraleError
from serving.batch import command, jsonl, parquet, sink
from tests.serving.batch.fake import FakeBackend


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--model", default="fake")
    made.add_argument("--quiet", action="store_true")
    made.add_argument("--step-ms", type=float, default=0, help="how long the model takes over a step")
    made.add_argument("--in-flight", type=int, default=32)
    made.add_argument("--torn", action="store_true", help="write in pieces of a few bytes, and keep files small")
    made.add_argument("--announce", action="store_true", help="say when the work begins")
    made.add_argument("--memory", action="store_true", help="say at the end how much was resident at most, in KiB")
    command.add_arguments(made)
    return made


def main(argv=None, backend=None):
    """The command's exit status. `backend` stands in for the fake model."""
    arguments = parser().parse_args(argv)

    def load():
        if arguments.announce:
            print("loaded", flush=True)
        return backend or FakeBackend(arguments.in_flight, on_step=lambda: time.sleep(arguments.step_ms / 1000))

    if arguments.torn:
        jsonl.write_all = write_in_pieces
        parquet.ParquetParts.min_rows = 7
        command.HeldSink = functools.partial(sink.HeldSink, compact_bytes=2000)
    try:
        return command.run_with(arguments, load)
    except MetraleError as error:
        print(f"metrale-jax: {error}", file=sys.stderr)
        return 2
    finally:
        if arguments.memory:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def write_in_pieces(descriptor, data):
    while data:
        data = data[os.write(descriptor, data[:50]) :]
        time.sleep(0.0001)


if __name__ == "__main__":
    sys.exit(main())
