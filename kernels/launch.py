"""What every kernel launch needs: facts about the device, launch options, and the workspace of partial results."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.device import AbsentGPU, compute_capability, is_gpu, on_meta
from minirt.errors import InputError, UnsupportedError

MOST_SUMS = 1 << 22  # fp32 partial results that a workspace holds
_SHARED_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_INTERPRETER = 80  # the interpreter uses the configurations of the oldest target
_INTERPRETER_SMS = 6  # few, so that each program of a persistent kernel has several work items


@functools.lru_cache
def capability(device: torch.device) -> int:
    """Compute capability as one number, such as 90 for Hopper; 0 for an AMD GPU; `_INTERPRETER` on a CPU."""
    if not is_gpu(device):
        return _INTERPRETER
    major, minor = compute_capability(device)
    return 10 * major + minor


@functools.lru_cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    if not is_gpu(device):
        return _INTERPRETER_SMS
    if (absent := on_meta.get()) is not None and device.type == "meta":
        return absent.sms
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def standing_for(gpu: AbsentGPU) -> Iterator[torch.device]:
    """Context in which PyTorch's meta device, which it yields, stands for `gpu`: kernels are configured for that."""
    token, known = on_meta.set(gpu), (capability, sm_count, require_fp8)
    try:
        for function in known:
            function.cache_clear()
        yield torch.device("meta")
    finally:
        on_meta.reset(token)
        for function in known:
            function.cache_clear()


class Gpu(NamedTuple):
    """What launch configurations depend on of a GPU: its compute capability, as `capability` returns it, and its SMs."""

    capability: int
    sms: int


def gpu_of(device: torch.device) -> Gpu:
    """The facts of `device` that launch configurations depend on."""
    return Gpu(capability(device), sm_count(device))


@functools.lru_cache
def require_fp8(device: torch.device) -> None:
    """Raise UnsupportedError on a GPU without FP8 in Triton. (Triton's interpreter has FP8.)"""
    if is_gpu(device) and capability(device) < 89:
        raise UnsupportedError(
            "no fp8 weights on this GPU", expected="compute capability 8.9 or later",
            found=capability(device) / 10, hint="use bf16 weights",
        )  # fmt: skip


def begin_together(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at the same address. On the meta device, an address is an offset in the tensor's memory."""
    same = a.data_ptr() == b.data_ptr()
    return same and (a.device.type != "meta" or a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def shared_limit(cc: int) -> int:
    """Bytes of shared memory that one program may use on capability `cc` (CUDA programming guide)."""
    return _SHARED_LIMITS.get(cc, 99) * 1024


def fit_stages(stage_bytes: int, budget: int, most: int = 4) -> int:
    """How many pipeline stages of `stage_bytes` each fit in `budget` bytes: at least 1, at most `most`."""
    return max(1, min(most, budget // stage_bytes))


def most_registers(threads: int) -> int:
    """The most registers of a thread with which `threads` threads fit on an SM: it has 65536, allocated in eights."""
    return min(255, 65536 // threads // 8 * 8)


def token_block(T: int) -> int:
    """T rounded up to a power of two, at least 16, the smallest side of an MMA."""
    return max(16, next_power_of_2(T))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (`triton.cdiv` takes microseconds on the host.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is n, at least 1, or larger. (`triton.next_power_of_2` takes microseconds on the host.)"""
    return 1 << (n - 1).bit_length()


@functools.lru_cache
def launch_options(num_warps: int, num_stages: int, pdl: bool) -> Mapping[str, Any]:
    """Options of a launch. `launch_pdl` lets the kernel start before its predecessor in the stream has ended."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "PDL": pdl}
    if pdl:
        options["launch_pdl"] = True
    return options


class Workspace:
    """Scratch memory for kernels whose programs share one result: fp32 partial results, and counters of arrived programs.

    Allocated once, before any CUDA graph is captured, and passed to the kernels of one stream, which run one after the other.
    Each kernel leaves the counters at zero.

    invariant: whether kernels add in an order that does not depend on the number of rows (`SumOrder.invariant`).
    """

    def __init__(
        self, device: torch.device | str, num_floats: int = MOST_SUMS, num_counters: int = 1 << 14, *, invariant: bool = False
    ) -> None:
        self.invariant = invariant
        self._sums = torch.empty(num_floats, dtype=torch.float32, device=device)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
        self._stats = dict[int, Tensor]()  # views of `_sums`, by offset: to make one takes long, and layers need the same

    def reserve(self, num_floats: int) -> None:
        """Make room for `num_floats` values. Call it before CUDA graphs are captured: they keep the buffer's address."""
        if self._sums.numel() < num_floats:
            self._sums, self._stats = self._sums.new_empty(num_floats), {}

    def sums(self, need: int) -> Tensor:
        """The fp32 buffer; InputError if it holds less than `need` values."""
        return _large_enough(self._sums, need, "num_floats")

    def sums_and_stats(self, num_sums: int, num_stats: int) -> tuple[Tensor, Tensor]:
        """`sums`, and its view for `num_stats` values after the first `num_sums`."""
        sums = self.sums(num_sums + num_stats)
        if num_sums not in self._stats:
            self._stats[num_sums] = sums[num_sums:]
        return sums, self._stats[num_sums]

    def counters(self, need: int) -> Tensor:
        """The int32 counters, all zero between kernels; InputError if there are fewer than `need`."""
        return _large_enough(self._counters, need, "num_counters")


def _large_enough(buffer: Tensor, need: int, name: str) -> Tensor:
    if buffer.numel() < need:
        raise InputError("too small", where=f"Workspace.{name}", expected=f"at least {need}", found=buffer.numel())
    return buffer


def registers(num_warps: int, programs: int) -> int | None:
    """The most registers of a thread with which `programs` programs fit on an SM; None if that is no limit."""
    most = most_registers(32 * num_warps * programs)
    return most if most < 255 else None


def even_parts(steps: int, most: int) -> int:
    """Number of parts into which steps in K are split: `most`, or fewer if one would be empty. All but the last are equal."""
    return cdiv(steps, cdiv(steps, most))
