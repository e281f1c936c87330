# SPDX-License-Identifier: Apache-2.0
"""A bar on stderr: lines done, time left, tokens a second."""

import sys
import time


class BatchProgress:
    """The bar of one run, `done` of `total` lines being there from before. Not shown if `quiet`."""

    def __init__(self, total: int | None, done: int, quiet: bool):
        from tqdm import tqdm

        self._bar = tqdm(
            desc="batch", total=total, initial=done, unit="line", disable=quiet, file=sys.stderr, dynamic_ncols=True
        )
        self._began = time.monotonic()
        self._tokens = 0

    def __call__(self, lines: int, tokens: int) -> None:
        """Moves the bar on by lines and the tokens they took."""
        self._tokens += tokens
        if self._bar.update(lines):
            speed = self._tokens / max(time.monotonic() - self._began, 1e-9)
            self._bar.set_postfix_str(f"{speed:,.0f} tokens/s")

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()
