"""`CompileProcesses`: other processes compile kernels into Triton's cache on disk, where this process finds them.

Threads alone cannot parallelize all of the work: a quarter of it is Triton's front end, which holds Python's GIL. The processes
are forks of a `CompileServer`, which does not use the GPU. Its imports take seconds, and threads compile until then. If processes
cannot be started, or end, a warning says so and threads compile everything.
"""

import hashlib
import inspect
import os
import pickle
import pkgutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

from minirt import kernels
from minirt.compile_server import start_server, take_early
from minirt.wording import warn

_hashing = threading.Lock()

if TYPE_CHECKING:
    from triton.compiler.compiler import ASTSource


class CompileRequest(NamedTuple):
    """What a process needs to compile a kernel: where its function is, its specialization, and the target.

    The methods use private parts of Triton, imported late: another version may lack them, and then raises any exception.
    """

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attrs: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    @classmethod
    def of(cls, compile: Callable[[], Any]) -> "CompileRequest | None":
        """The request for the kernel that `compile` would compile; `compile` comes from Triton's asynchronous mode.

        None if the kernel cannot be determined, or is not in a module that can be imported.
        """
        from triton.compiler.compiler import ASTSource

        variables = inspect.getclosurevars(compile).nonlocals
        src, options, target = variables["src"], variables["options"], variables["target"]
        if not isinstance(src, ASTSource) or src.fn.module == "__main__":
            return None
        name = src.fn.fn.__qualname__
        return cls(src.fn.module, name, src.signature, src.constants, src.attrs, dict(options.__dict__), target)

    def source(self) -> "ASTSource":
        """The function and its specialization, as `triton.compile` takes them."""
        from triton.compiler.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        function = attrgetter(self.name)(import_module(self.module))
        kind = GluonASTSource if function.is_gluon() else ASTSource
        return kind(function, self.signature, self.constants, self.attrs)

    def is_cached(self) -> bool:
        """Whether Triton's cache on disk holds the compiled kernel."""
        from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
        from triton.runtime.cache import get_cache_manager

        source, backend = self.source(), make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        return bool(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(f"{source.name[:150]}.json"))


class CompileProcesses:
    """`count` processes that compile kernels. Raises OSError if they cannot be started."""

    def __init__(self, count: int) -> None:
        self._server, connections, self._errors = take_early() or start_server(count)
        self._starting, self._ready, self._lock = connections, deque[Connection](), threading.Lock()
        self._warned = False

    def compile(self, request: CompileRequest) -> None:
        """Have a free process compile the kernel into the cache, and wait for it.

        If no process is free or the compilation fails, the kernel is not in the cache. The caller then compiles it and gets the
        error.
        """
        connection = self._take()
        if connection is None:
            self._warn_if_ended()
            return
        try:
            connection.send(request)
            connection.recv()
        except (pickle.PicklingError, TypeError, AttributeError):  # pickling failed, so nothing was sent
            pass
        except (EOFError, OSError):
            self._warn_if_ended()
            return
        with self._lock:
            self._ready.append(connection)

    def close(self) -> None:
        """Kill the processes, even while they compile: Triton's cache holds only complete files."""
        self._warned = True  # that they have ended is no news
        with suppress(ProcessLookupError):  # they have already ended
            os.killpg(self._server.pid, signal.SIGKILL)
        threading.Thread(target=self._server.wait, daemon=True).start()  # it frees memory for some 0.1 s; steps go on
        for connection in (*self._starting, *self._ready):
            connection.close()
        self._errors.close()

    def _warn_if_ended(self) -> None:
        with self._lock:
            code = self._server.poll()  # the server ends after its forks
            if code is None or self._warned:
                return
            self._warned = True
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        warn_of_one_process(f"the other processes have ended (exit code {code}{': ' if last else ''}{last})")

    def _take(self) -> Connection | None:
        with self._lock:
            for connection in [c for c in self._starting if c.poll()]:
                self._starting.remove(connection)
                try:
                    connection.recv()
                except (EOFError, OSError):  # the process has ended
                    continue
                self._ready.append(connection)
            return self._ready.popleft() if self._ready else None


def hash_triton() -> None:
    """Have Triton read and hash its own files, as it does once in a process before the first kernel. It takes 0.4 s, mostly
    without Python's GIL. A second thread waits for the first one's."""
    with _hashing, suppress(Exception):  # it is private: another version may lack it
        from triton.runtime.cache import triton_key

        triton_key()


def warn_of_one_process(why: str) -> None:
    warn(f"kernels are compiled in this process only, which takes longer: {why}", RuntimeWarning)


def serve(descriptors: Sequence[int]) -> None:
    """Body of the server process: import all kernels, then fork one process for each connection."""
    hash_triton()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    connections = [Connection(descriptor) for descriptor in descriptors]
    for connection in connections:
        if os.fork() == 0:
            for other in connections:
                if other is not connection:
                    other.close()
            _compile_all(connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _compile_all(connection: Connection) -> None:
    """Send one message when ready, then compile what is requested, until the other end is closed."""
    answer: Any = None
    try:
        while True:
            connection.send(answer)
            request = connection.recv()
            try:
                triton.compile(request.source(), target=request.target, options=request.options)
            except Exception as error:  # the caller compiles the kernel again and gets the error
                answer = str(error)
    except (EOFError, OSError):
        return
