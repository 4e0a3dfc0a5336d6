"""Measured memory bandwidth and matrix-product rate of a device, and the memory bandwidth in the GPU's datasheet."""

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from minirt.bench.measure import gpu_seconds, host_seconds
from minirt.device import free_memory, on_device
from minirt.errors import OutOfMemoryError
from minirt.sizes import format_size

BUFFER_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # much larger than the caches
REPEATS = 20

# Bytes per second from NVIDIA's datasheets, by the name that the driver reports.
DATASHEET = {
    "NVIDIA B200": 8.0e12, "NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 NVL": 3.9e12,
    "NVIDIA H100 PCIe": 2.0e12, "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA A100 80GB PCIe": 1.935e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12, "NVIDIA A100-PCIE-40GB": 1.555e12, "NVIDIA L40S": 0.864e12, "NVIDIA L4": 0.3e12,
    "NVIDIA GeForce RTX 5090": 1.792e12, "NVIDIA GeForce RTX 4090": 1.008e12, "NVIDIA GeForce RTX 3090": 0.936e12,
}  # fmt: skip


@dataclass(frozen=True)
class Ceiling:
    """Bytes per second of a kernel that only reads memory, and how this was measured."""

    bytes_per_s: float
    how: str


@dataclass(frozen=True)
class MatmulCeiling:
    """Floating-point operations per second of a large matrix product, and how this was measured."""

    flops_per_s: float
    how: str


def device_name(device: torch.device) -> str:
    """Return the name of the GPU as the driver reports it, or the model of the CPU if the system reports one."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"CPU {named or platform.processor() or platform.machine()}"


def datasheet_bandwidth(device: torch.device) -> float | None:
    """Return the datasheet's bytes per second; None for a CPU, a partitioned GPU (MIG), or a GPU missing from `DATASHEET`."""
    return DATASHEET.get(device_name(device)) if device.type == "cuda" else None


def read_ceiling(device: torch.device, nbytes: int | None = None, repeats: int = REPEATS) -> Ceiling:
    """Measure memory bandwidth: the median speed of summing a buffer, with a Triton kernel on a GPU and torch.sum on a CPU.

    Args:
        nbytes: size of the buffer; None: BUFFER_BYTES.
    Raises:
        OutOfMemoryError: the buffers do not fit in memory.
    """
    size = nbytes or BUFFER_BYTES[device.type]
    if (free := free_memory(device)) < 2 * size:
        what, shown = "buffers to measure the memory bandwidth need more memory than is free", f"{format_size(free)} free"
        expected = format_size(2 * size, up=True)
        raise OutOfMemoryError(what, where=str(device), expected=expected, found=shown, hint="free some memory")

    def prepare() -> Callable[[], object]:
        if device.type == "cuda":
            from minirt.kernels.bandwidth import read_sums

            halves = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
            return partial(read_sums, halves, read_sums(halves), check=False)
        values = torch.rand(1 << 18).repeat(size >> 20)
        return lambda: values.sum().item()

    seconds = _seconds(prepare, device, repeats)
    how = "Triton kernel that only reads" if device.type == "cuda" else f"torch.sum, {torch.get_num_threads()} threads"
    return Ceiling(size / statistics.median(seconds), f"{how}, over {size / 1e9:.2f} GB, median of {repeats}")


def _seconds(prepare: Callable[[], Callable[[], object]], device: torch.device, repeats: int) -> list[float]:
    """The seconds of `repeats` runs of what `prepare` returns, after three that are not counted.

    Its memory is freed: cached memory would count as used when the KV cache is sized.
    """
    cuda = device.type == "cuda"
    with on_device(device):
        run, clock = prepare(), gpu_seconds if cuda else host_seconds
        seconds = [clock(run) for _ in range(repeats + 3)][3:]
    del run
    if cuda:
        torch.cuda.empty_cache()
    return seconds


def matmul_ceiling(device: torch.device, dtype: torch.dtype, repeats: int = REPEATS) -> MatmulCeiling:
    """Measure the median rate of PyTorch's product of two square matrices of normal values.

    Products of float8_e4m3fn have a scale for each row and column and use the library's most precise accumulation.
    """
    n = 8192 if device.type == "cuda" else 1024

    def prepare() -> Callable[[], object]:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        if dtype != torch.float8_e4m3fn:
            return partial(torch.mm, a, b.t())
        ones = torch.ones(n, 1, device=device)
        return partial(torch._scaled_mm, a, b.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=False)

    seconds = _seconds(prepare, device, repeats)
    how = f"PyTorch's product of two {str(dtype).removeprefix('torch.')} matrices of {n} × {n}, median of {repeats}"
    return MatmulCeiling(2 * n**3 / statistics.median(seconds), how)
