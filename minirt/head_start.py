"""`head_start`: what a command begins before it imports PyTorch, which takes seconds: the CUDA context, and a `CompileServer`."""

import ctypes
import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minirt.compile_server import start_early


@contextmanager
def head_start(options: Mapping[str, Any]) -> Iterator[None]:
    """Context of the import of PyTorch and of a load. It begins with what a load with these `LoadOptions` will need on an NVIDIA
    GPU: its CUDA context, and, if the kernel cache is empty, as in a new container, processes that compile kernels. What fails
    here is done again later, and then raises.

    Python collects no garbage in it: a fifth of the import of PyTorch would be collections that find nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        _begin(options)
        yield
    finally:
        if collects:
            gc.enable()


def _begin(options: Mapping[str, Any]) -> None:
    device = str(options.get("device") or "auto")
    if device == "cpu" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return
    number = device.removeprefix("cuda:")
    threading.Thread(target=_create_context, args=(int(number) if number.isdecimal() else 0,), daemon=True).start()
    kept = options.get("kernel_cache") or options.get("impl") in ("eager", ["eager"]) or options.get("warm_up") == "none"
    if not kept and _kernel_cache_is_empty():
        start_early()


def _create_context(device: int) -> None:
    """Create the primary context of a GPU, which PyTorch uses too (CUDA driver API, 6.7 Primary Context Management)."""
    with suppress(OSError, AttributeError):
        cuda, handle, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(handle), device) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _kernel_cache_is_empty() -> bool:
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    return not folder.is_dir() or next(folder.iterdir(), None) is None
