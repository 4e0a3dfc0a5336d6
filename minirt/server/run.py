"""`serve`: the front process from its start to its end: the engine's process, the HTTP server, signals, draining."""

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from minirt.errors import InputError
from minirt.server.app import App
from minirt.server.errors import HTTPError
from minirt.server.front import Front
from minirt.server.http_protocol import HTTPProtocol
from minirt.server.options import ServerOptions
from minirt.server.wire import SWITCH_SECONDS

_CLOSE_SECONDS = 5  # how long connections may take to close at the end
_KEEP_ALIVE_SECONDS = 75


def serve(options: ServerOptions, load_options: dict[str, Any], host: str, port: int) -> None:
    """Run the server until a signal ends it.

    Args:
        load_options: the fields of `LoadOptions`.
        host, port: the address to listen on. Port 0 takes a free one.
    Raises:
        MinirtError: the address cannot be used, the model cannot be loaded, or the engine has failed.
    """
    listening = listen(host, port)
    try:
        asyncio.run(_serve(options, load_options, listening))
    finally:
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        # With its protocol stated, asyncio sets TCP_NODELAY: a token must not wait until the client has acknowledged the last.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        what = f"cannot listen: {getattr(error, 'strerror', None) or error}"
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        hint = "end the other program, or give another --port; 0 takes a free one" if taken else None
        raise InputError(what, where=f"--host {host} --port {port}", hint=hint) from error
    return listening


class FrontServer(uvicorn.Server):
    """uvicorn's server, without its handling of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(options: ServerOptions, load_options: dict[str, Any], listening: socket.socket) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    front: Front | None = None
    asked = asyncio.Event()

    def receive(number: int) -> None:
        """The first SIGTERM or SIGINT asks for the end; a second one ends the process at once."""
        if asked.is_set():
            if front is not None:
                front.engine.kill()
            os._exit(128 + number)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # before the engine's process, which a signal to this one must end
        asyncio.get_running_loop().add_signal_handler(number, receive, number)
    front = await Front.start_engine(options, load_options)
    server = FrontServer(
        uvicorn.Config(
            App(front), http=HTTPProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            log_level="critical", timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS, proxy_headers=False,
        )
    )  # fmt: skip
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await _until_end(front, asked, listening)
    finally:
        server.should_exit = True
        await serving
        await front.close()


async def _until_end(front: Front, end: asyncio.Event, listening: socket.socket) -> None:
    """Load the model and serve, until a signal comes and the running requests have ended, or the engine fails."""
    asked = asyncio.create_task(end.wait())
    loading = asyncio.create_task(front.load())
    await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    loading.result()
    if not front.options.quiet:
        host, port = listening.getsockname()[:2]
        address = f"{f'[{host}]' if ':' in host else host}:{port}{front.options.root_path}"
        sys.stderr.write(f"minirt: serving {front.options.names[0]} on http://{address}\n")
    await asyncio.wait((front.engine.ended, asked), return_when=asyncio.FIRST_COMPLETED)
    if not front.engine.ended.done():
        await drain(front)
    if front.engine.ended.done():
        await _wait_for_exchanges(front, _CLOSE_SECONDS)  # each answers with the error
        raise front.engine.ended.result()


async def drain(front: Front) -> None:
    """Refuse new requests, and wait for the running ones. After the time limit, these end with an error."""
    front.draining = True
    running = len(front.exchanges)
    if running and not front.options.quiet:
        sys.stderr.write(f"minirt: ending; {running} request{'s are' if running > 1 else ' is'} still running\n")
    await _wait_for_exchanges(front, front.options.drain_timeout)
    for generation in list(front.generations):
        generation.fail(HTTPError(503, "the server has ended before the answer was complete"))
    await _wait_for_exchanges(front, _CLOSE_SECONDS)


async def _wait_for_exchanges(front: Front, seconds: float) -> None:
    end = time.monotonic() + seconds
    while front.exchanges and time.monotonic() < end:
        await asyncio.sleep(0.02)
