"""`LimitedProcesses`: a function in separate processes, whose time and memory the operating system limits.

For what a request or a model brings and what third-party code does with it: chat templates are programs, and the compiler of
grammars is native code. An endless loop, an overflow of the stack or too much memory then ends that process, and only the request
fails; a thread that runs such an operation cannot be stopped. Processes are reused, so only the first call waits for a start.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from minirt.sizes import format_size

_IDLE = 4  # maximum number of idle processes that are kept


class ProcessLimits(NamedTuple):
    """Of one call.

    Args:
        cpu_seconds: processor time of all threads.
        seconds: wall-clock time, also of a process that waits, such as for memory.
        memory: bytes of address space of the process.
    """

    cpu_seconds: float
    seconds: float
    memory: int


class Stopped(Exception):
    """The call reached a limit, or its process ended or could not be started. `str` says why."""


class LimitedProcesses:
    """Calls one function, from any thread. Threads that call at once use one process each.

    Args:
        target: "module:name" of a function that gets `first` and returns the function to call. That one gets a value and the
            number of bytes that it took, and returns its answer; all are JSON values.
        limits: of each call.
    """

    def __init__(self, target: str, first: Any, limits: ProcessLimits) -> None:
        self._target, self._first, self._limits = target, first, limits
        self._idle: list[_Process] = []
        weakref.finalize(self, _close_all, self._idle)

    def ask(self, value: Any) -> Any:
        """The function's answer.

        Raises:
            Stopped: see there.
        """
        try:
            line = _line(value)
        except RecursionError:
            raise Stopped("its input is nested too deeply") from None
        process = self._take()
        try:
            answer = process.ask(line)
        except BaseException:  # also Ctrl-C: the answer still to come would be taken for that of the next call
            process.close()
            raise
        if len(self._idle) < _IDLE:
            self._idle.append(process)
        else:
            process.close()
        return answer

    def _take(self) -> "_Process":
        with contextlib.suppress(IndexError):  # there is none, or another thread took it
            while not (process := self._idle.pop()).usable():
                process.close()
            return process
        return _Process(self._target, self._first, self._limits)


def _close_all(processes: "list[_Process]") -> None:
    while processes:
        processes.pop().close()


class _Process:
    """One process. Each value and each answer is a line of JSON."""

    def __init__(self, target: str, first: Any, limits: ProcessLimits) -> None:
        command = [sys.executable or "", "-P", "-c", f"from {__name__} import serve; serve{(target, *limits)}"]
        self._limits, self._owner = limits, os.getpid()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        except OSError as error:
            raise Stopped(f"its process cannot be started: {error}") from error
        self._send(_line(first))

    def usable(self) -> bool:
        """Whether it runs, and this process started it. After a fork, parent and child would read each other's answers."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, line: bytes) -> Any:
        self._send(line)
        try:
            answer = _value(self._process.stdout.readline())  # type: ignore[union-attr]
        except ValueError:  # no line, or part of one
            raise Stopped(self._end()) from None
        if answer is None:
            raise Stopped(f"it needs more than {format_size(self._limits.memory)} of memory")
        return answer[0]

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, so reading finds no answer
            self._process.stdin.write(line)  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _end(self) -> str:
        self._process.kill()
        code = self._process.wait()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"it was stopped after {self._limits.cpu_seconds if code == -signal.SIGPROF else self._limits.seconds} s"
        return f"its process ended with code {code}"

    def close(self) -> None:
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent bytes
                pipe.close()  # type: ignore[union-attr]


def _line(value: Any) -> bytes:
    """JSON on one line, in UTF-8 that may have lone surrogates. Escaping all non-ASCII characters would take much longer."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _value(line: bytes) -> Any:
    return json.loads(line.decode("utf-8", "surrogatepass"))


def serve(target: str, cpu_seconds: float, seconds: float, memory: int) -> None:
    """Body of the process: make the function, then answer each line of standard input with a line, until there are no more."""
    import resource

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process, whatever it is doing
    with contextlib.suppress(ValueError, OSError):  # some systems have no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(ValueError, OSError):  # a process that overflows its stack is expected, and no core dump wanted
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = target.partition(":")
    function: Callable[[Any, int], Any] = getattr(import_module(module), name)(_value(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = _line([function(_value(line), len(line))])
        except MemoryError:
            answer = _line(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
