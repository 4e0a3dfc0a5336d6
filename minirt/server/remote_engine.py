"""`RemoteEngine`: the engine's process as the front sees it. It belongs to one event loop."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from minirt.engine.port import Sink, Sinks
from minirt.engine.request import Request
from minirt.errors import EngineError, MinirtError
from minirt.server import wire

_END_SECONDS = 10  # how long the process may take to end after its connection was closed


class RemoteEngine(asyncio.Protocol):
    """Starts the engine's process, sends it requests, and gives the outputs of each step to the sinks of the requests.

    Attributes:
        folder: done when the model's files are on the disk: the folder, or None.
        ready: done when the model is loaded.
        ended: done when the process has ended: why.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.folder: asyncio.Future[str | None] = loop.create_future()
        self.ready: asyncio.Future[wire.Ready] = loop.create_future()
        self.ended: asyncio.Future[MinirtError] = loop.create_future()
        self._failure: MinirtError | None = None
        self._sinks = Sinks()
        self._ids = itertools.count()
        self._frames = wire.Frames()
        self._changing: list[asyncio.Future[wire.AdapterChanged]] = []  # as well
        self._asking: list[asyncio.Future[wire.EngineState]] = []  # answers come in the order of the questions
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen | None = None

    @classmethod
    async def start(cls, start: wire.Start) -> "RemoteEngine":
        """Start the process, with this first message."""
        here, there = socket.socketpair()
        command = [sys.executable, "-P", "-m", "minirt.server.engine_process", str(there.fileno())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with there:
            try:  # in a new session, a Ctrl-C on the terminal does not reach it
                process = subprocess.Popen(
                    command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                here.close()
                raise EngineError(f"the engine's process cannot be started: {error}") from error
        return await cls.connect(here, process, start)

    @classmethod
    async def connect(cls, connection: socket.socket, process: subprocess.Popen | None, start: wire.Start) -> "RemoteEngine":
        """Use an engine at the other end of a connection."""
        engine = cls()
        engine._process = process
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: engine, sock=connection)
        engine._send(start)
        return engine

    # ── an `EngineLike` for the `Processor`, which is made when the model is ready ──

    @property
    def max_len(self) -> int:
        return self.ready.result().max_len

    @property
    def keeps_states(self) -> bool:
        return self.ready.result().keeps_states

    def new_id(self) -> int:
        return next(self._ids)

    def check(self, request: Request) -> None:
        """Nothing: the engine's process checks each request when it arrives, and refuses it in its output."""

    # ── a `Port` for the `CallDriver` ──

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """See `Port`. The sink's `put` runs in the event loop's thread."""
        if self._failure is not None:
            raise self._failure.copy()
        self._send(wire.Submit.of(requests))
        for request in requests:
            self._sinks[request.id] = sink

    def abort(self, request_ids: Sequence[int]) -> None:
        if (known := self._sinks.drop(request_ids)) and self._failure is None:
            self._send(wire.Abort(known))

    async def ask(self, request_ids: Sequence[int] = ()) -> wire.EngineState:
        """Ask for the engine's state, and how many tokens requests have generated. It answers between two steps."""
        if self._failure is not None:
            raise self._failure.copy()
        answer: asyncio.Future[wire.EngineState] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self._send(wire.Ask(list(request_ids)))
        return await answer

    async def change_adapter(self, name: str, folder: str | None) -> list[str]:
        """Load an adapter from a folder; None: unload it. Returns the names of all adapters.

        Raises:
            MinirtError: it is refused.
        """
        if self._failure is not None:
            raise self._failure.copy()
        answer: asyncio.Future[wire.AdapterChanged] = asyncio.get_running_loop().create_future()
        self._changing.append(answer)
        self._send(wire.ChangeAdapter(name, folder))
        changed = await answer
        if changed.error is not None:
            raise changed.error
        return changed.loras

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

    def _send(self, message: wire.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.frame(message))

    # ── asyncio.Protocol ──

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in map(wire.TO_FRONT.decode, self._frames.feed(data)):
            match message:
                case wire.StepOutputs(outputs=outputs):
                    self._sinks.deliver(outputs)
                case wire.AdapterChanged():
                    change = self._changing.pop(0)
                    if not change.done():
                        change.set_result(message)
                case wire.EngineState():
                    question = self._asking.pop(0)
                    if not question.done():
                        question.set_result(message)
                case wire.FilesReady(folder=folder) if not self.folder.done():  # else nobody waits any longer
                    self.folder.set_result(folder)
                case wire.Ready() if not self.ready.done():
                    self.ready.set_result(message)
                case wire.Failed(error=error):
                    self._failure = error

    def connection_lost(self, exception: Exception | None) -> None:
        """The process has ended, or `stop` closed the connection. All open requests end with an error."""
        if self._failure is None:
            self._failure = EngineError("the engine's process has ended", found=self._exit_status())
        self._sinks.fail(list(self._sinks), self._failure)
        waiting: list[asyncio.Future] = [self.folder, self.ready, *self._asking, *self._changing]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure.copy())
                future.exception()  # nobody may be waiting
        if not self.ended.done():
            self.ended.set_result(self._failure)

    def _exit_status(self) -> str | None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1)
                return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return None
