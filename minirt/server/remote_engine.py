"""`RemoteEngine`: the engine's process as the front sees it. It belongs to one event loop."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from minirt.engine.request import EngineStats, Request, TokenOutput
from minirt.errors import EngineError, MinirtError
from minirt.server.wire import (
    TO_FRONT,
    Abort,
    AskStats,
    Failed,
    Found,
    Frames,
    Ready,
    Start,
    Stats,
    Step,
    Submit,
    ToEngine,
    frame,
)

_END_SECONDS = 10  # how long the process may take to end after its connection was closed


class Sink(Protocol):
    """Takes the outputs of requests. Called in the event loop's thread: it must return soon."""

    def put(self, output: TokenOutput) -> None: ...

    def fail(self, error: MinirtError) -> None:
        """No more outputs come for any of its requests."""


class RemoteEngine(asyncio.Protocol):
    """Starts the engine's process, sends it requests, and gives each output to the sink of its request.

    Attributes:
        found: done when the model's files are on the disk: the folder, or None.
        ready: done when the model is loaded.
        ended: done when the process has ended: why.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.found: asyncio.Future[str | None] = loop.create_future()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[MinirtError] = loop.create_future()
        self._failure: MinirtError | None = None
        self._sinks: dict[int, Sink] = {}
        self._ids = itertools.count()
        self._frames = Frames()
        self._asking: list[asyncio.Future[EngineStats]] = []
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen | None = None

    @classmethod
    async def start(cls, start: Start) -> "RemoteEngine":
        """Start the process, with this first message."""
        own, other = socket.socketpair()
        command = [sys.executable, "-P", "-m", "minirt.server.engine_process", str(other.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with other:
            try:  # in a session of its own, a Ctrl-C on the terminal does not reach it
                process = subprocess.Popen(
                    command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                own.close()
                raise EngineError(f"the engine's process cannot be started: {error}") from error
        return await cls.connect(own, process, start)

    @classmethod
    async def connect(cls, connection: socket.socket, process: subprocess.Popen | None, start: Start) -> "RemoteEngine":
        """Use an engine at the other end of a connection."""
        engine = cls()
        engine._process = process
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: engine, sock=connection)
        engine._send(start)
        return engine

    # ── a `Backend` for the `Processor` ──

    @property
    def max_len(self) -> int:
        if not self.ready.done():
            raise EngineError("the model is being loaded", hint="ask /health")
        return self.ready.result().max_len

    def new_id(self) -> int:
        return next(self._ids)

    def check(self, request: Request) -> None:
        """Nothing: the engine's process checks each request when it arrives, and refuses it in its output."""

    # ── requests ──

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Add requests. All their outputs go to `sink`.

        Raises:
            EngineError: the engine has ended.
        """
        if self._failure is not None:
            raise self._failure.at(self._failure.where)
        self._send(Submit.of(requests))
        for request in requests:
            self._sinks[request.id] = sink

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests: no more outputs of them come."""
        known = [request_id for request_id in request_ids if self._sinks.pop(request_id, None) is not None]
        if known and self._failure is None:
            self._send(Abort(known))

    def forget(self, request_id: int) -> None:
        """Its last output has come."""
        self._sinks.pop(request_id, None)

    async def stats(self) -> EngineStats:
        """Ask for the engine's state. It answers between two steps."""
        if self._failure is not None:
            raise self._failure.at(self._failure.where)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self._send(AskStats())
        return await answer

    async def stop(self) -> None:
        """Close the connection, so that the process ends. Kill it if it does not, or while it loads the model."""
        if not self.ready.done() or self.ready.cancelled():
            self.kill()
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, _END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # ── asyncio.Protocol ──

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._receive(TO_FRONT.decode(body))

    def _receive(self, message: Any) -> None:
        match message:
            case Step(outputs=outputs):
                sinks = self._sinks
                for output in outputs:
                    sink = sinks.get(output.request_id)
                    if sink is not None:  # else it was aborted
                        try:
                            sink.put(output)
                        except Exception as error:  # one request must not end the others
                            sink.fail(error if isinstance(error, MinirtError) else _unforeseen(error))
            case Stats(stats=stats):
                answer = self._asking.pop(0)
                if not answer.done():
                    answer.set_result(stats)
            case Found(folder=folder) if not self.found.done():  # else nobody waits any more
                self.found.set_result(folder)
            case Ready() if not self.ready.done():
                self.ready.set_result(message)
            case Failed(error=error):
                self._failure = error

    def connection_lost(self, exception: Exception | None) -> None:
        """The process has ended, or `stop` closed the connection. All open requests end with an error."""
        if self._failure is None:
            self._failure = EngineError("the engine's process has ended", found=self._exit_status())
        for sink in set(self._sinks.values()):
            sink.fail(self._failure.at(self._failure.where))
        self._sinks.clear()
        waiting: list[asyncio.Future] = [self.found, self.ready, *self._asking]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure.at(self._failure.where))
                future.exception()  # nobody may be waiting
        if not self.ended.done():
            self.ended.set_result(self._failure)

    def _exit_status(self) -> str | None:
        if self._process is None:
            return None
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return None
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _unforeseen(error: Exception) -> MinirtError:
    own = MinirtError(f"the output cannot be processed: {type(error).__name__}: {error}")
    own.__cause__ = error
    return own


