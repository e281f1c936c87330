# SPDX-License-Identifier: Apache-2.0
"""A scripted server for each test, and its target."""

import pytest

from serving.client import Clock
from tests.serving.client.server import FakeTime, Servicer, serving


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture
def target(servicer):
    with serving(servicer) as target:
        yield target


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture
def clock(time):
    return Clock(now_s=lambda: time.now_s, sleep=time.sleep, pause=time.pause, chance=lambda: 0.0)
