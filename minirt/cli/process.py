"""The command line as a process: its standard streams, its signals, and Python's warnings as lines on stderr.

Each context manager here changes one of them while a command runs, and restores it. `app.main` enters all of them.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from minirt.cli.output import one_line
from minirt.errors import MinirtError

_TERMINATION = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def standard_streams() -> Iterator[None]:
    """Context in which no standard stream is None and none fails with an OSError.

    If stdout is full or its reader is gone, the command ends with exit code 1. If this happens to stderr, its text is lost and
    the command continues: results do not depend on notes.
    """
    before = sys.stdin, sys.stdout, sys.stderr
    # A stream that the shell closed (`>&-`) is None.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    stdout, stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="replace")  # a terminal that cannot show a character gets "?" instead of an error
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # in any locale; `chat` reports invalid UTF-8
    sys.stdout, sys.stderr = _Guarded(stdout, _stop), _Guarded(stderr, lambda error: None)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


class _Guarded:
    """A text stream that calls `failed` with its first OSError, at once and at every later use. Later text is lost."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed
        self._error: OSError | None = None  # kept, because some libraries test a stream and ignore its exception

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError("not a text")  # click tells text streams from binary ones by this
        self._use(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._use(self._stream.flush)

    def _use(self, method: Callable[..., object], *arguments: str) -> None:
        if self._error is None:
            try:
                method(*arguments)
            except OSError as error:
                self._error = error
                with suppress(OSError, AttributeError):  # a stream without a file descriptor
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self._stream.fileno())  # otherwise the flush at exit fails, and sets the exit code to 120
                    os.close(null)
        if self._error is not None:
            self._failed(self._error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _stop(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):  # `| head` has read what it wants
        sys.exit(1)
    raise MinirtError(f"cannot write the output: {error.strerror}", where="stdout") from error


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has arrived. A KeyboardInterrupt, so everything that cleans up after Ctrl-C does so here too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def termination_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `Terminated` in the main thread. Ignored signals (nohup) stay ignored."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated(number)

    with _handled([s for s in _TERMINATION if signal.getsignal(s) is signal.SIG_DFL], terminate):
        yield


@contextmanager
def finishing() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP are ignored, for the last output of a command that was interrupted.

    Closing a terminal sends SIGHUP several times, and supervisors repeat SIGTERM. Ctrl-C still interrupts.
    """
    with _handled(_TERMINATION, signal.SIG_IGN):
        yield


@contextmanager
def _handled(signals: "Iterable[signal.Signals]", handler: Any) -> Iterator[None]:
    before = {}
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextmanager
def warning_lines() -> Iterator[None]:
    """Context in which each warning is one line on stderr, `minirt: warning: …`, printed once. Filters (`-W`) still apply."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = one_line(str(message))
        if text not in shown:
            shown.add(text)
            sys.stderr.write(f"minirt: warning: {text}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
