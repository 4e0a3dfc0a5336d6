"""Helpers of the server's tests: `Server`, a real `minirt serve`, and `front`, its front process beside a fake engine."""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvicorn

from minirt import models
from minirt.engine.request import EngineStats, TokenOutput
from minirt.server.app import App
from minirt.server.front import Front
from minirt.server.http_protocol import HTTPProtocol
from minirt.server.metrics import Metrics
from minirt.server.options import ServerOptions
from minirt.server.remote_engine import RemoteEngine
from minirt.server.run import listen
from minirt.server.wire import (
    TO_ENGINE,
    Abort,
    Ask,
    EngineState,
    FilesReady,
    Frames,
    Ready,
    Start,
    StepOutputs,
    Submit,
    frame,
)
from support.cli import start

WARM = "A king who had no crown walked over the hills to find it. " * 6  # a prompt that the server of most tests computes at load


class Server:
    """A process of `minirt serve` on a free port. `log`: the file with its stderr. `url`: its address, once it serves."""

    def __init__(self, log: Path, *arguments: object, **environment: str) -> None:
        self._log, self.url = log, ""
        with log.open("wb") as file:
            command = ("serve", "--port", 0, "--device", "cpu", *arguments)
            self.process = start(*command, stdout=file, stderr=file, env=environment)

    def wait(self, seconds: float = 120) -> "Server":
        """Wait until it serves. It says so with its address."""
        end = time.monotonic() + seconds
        while "on http://" not in self.log:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {self.log}")
            time.sleep(0.05)
        self.url = "http://" + self.log.split("on http://", 1)[1].split()[0]
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def lines(self) -> list[dict]:
        """The lines of the log that are about requests."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        return next(own for own in children if "minirt.server.engine_process" in own.cmdline())

    def request(self, method: str, path: str, body: object = None, headers: dict | None = None) -> tuple[int, dict, bytes]:
        """One request on a connection of its own → status, headers, body. `body`: bytes, or what becomes JSON."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict]:
        """POST JSON → status, JSON."""
        status, _, data = self.request("POST", path, body, headers)
        return status, json.loads(data)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.request("GET", "/metrics")[2].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))

    def connect(self) -> socket.socket:
        where = urlsplit(self.url)
        return socket.create_connection((where.hostname, where.port), timeout=60)

    def until(self, condition, seconds: float = 30) -> None:
        """Wait until `condition()` is true."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the condition did not become true: {self.log[-2000:]}")
            time.sleep(0.02)

    def stop(self) -> int:
        """Send SIGTERM, and wait for the end. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def message(content: object, path: str, method: str = "POST", **headers: str) -> bytes:
    """An HTTP request as bytes. `content`: bytes, or what becomes JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events(body: bytes) -> list:
    """The events of a stream: JSON objects, and "[DONE]"."""
    found = [event for event in body.split(b"\n\n") if event]
    if not all(event.startswith(b"data: ") for event in found):
        raise ValueError(f"not a stream of events: {body[:500]!r}")
    return [event[6:].decode() if event == b"data: [DONE]" else json.loads(event[6:]) for event in found]


class FakeEngine:
    """The other end of the front's connection to the engine: a test sees the messages, and sends outputs.

    Attributes:
        requests: those that the front has submitted, in order.
        aborted: ids of aborted requests, in order.
        made: tokens that it says to have made of each request, when it is asked; None: it does not answer.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.requests, self.aborted = [], []
        self.made: int | None = 0
        self._changed = asyncio.Event()

    async def run(self, folder: Path | None, max_len: int, keeps_states: bool) -> None:
        frames = Frames()
        while data := await self._reader.read(1 << 20):
            for body in frames.feed(data):
                match TO_ENGINE.decode(body):
                    case Start():
                        self._writer.write(frame(FilesReady(None if folder is None else str(folder))))
                        self._writer.write(frame(Ready(max_len, 4096, 8, (0,), None, {}, keeps_states)))
                    case Submit(requests=requests):
                        self.requests += requests
                    case Abort(request_ids=ids):
                        self.aborted += ids
                    case Ask(request_ids=ids) if ids and self.made is not None:
                        self._writer.write(frame(EngineState(EngineStats(), [self.made] * len(ids))))
            self._changed.set()

    async def until(self, condition) -> None:
        """Wait until `condition(self)` is true."""
        async with asyncio.timeout(20):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def gets(self, asking: Awaitable, count: int = 1) -> tuple:
        """What `ask(…)` of `front` returns, once it has brought `count` requests."""
        wanted = len(self.requests) + count
        streams = await asking
        await self.until(lambda _: len(self.requests) == wanted)
        return streams

    def send(self, *outputs: TokenOutput) -> None:
        """Send the outputs of a step."""
        self._writer.write(frame(StepOutputs(list(outputs))))

    async def close(self) -> None:
        """End, as if the process had died."""
        self._writer.close()


