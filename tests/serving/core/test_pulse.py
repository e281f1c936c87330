# SPDX-License-Identifier: Apache-2.0
"""A watchdog barks at what takes too long, once, and at nothing else."""

import threading

from serving.core.pulse import Pulse, Watchdog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watched(pulse, limits):
    barked = threading.Event()
    reasons = []

    def bark(reason):
        reasons.append(reason)
        barked.set()

    return Watchdog(pulse, limits, bark, look_every_s=0.005), barked, reasons


def test_a_phase_past_its_limit_is_told():
    clock = Clock()
    pulse = Pulse(clock)
    dog, barked, reasons = watched(pulse, {"step": 10.0})
    dog.start()
    pulse.enter("step")
    clock.now += 11
    assert barked.wait(5)
    dog.stop()
    assert len(reasons) == 1 and "step for 11 s" in reasons[0] and "10 s" in reasons[0]


def test_phases_without_a_limit_may_last_and_new_ones_begin_anew():
    clock = Clock()
    pulse = Pulse(clock)
    dog, barked, _ = watched(pulse, {"step": 10.0})
    dog.start()
    for phase in ("idle", "step", "load", "step"):
        pulse.enter(phase)
        clock.now += 9 if phase == "step" else 1000
        if phase != "step":
            assert not barked.wait(0.03)
    assert not barked.wait(0.03)
    dog.stop()


def test_the_phase_before_is_told_so_that_it_can_be_gone_back_to():
    pulse = Pulse(Clock())
    pulse.enter("step")
    assert pulse.enter("compile") == "step"
    assert pulse.last.phase == "compile" and pulse.held_s == 0.0
