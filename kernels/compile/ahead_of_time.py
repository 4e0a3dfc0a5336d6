"""`AheadOfTime`: launches that only compile their kernels, in parallel; `without_launches`: launches that do nothing."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import triton
from triton import JITFunction

from minirt.compile_server import compilers
from minirt.kernels.compile.processes import CompileProcesses, CompileRequest, hash_triton, warn_of_one_process
from minirt.kernels.prepared import by_triton
from minirt.wording import warn

_mode: ContextVar[str] = ContextVar("launches", default="run")  # or "compile" or "skip"; each thread has its own value


@contextmanager
def without_launches(device: torch.device) -> Iterator[None]:
    """Context in which this thread's launches do nothing: kernels are neither compiled nor run. Other threads launch as usual.

    Host code runs and allocates as usual, so the memory of a step can be measured. If `device` is not a GPU, kernels run.
    """
    if device.type != "cuda":
        yield
        return
    with launches("skip"):
        yield


@contextmanager
def launches(mode: str) -> Iterator[None]:
    """Context of what this thread's launches do. They take Triton's own path, which is patched."""
    before, path = _mode.set(mode), by_triton.set(True)
    try:
        with _PATCHES:
            yield
    finally:
        _mode.reset(before)
        by_triton.reset(path)


class _GivenUp(Exception):
    """A compilation was ended, because nothing needs the kernel now."""


class _Kernel(Future):
    """A kernel that `make` compiles and loads. If that has not begun, or was given up, `result` does it itself, at once."""

    def __init__(self, make: Callable[[bool], Any]) -> None:
        super().__init__()
        self._make = make  # (whether it may be given up) → the kernel

    def run(self) -> None:
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._make(True))
            except BaseException as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if not self.cancel():
            with suppress(_GivenUp):
                return super().result(timeout)
        return self._make(False)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, themselves or through `CompileProcesses` once these are ready, and load them."""

    def __init__(self, device: torch.device, progress: Callable[[int, int, bool], None] | None) -> None:
        self._count = compilers()
        super().__init__(self._count)
        self._device, self._progress = device, progress
        self._processes: CompileProcesses | None = None
        self._started, self._starting = False, threading.Lock()
        self._alone = False  # whether other processes cannot help
        self.futures: list[_Kernel] = []
        self.compiles = False  # whether a kernel was not in Triton's cache
        self._ending = False  # whether kernels that are being compiled are given up

    def submit(self, compile: Callable[[], Any], /) -> Future:  # type: ignore[override]
        def make(may_end: bool) -> Any:
            with torch.cuda.device(self._device):  # the current device is a setting of the thread
                self._elsewhere(compile)
                if may_end and self._ending:
                    raise _GivenUp
                kernel = compile()
                kernel.run  # noqa: B018  (reading the attribute loads the kernel)
            return kernel

        self.futures.append(kernel := _Kernel(make))
        super().submit(kernel.run)
        if self.compiles and self._progress is not None:
            self._progress(0, len(self.futures), True)
        return kernel

    def _elsewhere(self, compile: Callable[[], Any]) -> None:
        """Have a process compile the kernel into Triton's cache, if it can. The first kernel not yet cached starts processes."""
        if self._alone or self._ending:
            return
        try:
            request = CompileRequest.of(compile)
            if request is None or request.is_cached():
                return
        except Exception as error:  # private parts of Triton are missing, or are others
            with self._starting:
                if not self._alone:
                    self._alone = True
                    warn_of_one_process(f"Triton {triton.__version__} is not as expected ({type(error).__name__}: {error})")
            return
        self.compiles = True
        with self._starting:
            if not self._started and not self._ending:
                self._started = True
                try:
                    self._processes = CompileProcesses(self._count)
                except OSError as error:
                    warn_of_one_process(f"no other processes can be started ({error})")
        if (processes := self._processes) is not None:
            processes.compile(request)

    def shutdown(self, *args: Any, **options: Any) -> None:
        """End at once: without processes, no thread waits for one."""
        with self._starting:
            self._ending = True
            processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()
        super().shutdown(*args, **options)


