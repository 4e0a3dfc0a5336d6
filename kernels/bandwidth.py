"""A kernel that only reads and sums a buffer, to measure a GPU's memory bandwidth: the ceiling of a decode step.

A decode step only reads its weights. A copy, the usual benchmark of memory bandwidth, also writes and reaches less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_activations, check_tensor
from minirt.kernels.launch import cdiv
from minirt.kernels.prepared import prepared

CASES = [{"n": 1}, {"n": 65_537}, {"n": 131_072}, {"n": 200_003}]
_BLOCK_BYTES = 16_384  # per load: 64 bytes a thread, four vector loads in flight
_ITERATIONS = 8  # loads per program


@prepared
@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):
    pid = tl.program_id(0)
    start = pid.to(tl.int64) * (BLOCK * ITERATIONS)  # int64: a buffer of more than 4 GiB has over 2³¹ 16-bit numbers
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if start + BLOCK * ITERATIONS <= n:
        for i in range(ITERATIONS):
            total += tl.load(x_ptr + start + i * BLOCK + offsets).to(tl.float32)
    else:
        for i in range(ITERATIONS):
            at = start + i * BLOCK + offsets
            total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + pid, tl.sum(total, 0))


def chunk(itemsize: int) -> int:
    """Elements of `itemsize` bytes that one program reads."""
    return _BLOCK_BYTES // itemsize * _ITERATIONS


def read_sums(x: Tensor, out: Tensor | None = None, *, check: bool = True) -> Tensor:
    """The sum of each `chunk` of x [n] (bf16, fp16 or fp32) → [⌈n / chunk⌉] fp32.

    The sums keep the compiler from removing loads. To measure memory and not the L2 cache, use an x much larger than that cache.
    """
    if check:
        check_activations("x", x, 1)
    n, size = x.shape[0], chunk(x.element_size())
    programs = cdiv(n, size)
    if check and out is not None:
        check_tensor("out", out, (programs,), torch.float32, x.device)
    out = torch.empty(programs, dtype=torch.float32, device=x.device) if out is None else out
    if programs:
        _read_kernel[(programs,)](x, out, n, BLOCK=size // _ITERATIONS, ITERATIONS=_ITERATIONS, num_warps=8)
    return out


def reference(x: Tensor) -> Tensor:
    """What `read_sums` must compute."""
    return torch.stack([part.float().sum() for part in x.split(chunk(x.element_size()))]) if len(x) else x.float()


def cost(n: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return n * itemsize + 4 * cdiv(n, chunk(itemsize)), n
