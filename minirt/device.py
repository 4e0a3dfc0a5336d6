"""Devices and memory: choice of a device, what it can, free and peak memory, and errors of a device."""

import dis
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import psutil
import torch

from minirt.errors import DeviceError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


CONTEXT_BYTES = 1 << 30  # what the CUDA context and its libraries may take of a GPU


@dataclass(frozen=True)
class AbsentGPU:
    """An NVIDIA GPU that takes the place of a `torch.device` where a model is only planned.

    Args:
        name: for the user.
        memory: all of it, in bytes.
        capability: its CUDA compute capability. `assumed`: it was not stated.
        sms: its streaming multiprocessors; 0: not known.
    """

    type: ClassVar[str] = "cuda"
    index: ClassVar[None] = None
    name: str
    memory: int
    capability: tuple[int, int]
    assumed: bool = False
    sms: int = 0

    def __str__(self) -> str:
        return f"cuda ({self.name}, sm_{self.capability[0]}{self.capability[1]}{' assumed' if self.assumed else ''})"


AnyDevice = torch.device | AbsentGPU
on_meta: ContextVar[AbsentGPU | None] = ContextVar("on_meta", default=None)  # the GPU that PyTorch's meta device stands for


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of PyTorch's allocator on a GPU, else of the process (resident set)."""
    if device.type == "cuda":
        return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]  # the flat variant takes 0.3 ms
    return host_peak_memory()


def host_peak_memory() -> int:
    """The process's peak resident set, in bytes."""
    if resource is None:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_memory(device: AnyDevice) -> int:
    """Free memory of `device`, in bytes; of an absent GPU an estimate."""
    if isinstance(device, AbsentGPU):
        return max(0, device.memory - CONTEXT_BYTES)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def total_memory(device: AnyDevice) -> int:
    """All memory of `device`, in bytes."""
    if isinstance(device, AbsentGPU):
        return device.memory
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total


def held_by_others(device: AnyDevice) -> int | None:
    """Memory of a GPU that is neither free nor PyTorch's in this process, in bytes. None on a CPU, where it is not known.

    Other processes hold it, and so do the CUDA context of this process, about 0.5 GiB, and libraries that allocate outside
    PyTorch. The driver does not tell them apart, so up to `CONTEXT_BYTES` count as 0.
    """
    if isinstance(device, AbsentGPU):
        return 0
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    return held if held > CONTEXT_BYTES else 0


def pick_device(device: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N". Only "auto" falls back to the CPU.

    Raises:
        DeviceError: the device is unknown, absent or unusable.
    """
    if device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if str(device) == "cpu":
        return torch.device("cpu")
    if (named := re.fullmatch("cuda(?::([0-9]*))?", str(device))) is None:
        raise DeviceError("unknown device", where="--device", expected="auto, cpu, cuda or cuda:N", found=device)
    if not torch.cuda.is_available():
        hint = "use --device cpu, or install a CUDA build of torch"
        raise DeviceError("no usable CUDA device", where=f"--device {device}", hint=hint)
    index, count = int(named[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise DeviceError("no such device", where="--device", expected=f"below cuda:{count}", found=device)
    return torch.device("cuda", index)


def is_gpu(device: AnyDevice) -> bool:
    """Whether `device` is a GPU, or stands for one."""
    return device.type == "cuda" or (device.type == "meta" and on_meta.get() is not None)


def is_nvidia(device: AnyDevice) -> bool:
    """Whether `device` is an NVIDIA GPU, or stands for one. PyTorch for ROCm calls an AMD GPU "cuda" as well."""
    return isinstance(device, AbsentGPU) or (is_gpu(device) and (device.type == "meta" or torch.version.hip is None))


def compute_capability(device: AnyDevice) -> tuple[int, int]:
    """CUDA compute capability of `device`, (9, 0) for Hopper; (0, 0) if it is not an NVIDIA GPU.

    PyTorch for ROCm numbers AMD GPUs in another way: a MI300 is (9, 4).
    """
    if isinstance(device, AbsentGPU):
        return device.capability
    if device.type == "meta" and (absent := on_meta.get()) is not None:
        return absent.capability
    return torch.cuda.get_device_capability(device) if is_nvidia(device) else (0, 0)


def triton_installed() -> bool:
    """Whether Triton can be imported. CUDA builds of PyTorch for Linux bring it; the CPU build does not."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, which takes any device. It reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def interpreter_unsupported(dtype: str, on_gpu: bool) -> str | None:
    """Why Triton's interpreter cannot compute a model of `dtype`, such as "float32", or None."""
    if on_gpu:
        return "TRITON_INTERPRET is set, so Triton would interpret kernels instead of running them on the GPU"
    return "Triton's interpreter gives wrong bfloat16 products" if dtype == "bfloat16" else None


def on_device(device: torch.device) -> AbstractContextManager:
    """Context in which `device` is the current CUDA device, on which Triton launches. Other devices need no context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_DRIVER_ERRORS = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ")  # how such messages of PyTorch and Triton begin
_HOST_ALLOCATOR = ("[enforce fail at alloc_cpu", "DefaultCPUAllocator: ")
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to the device. PyTorch keeps the pinned memory until the copy has ended."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on a GPU or on the host.

    PyTorch and Triton use types only in part. A plain RuntimeError therefore counts if its message begins as theirs do and native
    code raised it. A RuntimeError that Python code raises never counts.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).partition("\n")[0]
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY or message.endswith(": out of memory")
    if not _is_native(error):
        return False
    if message.startswith(_DRIVER_ERRORS):
        return ": out of memory" in message or "CUBLAS_STATUS_ALLOC_FAILED" in message
    return message.startswith(_HOST_ALLOCATOR)


def is_device_failure(error: BaseException) -> bool:
    """Whether `error` says that the GPU, or a call of its driver, failed for another reason than memory.

    CUDA reports most failures at a later call, and repeats them at every call from then on: only a new process can use the GPU.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return _is_native(error) and str(error).startswith(_DRIVER_ERRORS)


def _is_native(error: BaseException) -> bool:
    """Whether `error` is a plain RuntimeError that native code raised, not a `raise` statement."""
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]
