"""`compile_ahead`: what a thread launches inside is compiled side by side, each kernel once, and does not run."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
import triton
from triton.runtime import JITFunction, build

from minirt.kernels.compile.processes import CompileProcesses, CompileRequest, warn

_inside: ContextVar[bool] = ContextVar("compile_ahead", default=False)  # each thread has its own


@contextmanager
def compile_ahead(
    device: torch.device, progress: Callable[[int, int], None] | None = None, *, ignore_errors: bool = False
) -> Iterator[None]:
    """Compile and load the kernels of all launches inside, side by side. None of them runs: what they would write is arbitrary.

    It is left when all are ready. Other threads launch as ever; and so does this one where the device is no GPU.

    Args:
        progress: called with the number of kernels that are ready and of all, once all are known.
        ignore_errors: a kernel that cannot be compiled or loaded is left for its launch to fail; otherwise its error is raised.
    """
    if device.type != "cuda":
        yield
        return
    with _PATCHES, _Compilers(device) as pool:
        inside = _inside.set(True)
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):  # up to 3.6 an error would leave it active
                try:
                    yield
                    if progress is not None:
                        for count, _ in enumerate(as_completed(pool.futures), 1):
                            progress(count, len(pool.futures))
                except BaseException:  # Ctrl-C, too, waits only for what has begun
                    for future in pool.futures:
                        future.cancel()
                    raise
        finally:
            _inside.reset(inside)
    if not ignore_errors:
        for future in pool.futures:
            future.result()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel, or have a process compile it once there is one, and load it."""

    def __init__(self, device: torch.device) -> None:
        self._count = min(16, os.cpu_count() or 1)
        super().__init__(self._count)
        self._device = device
        self._processes: CompileProcesses | None = None
        self._started, self._starting = False, threading.Lock()
        self.futures: list[Future] = []

    def submit(self, compile: Callable[[], Any], /) -> Future:  # type: ignore[override]
        def ready() -> Any:
            with torch.cuda.device(self._device):  # each thread has its own
                self._elsewhere(compile)
                kernel = compile()
                kernel.run  # noqa: B018  (asking for it loads it)
            return kernel

        self.futures.append(super().submit(ready))
        return self.futures[-1]

    def _elsewhere(self, compile: Callable[[], Any]) -> None:
        """Have it in Triton's cache, where processes can do that; they are started when the first kernel is missing there."""
        request = CompileRequest.of(compile)
        if request is None or request.is_cached():
            return
        with self._starting:
            if not self._started:
                self._started = True
                try:
                    self._processes = CompileProcesses(self._count)
                except OSError as error:
                    warn(f"no others can be started ({error})")
        if self._processes is not None:
            self._processes.compile(request)

    def shutdown(self, *args: Any, **options: Any) -> None:
        super().shutdown(*args, **options)
        if self._processes is not None:
            self._processes.close()
            self._processes = None


class _Patches:
    """What stands in the place of two of Triton's functions while any thread compiles ahead."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._replaced = JITFunction.run, build._load_module_from_path
                JITFunction.run, build._load_module_from_path = _compile_only(JITFunction.run), self._load_alone

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                JITFunction.run, build._load_module_from_path = self._replaced

    def _load_alone(self, name: str, path: str) -> ModuleType:
        """Triton up to 3.6 imports every launcher under one name. If one is imported again, Python hands its contents to
        whichever has that name by then, so that a thread could take another kernel's launcher."""
        with self._lock:
            module, own = self._replaced[1](name, path), ModuleType(name)
            vars(own).update(vars(module))
            return own


_PATCHES = _Patches()


def _compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run` that launches nothing for threads which compile ahead."""

    def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not _inside.get():
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        future = getattr(compiled, "future", None)
        if future is not None and future.done():
            compiled.result(ignore_errors=True)  # from now on Triton finds it at once
        return None

    return compile_only
