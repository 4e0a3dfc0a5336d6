"""Energy under sustained load, on a simulated GPU.

Catches: energy of runs that are not counted, and code that assumes the energy counter is always up to date.
"""

import pytest

from minirt.bench.tools import power


class Gpu:
    """Simulates a GPU. A run takes 25 ms and 10 J, or 20 J during warm-up. The energy counter is updated every 100 ms."""

    def __init__(self):
        self.time = self.energy = self.shown = 0.0
        self.updated = 0.0

    def run(self):
        self.energy += 20.0 if self.time < power.WARM_UP else 10.0
        self.time += 0.025
        if self.time - self.updated > 0.0999:
            self.updated, self.shown = self.time, self.energy

    def joules(self):
        return self.shown

    def sm_clock_mhz(self):
        return 1980 if self.time < power.WARM_UP else 1410


def test_only_what_is_counted_counts():
    gpu = Gpu()
    found = power.sustained(gpu.run, gpu, seconds=1.0, clock=lambda: gpu.time)
    assert found.seconds == pytest.approx(0.025)
    assert found.watts == pytest.approx(400)
    assert found.sm_clock_mhz == 1410
    assert 2.0 < gpu.time < 2.4