@contextlib.asynccontextmanager
async def front(folder: Path | None, max_len: int = 4096, keeps_states: bool = False, **options: object):
    """The front with a fake engine, in this process → (the front, the engine, `ask`).

    `ask(bytes)` sends a request, and returns the stream that reads the answer and the one that writes.
    """
    tasks = asyncio.all_tasks()
    own, other = socket.socketpair()
    fake = FakeEngine(*await asyncio.open_connection(sock=other))
    running = asyncio.create_task(fake.run(folder, max_len, keeps_states))
    engine = await RemoteEngine.connect(own, None, Start({}, False))
    this = Front(ServerOptions(**{"model": "fake", "quiet": True} | options), engine, Metrics("fake"), 0)
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        App(this), http=HTTPProtocol, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
    )  # fmt: skip
    config.load()
    state = uvicorn.Server(config).server_state
    # uvicorn's own server looks at its flags ten times a second, and its shutdown is tested with real processes.
    serving = await asyncio.get_running_loop().create_server(
        lambda: HTTPProtocol(config=config, server_state=state, app_state={}), sock=listening
    )
    await this.load()
    kept: list[asyncio.StreamWriter] = []

    async def ask(data: bytes):
        reader, writer = await asyncio.open_connection(*listening.getsockname(), limit=1 << 24)
        writer.write(data)
        kept.append(writer)  # one that is dropped closes its connection
        return reader, writer

    try:
        async with asyncio.timeout(60):
            yield this, fake, ask
    finally:
        for writer in kept:
            writer.close()
        serving.close()
        async with asyncio.timeout(10):
            while this.exchanges:
                await asyncio.sleep(0.001)
        await this.close()
        await running
        for _ in range(100):
            if not (left := asyncio.all_tasks() - tasks):
                break
            await asyncio.sleep(0.001)
    if left:  # not after an error of the test, which says more
        raise RuntimeError(f"the front has left tasks: {left}")


def as_test(run: Callable, test: Callable, given: int, *fixtures: str) -> Callable:
    """`run(fixtures…)` as the test that pytest sees in place of `test`, whose first `given` arguments are no fixtures."""
    names = [*fixtures, *list(signature(test).parameters)[given:]]
    run.__signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


def on_front(folder: bool = True, **options: object) -> Callable:
    """A test that is a coroutine `(front, engine, ask, fixtures…)` runs with a front of the embedded model; see `front`."""

    def decorate(test: Callable) -> Callable:
        def run(**fixtures: object) -> None:
            async def main() -> None:
                async with front(models.embedded() if folder else None, **options) as parts:
                    await test(*parts, **fixtures)

            asyncio.run(main())

        return as_test(run, test, 3)

    return decorate


async def answer(reader: asyncio.StreamReader, begin: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    """Read a whole answer → status, headers, body. `begin`: what was read of its head before."""
    head = (begin + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    if headers.get("transfer-encoding") != "chunked":
        return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, b"".join([part async for part in chunks(reader)])


async def answered(asking: Awaitable[tuple[asyncio.StreamReader, object]]) -> tuple[int, dict[str, str], bytes]:
    """The whole answer to `ask(…)` of `front`."""
    reader, _ = await asking
    return await answer(reader)


async def chunks(reader: asyncio.StreamReader):
    """The chunks of a chunked body."""
    while (size := int(await reader.readline(), 16)) or None:
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
