"""`CallDriver`: runs the requests of a `Call` on an engine. `Generator`, `AsyncGenerator` and the server use it alike.

Outputs wait in the caller's own sink, and become text when the caller pushes them: a thread waits on a queue, a task of an event
loop on a `Wakeup`. Imports no torch.
"""

import asyncio
import time
from collections.abc import Iterator

from minirt.engine.port import Port, Sink
from minirt.engine.request import TokenOutput
from minirt.outputs import CompletionStream, Piece
from minirt.processor import Call


class CallDriver:
    """The requests of a call from their start to their ends (`Call.open`). A context manager that aborts those that still run.

    Args:
        engine: gets the requests.
        sink: gets their outputs, which the caller gives to `push`.
        final_only: the caller reads only complete results. Without effect on requests with stop strings, which end here.
        raises: `push` raises the error of a request that failed.
    """

    def __init__(self, call: Call, engine: Port, sink: Sink, *, final_only: bool = False, raises: bool = False) -> None:
        self._call, self._engine, self._sink, self._final_only, self._raises = call, engine, sink, final_only, raises

    def start(self) -> None:
        """Submit all requests. Raises as `parts`."""
        for _ in self.parts():
            pass

    def parts(self) -> Iterator[None]:
        """Submit the requests, part by part: the first ones run while the others are prepared.

        Raises:
            MinirtError: the engine has ended, or a prompt is refused.
        """
        call, started, count = self._call, time.perf_counter(), 0
        while True:
            part = call.requests[count:]
            for request, stream in zip(part, call.streams[count:], strict=True):
                request.final_only, stream.started = self._final_only and not stream.stops, started
                call.open[request.id] = stream
            if count:
                time.sleep(0)  # the engine's thread needs the interpreter's lock, which a thread that computes keeps for 5 ms
            count += len(part)
            if part:
                self._engine.submit(part, self._sink)
            yield
            if next(call.rest, None) is None:
                return

    def push(self, output: TokenOutput) -> tuple[CompletionStream, Piece] | None:
        """The new piece with its stream; None if the request has ended before. One that ends at a stop string is aborted."""
        stream = self._call.open.get(output.request_id)
        if stream is None:  # it has ended at a stop string; the engine had computed one more token
            return None
        piece = stream.push(output)
        if piece.finish_reason is not None:
            del self._call.open[output.request_id]
            if output.finish_reason is None:
                self._engine.abort([output.request_id])
            if self._raises and output.error is not None:
                raise output.error
        return stream, piece

    def abort(self) -> int:
        """Drop the requests that still run. Returns their number."""
        open_ids = list(self._call.open)
        self._call.open.clear()
        if open_ids:
            self._engine.abort(open_ids)
        return len(open_ids)

    def __enter__(self) -> "CallDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class Wakeup:
    """Lets a task of an event loop wait until the loop's thread calls `wake`."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the task if it waits."""
        future, self._future = self._future, None
        if future is not None and not future.done():
            future.set_result(None)

    def wait(self) -> "asyncio.Future[None]":
        """A future to await. One task waits at a time."""
        self._future = asyncio.get_running_loop().create_future()
        return self._future
