"""`CompileServer`: a process that imports PyTorch, Triton and the kernels, and then forks processes that compile kernels.

These imports take seconds; this module has none of them, so that a server can be started before (`head_start`).
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO, NamedTuple

from minirt.threads import usable_cpus

_MOST = 16  # processes; more would mostly wait for the longest compilation
_early: "list[CompileServer]" = []  # at most one: of `start_early`, until `take_early`


class CompileServer(NamedTuple):
    """A server that is starting: its process, the connections to its forks, and the file that has its stderr."""

    process: subprocess.Popen
    connections: list[Connection]
    errors: IO[bytes]


def compilers() -> int:
    """How many kernels to compile at a time."""
    return min(_MOST, usable_cpus())


def start_server(count: int) -> CompileServer:
    """Start a server of `count` processes. Each sends one message when it is ready. Raises OSError if it cannot be started."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server)
    mine, theirs = zip(*(Pipe() for _ in range(count)), strict=True)
    descriptors = [their.fileno() for their in theirs]
    command = [sys.executable or "", "-P", "-c", f"from minirt.kernels.compile.processes import serve; serve({descriptors})"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        process = subprocess.Popen(
            command, pass_fds=descriptors, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, env=environment,
        )  # fmt: skip
    except OSError:
        for connection in mine:
            connection.close()
        errors.close()
        raise
    finally:
        for their in theirs:
            their.close()
    return CompileServer(process, list(mine), errors)


def start_early() -> None:
    """Start a server for the first user of `take_early`. If there is none, it ends with this process."""
    if not _early:
        with suppress(OSError):  # the first kernel starts one again, and then says what is wrong
            _early.append(start_server(compilers()))


def take_early() -> CompileServer | None:
    """The server that was started early; None: there is none."""
    return _early.pop() if _early else None
