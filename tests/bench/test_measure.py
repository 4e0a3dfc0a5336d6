"""How long a GPU takes, on one that is made up. Catches the host's time that counts as the GPU's."""

import pytest
import torch

from minirt.bench import measure


class Queue:
    """As much of a GPU as `gpu_seconds` uses. It sleeps 1 ns a cycle, then does 3 ms of work; the host queues for 1 ms."""

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
    """As it did where kernels were queued in more time than the GPU slept."""
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "_sleep", queue.sleep)
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    assert measure.gpu_seconds(queue.run) == pytest.approx(3e-3)
    assert measure.gpu_seconds(queue.run, before=queue.run) == pytest.approx(3e-3)
