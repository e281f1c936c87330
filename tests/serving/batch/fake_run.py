# SPDX-License-Identifier: Apache-2.0
"""The batch command over the fake model, for tests that kill it: `python -m tests.serving.batch.fake_run ...`."""

import argparse
import sys
import time

from metrale_jax.core.errors import MetraleError
from serving.batch import command
from tests.serving.batch.fake import FakeBackend


def main(argv=None, backend=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="fake")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--step-ms", type=float, default=0)
    parser.add_argument("--in-flight", type=int, default=32)
    command.add_arguments(parser)
    arguments = parser.parse_args(argv)

    def load():
        return backend or FakeBackend(arguments.in_flight, on_step=lambda: time.sleep(arguments.step_ms / 1000))

    try:
        return command.run_with(arguments, load)
    except MetraleError as error:
        print(f"metrale-jax: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
