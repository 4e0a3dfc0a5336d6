"""GPU timing, on a simulated GPU. Catches host time that counts as GPU time."""

import pytest
import torch

from minirt.bench import measure


class Queue:
    """Simulates what `gpu_seconds` uses of a GPU. A sleep takes 1 ns per cycle, the work 3 ms, queuing it 1 ms on the host."""

    def __init__(self):
        self.host = self.gpu = 0.0

    def sleep(self, cycles):
        self.gpu = max(self.gpu, self.host) + cycles * 1e-9

    def run(self):
        self.host += 1e-3
        self.gpu = max(self.gpu, self.host) + 3e-3

    def event(self, enable_timing):
        return QueueEvent(self)


class QueueEvent:
    def __init__(self, queue):
        self.queue = queue

    def record(self):
        self.at = max(self.queue.gpu, self.queue.host)

    def query(self):
        return self.at <= self.queue.host

    def synchronize(self):
        self.queue.host = max(self.queue.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_the_hosts_time_does_not_count(monkeypatch):
    """Host time counted in an earlier version when queuing the kernels took longer than the GPU's sleep."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "_sleep", queue.sleep)
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    assert measure.gpu_seconds(queue.run) == pytest.approx(3e-3)
    assert measure.gpu_seconds(queue.run, before=queue.run) == pytest.approx(3e-3)
