"""A process that sends its share of the requests of a run, and measures how busy it was itself.

It reads a pickled `Share` from stdin, writes a line when its requests are ready, reads the time of the start, sends the requests,
and writes pickled results. Its parent is `run`; without it the process ends.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minirt.bench.serve.client import Outcome, Target, generate
from minirt.bench.serve.workload import Workload

READY = b"ready\n"
_TICK = 0.02  # seconds between two looks at the event loop's lag
_WINDOW = 1.0  # seconds over which the busiest time is looked for


@dataclass(frozen=True)
class Share:
    """What one process does.

    Attributes:
        requests: (index, time in seconds after the start, tokens of the prompt, tokens of the completion), by time.
        limit: how many requests may be in flight at once; None: any number.
    """

    target: Target
    workload: Workload
    requests: Sequence[tuple[int, float, int, int]]
    limit: int | None


@dataclass
class Usage:
    """How busy a process was while it sent and received.

    Attributes:
        seconds: duration of its part of the run.
        cpu_seconds: CPU time that it used meanwhile.
        busiest_share: share of a CPU in its busiest second.
        lags: how late the event loop ran each periodic callback, in seconds.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    busiest_share: float = 0.0
    lags: list[float] = field(default_factory=list)


async def send_all(share: Share, bodies: Sequence[bytes], started: float) -> tuple[list[Outcome], Usage]:
    """Send every request at its time. `started`: the time.perf_counter() from which times count.

    Requests that are late because `limit` is reached go out as soon as another one ends. Arrivals do not wait for answers.
    """
    client = share.target.client()
    outcomes = [Outcome(index, planned) for index, planned, _, _ in share.requests]
    places = asyncio.Semaphore(share.limit) if share.limit is not None else contextlib.nullcontext()

    async def one(body: bytes, outcome: Outcome) -> None:
        async with places:
            await generate(client, client.encode("POST", share.target.path, body), outcome, started)

    usage = Usage()
    await asyncio.sleep(max(0.0, started - time.perf_counter()))
    watch = asyncio.create_task(_watch(usage))
    tasks = []
    for body, outcome in zip(bodies, outcomes, strict=True):
        late = time.perf_counter() - started - outcome.planned
        if late < 0:
            await asyncio.sleep(-late)
        tasks.append(asyncio.create_task(one(body, outcome)))
    await asyncio.gather(*tasks)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    client.close()
    return outcomes, usage


async def _watch(usage: Usage) -> None:
    """Until it is cancelled, note the event loop's lag and the CPU time."""
    first = edge = now = time.perf_counter()
    first_cpu = edge_cpu = time.process_time()
    windows = []
    try:
        while True:
            await asyncio.sleep(_TICK)
            before, now = now, time.perf_counter()
            usage.lags.append(max(0.0, now - before - _TICK))
            if now - edge >= _WINDOW:
                cpu = time.process_time()
                windows.append((cpu - edge_cpu) / (now - edge))
                edge, edge_cpu = now, cpu
    finally:
        usage.seconds, usage.cpu_seconds = time.perf_counter() - first, time.process_time() - first_cpu
        usage.busiest_share = max([*windows, usage.cpu_seconds / usage.seconds if usage.seconds else 0.0])


def main() -> None:
    """Body of the process."""
    share: Share = pickle.load(sys.stdin.buffer)
    bodies = [share.workload.body(index, input_len, output_len) for index, _, input_len, output_len in share.requests]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would delay every stream; a run leaves little garbage
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    started: float = pickle.load(sys.stdin.buffer)

    async def run() -> tuple[list[Outcome], Usage]:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: os._exit(1))  # the parent is gone
        return await send_all(share, bodies, started)

    pickle.dump(asyncio.run(run()), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
    sys.stdout.buffer.flush()
