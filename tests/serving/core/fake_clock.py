# SPDX-License-Identifier: Apache-2.0
"""A clock that goes when it is told to."""


class Clock:
    def __init__(self, now_s: float = 1000.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def go(self, seconds: float) -> None:
        self.now_s += seconds
