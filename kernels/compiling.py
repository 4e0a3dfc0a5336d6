"""`compile_ahead`: what is launched inside is compiled in threads, each kernel once, and does not run."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import triton
from triton.runtime import JITFunction, build

_LOCK = threading.Lock()


@contextmanager
def compile_ahead(
    device: torch.device, progress: Callable[[int, int], None] | None = None, *, ignore_errors: bool = False
) -> Iterator[None]:
    """Compile and load the kernels of all launches inside, side by side. None of them runs: what they would write is arbitrary.

    It is left when all are ready. Nothing else may launch kernels meanwhile. Where the device is no GPU, launches run as ever.

    Args:
        progress: called with the number of kernels that are ready and of all, once all are known.
        ignore_errors: a kernel that cannot be compiled or loaded is left for its launch to fail; otherwise its error is raised.
    """
    if device.type != "cuda":
        yield
        return
    run, load = JITFunction.run, build._load_module_from_path

    def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        future = getattr(kernel, "future", None)
        if future is not None and future.done():
            kernel.result(ignore_errors=True)  # from now on Triton finds it at once

    def load_alone(name: str, path: str) -> ModuleType:
        """Triton up to 3.6 imports every launcher under one name. If one is imported again, Python hands its contents to
        whichever has that name by then, so that a thread could take another kernel's launcher."""
        with _LOCK:
            module, own = load(name, path), ModuleType(name)
            vars(own).update(vars(module))
            return own

    with _Compilers(device) as pool:
        JITFunction.run, build._load_module_from_path = compile_only, load_alone
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
            JITFunction.run, build._load_module_from_path = run, load
    if not ignore_errors:
        for future in pool.futures:
            future.result()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel, most of it with Python's lock free, and load it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(min(16, os.cpu_count() or 1))
        self._device = device
        self.futures: list[Future] = []

    def submit(self, compile: Callable[[], Any], /) -> Future:  # type: ignore[override]
        def ready() -> Any:
            with torch.cuda.device(self._device):  # each thread has its own
                kernel = compile()
                kernel.run  # noqa: B018  (asking for it loads it)
            return kernel

        self.futures.append(super().submit(ready))
        return self.futures[-1]
