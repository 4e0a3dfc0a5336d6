"""`Renderer`: runs a chat template in a separate process, whose time and memory the operating system limits.

A template is a program that comes with the model. Jinja's sandbox protects Python's internals, but does not prevent endless
loops, exponential texts or `'a' * 10**9`, and a thread that runs such an operation cannot be stopped. The process is reused, so
only the first rendering waits for its start (about 0.1 s).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from minirt.errors import shortened
from minirt.sizes import format_size

MAX_CPU_SECONDS = 5
MAX_SECONDS = 60  # wall-clock time, also of a process that waits, such as for memory
MAX_MEMORY = 1 << 30
MAX_OUTPUT = 1 << 20  # characters, in addition to four times those of the conversation and the other variables
_IDLE = 4  # maximum number of idle processes that are kept


class RenderingError(Exception):
    """The template failed, or was stopped. `str` says why. `stopped`: it took too much time, memory or output."""

    def __init__(self, text: str, stopped: bool = False) -> None:
        super().__init__(text)
        self.stopped = stopped


class Renderer:
    """Renders one template, from any thread. Threads that render at once use one process each."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._idle: list[_Process] = []
        weakref.finalize(self, _close_all, self._idle)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of the template with these variables, which are JSON values.

        Raises:
            RenderingError: the template raised an exception, or took too much time, memory or output.
        """
        process = self._take()
        try:
            text = process.render(variables)
        except RenderingError:
            if process.ended:
                process.close()
            else:
                self._put(process)
            raise
        except BaseException:  # Ctrl-C: the answer still to come would be taken for that of the next conversation
            process.close()
            raise
        self._put(process)
        return text

    def _take(self) -> "_Process":
        while self._idle:
            try:
                process = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if process.usable():
                return process
            process.close()
        return _Process(self._source)

    def _put(self, process: "_Process") -> None:
        if len(self._idle) < _IDLE:
            self._idle.append(process)
        else:
            process.close()


def _close_all(processes: "list[_Process]") -> None:
    while processes:
        processes.pop().close()


class _Process:
    """One process that renders one template. Each request and each answer is a line of JSON."""

    def __init__(self, source: str) -> None:
        limits = (MAX_CPU_SECONDS, MAX_SECONDS, MAX_MEMORY)
        command = [sys.executable or "", "-P", "-c", f"from {__name__} import serve; serve{limits}"]
        self.ended, self._owner = False, os.getpid()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        except OSError as error:
            raise RenderingError(f"the process that renders it cannot be started: {error}") from error
        self._send(source)

    def usable(self) -> bool:
        """Whether it runs, and this process started it. After a fork, parent and child would read each other's answers."""
        return self._owner == os.getpid() and self._process.poll() is None

    def render(self, variables: Mapping[str, Any]) -> str:
        self._send(variables)
        try:
            answer = _value(self._process.stdout.readline())  # type: ignore[union-attr]
        except ValueError:  # no line, or part of one
            raise RenderingError(self._end(), stopped=True) from None
        if "error" in answer:
            raise RenderingError(answer["error"], answer.get("stopped", False))
        return answer["text"]

    def _send(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended, so reading finds no answer
            self._process.stdin.write(_line(value))  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _end(self) -> str:
        self.ended = True
        self._process.kill()
        code = self._process.wait()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"it was stopped after {MAX_CPU_SECONDS if code == -signal.SIGPROF else MAX_SECONDS} s"
        return f"the process that renders it ended with code {code}"

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


def serve(cpu_seconds: float, seconds: float, memory: int) -> None:
    """Body of the process: read the template, then answer each line of variables with its text, until there are no more lines."""
    import resource

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # ends the process, whatever it is doing
    with contextlib.suppress(ValueError, OSError):  # some systems have no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    source, template = _value(sys.stdin.buffer.readline()), None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            template = template or compile_template(source)
            answer = _line({"text": _rendered(template, _value(line), MAX_OUTPUT + 4 * len(line))})
        except MemoryError:
            answer = _line({"error": f"it needs more than {format_size(memory)} of memory", "stopped": True})
        except RenderingError as error:
            answer = _line({"error": str(error), "stopped": error.stopped})
        except Exception as error:  # the template is third-party code and can raise anything
            answer = _line({"error": shortened(f"{type(error).__name__}: {error}")})
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _rendered(template: Any, variables: dict[str, Any], limit: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise RenderingError(f"it wrote more than {limit:,} characters", stopped=True)
    return "".join(pieces)


def compile_template(source: str) -> Any:
    """Compile the template in the same Jinja environment as transformers."""
    import functools
    from datetime import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # marks the text to train on; for inference a plain block

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's own filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
