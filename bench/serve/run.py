"""Starts the processes that send a run's requests, and asks the server which model it has and whether it answers at all."""

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from minirt.bench.serve import workload as work
from minirt.bench.serve.client import Outcome, Target, generate, refusal
from minirt.bench.serve.http import ConnectError, ProtocolError
from minirt.bench.serve.worker import READY, Share, Usage
from minirt.bench.serve.workload import Workload
from minirt.errors import MinirtError, printable, shortened

_START_SECONDS = 0.2  # from when all processes are ready to the first request


@dataclass(frozen=True)
class Run:
    """What was measured at one rate: the outcome of each request, in order, and of each process how busy it was."""

    rate: float
    max_concurrency: int | None
    outcomes: list[Outcome]
    usages: list[Usage]


def served_model(target: Target) -> dict[str, Any]:
    """The first model of /v1/models, such as {"id": "Qwen3-8B", "max_model_len": 40960}.

    Raises:
        MinirtError: no connection, or the answer is no list of models.
    """
    answer = _get(target, "/v1/models", required=True)
    models = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(models, list) and models and isinstance(models[0], dict) and isinstance(models[0].get("id"), str):
        return models[0]
    shown = shortened(printable(json.dumps(answer)), 120)
    raise MinirtError("the server names no model", where=target.base_url + "/v1/models", found=shown, hint="use --model NAME")


def server_version(target: Target) -> str | None:
    """What /version says; None if the server has no such path, or has ended."""
    try:
        answer = _get(target, "/version", required=False)
    except MinirtError:
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


def vocab_size(target: Target) -> int | None:
    """What /model_info says, as minirt's does; None if it does not say."""
    answer = _get(target, "/model_info", required=False)
    size = answer.get("vocab_size") if isinstance(answer, dict) else None
    return size if type(size) is int and size > 0 else None


def _get(target: Target, path: str, required: bool) -> Any:
    """The JSON at `path`; None if there is none and it is not required."""

    async def fetch() -> Any:
        client = target.client()
        try:
            response = await client.send(client.encode("GET", path))
        finally:
            client.close()
        if response.status != 200:
            raise ProtocolError(refusal(response))
        return json.loads(response.body)

    try:
        return asyncio.run(fetch())
    except ConnectError as error:
        hint = "start the server, or correct --base-url"
        raise MinirtError(f"no connection: {error}", where=target.base_url, hint=hint) from error
    except (ProtocolError, ValueError, RecursionError) as error:
        if not required:
            return None
        what = str(error) if isinstance(error, ProtocolError) else "the answer is not JSON"
        hint = "is this an OpenAI-compatible server? If it has no list of models, use --model"
        hint = "wait until the server is ready" if what.startswith("HTTP 503") else hint
        raise MinirtError(what, where=target.base_url + path, hint=hint) from error


def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Send `count` requests, one after the other, whose lengths are those of the first ones.

    Raises:
        MinirtError: one of them fails, so the run would, too.
    """

    async def send() -> None:
        client = target.client()
        inputs, outputs = workload.lengths()
        for i in range(count):
            body = workload.body(-1 - i, inputs[i % len(inputs)], outputs[i % len(outputs)])  # no prompt of the run
            outcome = Outcome(i, 0.0)
            await generate(client, client.encode("POST", target.path, body), outcome, time.perf_counter())
            if outcome.error:
                raise MinirtError(outcome.error, where=target.base_url + target.path, hint="a first request, before the run")
        client.close()

    asyncio.run(send())


def measure(target: Target, workload: Workload, rate: float, max_concurrency: int | None, processes: int) -> Run:
    """Send the workload at a rate from several processes.

    Args:
        rate: requests per second; inf: all at the start.
        max_concurrency: how many requests may be in flight at once; None: any number.
        processes: at most `max_concurrency`.
    Raises:
        MinirtError: a process failed.
    """
    inputs, outputs = workload.lengths()
    times = work.arrivals(workload.num_prompts, rate, workload.seed)
    limits = work.shares(max_concurrency, processes)
    owners = work.assign(outputs, limits)
    requests = list(zip(range(len(times)), times, inputs, outputs, strict=True))
    parts = [[request for request, owner in zip(requests, owners, strict=True) if owner == i] for i in range(processes)]
    shares = [Share(target, workload, mine, limit) for mine, limit in zip(parts, limits, strict=True)]
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(share)) for share in shares]
        for worker in workers:
            worker.wait_until_ready()
        started = time.perf_counter() + _START_SECONDS  # one clock for all processes of a machine
        for worker in workers:
            worker.start(started)
        results = [worker.result() for worker in workers]
    outcomes = sorted((outcome for outcomes, _ in results for outcome in outcomes), key=lambda outcome: outcome.index)
    return Run(rate, max_concurrency, outcomes, [usage for _, usage in results])


class _Worker:
    """A process of `worker`, which ends with this context."""

    def __init__(self, share: Share) -> None:
        command = [sys.executable, "-P", "-c", "from minirt.bench.serve.worker import main; main()"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment
            )  # a session of its own: Ctrl-C reaches only this process, which ends the others
        except OSError as error:
            raise MinirtError(f"a load process cannot be started: {error.strerror}") from error
        self._write(share)

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def wait_until_ready(self) -> None:
        if self._process.stdout.readline() != READY:  # type: ignore[union-attr]
            raise self._ended()

    def start(self, started: float) -> None:
        self._write(started)

    def result(self) -> tuple[list[Outcome], Usage]:
        try:
            return pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, pickle.UnpicklingError):
            raise self._ended() from None

    def _write(self, value: object) -> None:
        with suppress(OSError):  # it has ended, so reading finds no answer
            pickle.dump(value, self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _ended(self) -> MinirtError:
        self._process.kill()
        return MinirtError(f"a load process ended with code {self._process.wait()}", hint="its message is above")
