"""`listed_kernels`: what launches would compile for a GPU that is not here; `compile_listed`: compile it into a folder."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from minirt.device import AbsentGPU
from minirt.errors import MinirtError
from minirt.kernels.compile.ahead_of_time import launches
from minirt.kernels.compile.processes import CompileRequest


class _Driver:
    """What of a Triton driver compilation asks for. It is also the device, since Triton keeps what it has compiled by device."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> "_Driver":
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0


class _List(Executor):
    """Lists what it gets to compile."""

    def __init__(self) -> None:
        self.requests: list[CompileRequest] = []

    def submit(self, compile: Callable[[], Any], /) -> Future:  # type: ignore[override]
        if (request := CompileRequest.of(compile)) is not None:
            self.requests.append(request)
        done = Future[None]()
        done.set_result(None)
        return done


@contextmanager
def listed_kernels(gpu: AbsentGPU) -> Iterator[list[CompileRequest]]:
    """Context in which launches on the meta device neither compile nor run. Yields the list of their kernels, each once."""
    listing, before = _List(), getattr(driver, "_active", None)  # None: Triton looks for a GPU at the next launch
    driver.set_active(_Driver(gpu.capability))  # type: ignore[arg-type]
    try:
        with launches("compile"), triton.AsyncCompileMode(listing, ignore_errors=True):
            yield listing.requests
    finally:
        driver.set_active(before)  # type: ignore[arg-type]


def compile_listed(
    requests: Sequence[CompileRequest], folder: Path, processes: int, progress: Callable[[int, int], None]
) -> None:
    """Compile kernels into a folder of the form of Triton's cache, in other processes.

    Raises:
        MinirtError: a kernel cannot be compiled.
    """
    with ProcessPoolExecutor(processes, get_context("spawn"), _use_cache, (str(folder),)) as pool:
        for done, (request, problem) in enumerate(zip(requests, pool.map(_compile, requests), strict=True), 1):
            if problem is not None:
                raise MinirtError("a kernel cannot be compiled", where=request.name, found=problem)
            progress(done, len(requests))


def _use_cache(folder: str) -> None:
    triton.knobs.cache.dir = folder


def _compile(request: CompileRequest) -> str | None:
    try:
        triton.compile(request.source(), target=request.target, options=request.options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
