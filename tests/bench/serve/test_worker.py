"""Sending a share of the load: when requests leave, how many are in flight, and what a process says of itself."""

import asyncio
import json
import time

from support.fake_server import FakeServer

from minirt.bench.serve import worker
from minirt.bench.serve.client import Target
from minirt.bench.serve.worker import Share, send_all
from minirt.bench.serve.workload import Workload

LOAD = Workload(9, (3, 3), (4, 4), seed=1, text=False, vocab_size=9, chat=False, fields={})


def run(times, limit, monkeypatch):
    monkeypatch.setattr(worker, "_TICK", 0.001)
    requests = [(i, planned, 3, 4) for i, planned in enumerate(times)]
    bodies = [LOAD.body(i, 3, 4) for i in range(len(times))]
    with FakeServer() as server:
        share = Share(Target(server.url, "/v1/completions", {}, 60.0), LOAD, requests, limit)
        outcomes, usage = asyncio.run(send_all(share, bodies, time.perf_counter() + 0.01))
    assert [outcome.error for outcome in outcomes] == [""] * len(times)
    assert sorted(str(asked.body) for asked in server.asked) == sorted(str(json.loads(body)) for body in bodies)
    return outcomes, usage, server


def test_no_request_leaves_before_its_time(monkeypatch) -> None:
    times = [0.0, 0.0, 0.01, 0.011, 0.05, 0.05, 0.051, 0.08, 0.09]
    outcomes, usage, _ = run(times, None, monkeypatch)
    assert [outcome.planned for outcome in outcomes] == times
    assert all(outcome.start >= outcome.planned - 1e-5 for outcome in outcomes)
    assert all(outcome.end >= outcome.start + outcome.latency >= outcome.start + outcome.ttft for outcome in outcomes)
    assert usage.seconds >= 0.08  # the last request leaves at 0.09; usage is counted from a little after the start
    assert usage.cpu_seconds > 0
    assert usage.busiest_share >= usage.cpu_seconds / usage.seconds
    assert usage.lags
    assert min(usage.lags) >= 0


def test_at_most_so_many_are_in_flight(monkeypatch) -> None:
    outcomes, _, server = run([0.0] * 9, 2, monkeypatch)
    assert server.most <= 2
    assert server.connections <= 2
    for i in range(2, 9):  # each waits for one of the earlier ones
        assert sum(other.end <= outcomes[i].start for other in outcomes) >= i - 1


def test_all_at_once_without_a_limit(monkeypatch) -> None:
    """Nobody waits for an answer: every request has left before the first one has ended."""
    entered = []

    async def generate(client, request, outcome, started):
        entered.append(outcome.index)
        while len(entered) < 9:
            await asyncio.sleep(0)
        outcome.end = 1.0

    monkeypatch.setattr(worker, "generate", generate)
    share = Share(Target("http://127.0.0.1:1", "/v1/completions", {}, 60.0), LOAD, [(i, 0.0, 3, 4) for i in range(9)], None)
    asyncio.run(send_all(share, [b""] * 9, time.perf_counter()))
    assert sorted(entered) == list(range(9))