def _asynchronous(compilers: _Compilers) -> Any:
    """Triton's asynchronous mode, which puts a kernel at once where Triton's next launch finds it and waits for it. In Triton 3.6
    that happens only at the end of the mode, and a launch before compiles again."""
    mode = triton.AsyncCompileMode(compilers, ignore_errors=True)
    submit = mode.submit

    def submit_and_place(key: Any, compile: Any, place: Callable[[Any], None], *others: Any) -> Any:
        kernel = submit(key, compile, place, *others)
        place(kernel)
        return kernel

    mode.submit = submit_and_place  # type: ignore[method-assign]
    return mode


class AheadOfTime:
    """Compiles and loads the kernels of launches that do not run: each once, in parallel, in the order of the launches.

    `wait` or, without it, a kernel's first real launch waits for it. Used as a context, it is closed at the end.

    Args:
        device: if it is not a GPU or, with a warning, if this version of Triton lacks what is needed, launches run as usual.
        progress: called with the numbers of ready kernels and of all kernels so far, and whether one of them was not in Triton's
            cache. Until `wait`, it is called only if a kernel is compiled.
    """

    def __init__(self, device: torch.device, progress: Callable[[int, int, bool], None] | None = None) -> None:
        self._compilers, self._asynchronous, self._progress = _Compilers(device, progress), None, progress
        if device.type == "cuda":
            hash_triton()
            _separate_launchers()
            try:
                self._asynchronous = _asynchronous(self._compilers)
            except (AttributeError, TypeError) as error:
                what = f"Triton {triton.__version__} has no asynchronous mode ({error})"
                warn(f"kernels are compiled one after the other: {what}", RuntimeWarning)

    def add(self, launch: Callable[[], Any]) -> int:
        """Call `launch`, whose launches in this thread only begin to compile. Other threads launch as usual, and their outputs
        are not written. Returns the number of all kernels so far."""
        if (asynchronous := self._asynchronous) is None:
            launch()
            return 0

        def collect() -> None:
            asynchronous.__enter__()  # it ends with this context: Triton's own end would wait for all kernels
            with launches("compile"):
                launch()

        copy_context().run(collect)
        return len(self._compilers.futures)

    def ready_within(self, seconds: float) -> bool:
        """Whether all kernels are ready, for which this waits at most so long."""
        return not wait(self._compilers.futures, seconds).not_done

    def wait(self, count: int | None = None, *, ignore_errors: bool = False) -> None:
        """Wait until the first `count` kernels, None: all, are ready, or one cannot be compiled or loaded.

        Its error is raised, if `ignore_errors` at its first real launch.
        """
        futures = self._compilers.futures[:count]
        for done, future in enumerate(as_completed(futures), 1):
            if self._progress is not None:
                self._progress(done, len(futures), self._compilers.compiles)
            if not ignore_errors:
                future.result()

    def close(self) -> None:
        """Give up the kernels that are not ready; they are compiled at their first real launch."""
        for future in self._compilers.futures:
            future.cancel()
        self._compilers.shutdown()

    def __enter__(self) -> "AheadOfTime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache(None)
def _separate_launchers() -> None:
    """From now on, have Triton import each launcher as a separate module.

    Triton up to 3.6 imports every launcher under one name. When one is imported again, Python copies its contents into the
    module that has this name at that moment, so a thread could get another kernel's launcher. Threads load kernels at any time.
    """
    with suppress(ImportError):
        build, lock = import_module("triton.runtime.build"), threading.Lock()
        if (load := getattr(build, "_load_module_from_path", None)) is None:
            return  # this version imports launchers in another way

        def load_alone(name: str, path: str) -> ModuleType:
            with lock:
                module, separate = load(name, path), ModuleType(name)
                vars(separate).update(vars(module))
                return separate

        build._load_module_from_path = load_alone  # type: ignore[attr-defined]


class _Patches:
    """Replaces `JITFunction.run` while any thread is in one of the two contexts."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._run: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._run, JITFunction.run = JITFunction.run, _compile_only(JITFunction.run)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                JITFunction.run = self._run


_PATCHES = _Patches()


def _compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
    """A `JITFunction.run` that does not launch in threads that are in one of the two contexts."""

    def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        mode = _mode.get()
        if mode == "run":
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        if mode == "skip":
            return None
        run(kernel, *arguments, grid=grid, warmup=True, **options)
        return None

    return compile_only
