# SPDX-License-Identifier: Apache-2.0
"""`python -m metrale_jax`: the command `metrale-jax`."""

import sys

from metrale_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
