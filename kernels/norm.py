"""RMSNorm (Zhang & Sennrich 2019) as a kernel of its own, before the linear layers of two or more tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.common import check_activations, check_tensor, launch_options

CASES = [
    {"T": 1, "H": 16},
    {"T": 3, "H": 97},
    {"T": 17, "H": 576},
    {"T": 129, "H": 1536},
    {"T": 2, "H": 5120},
]


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, H, eps, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    weight = tl.load(weight_ptr + h, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before: the next kernel's programs would crowd on the processors that the kernel before leaves first.
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    # Normalized value to the activation dtype first, then the weight: the rounding order of Hugging Face.
    tl.store(out_ptr + t * H + h, (wide * scale).to(x.dtype) * weight, mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, pdl: bool = False, check: bool = True
) -> Tensor:
    """Rows of `x` [T, H] divided by their root mean square, times `weight` [H] → [T, H]. `out` may be `x`.

    `pdl`: overlap with the kernel before it in the stream (sm_90 and later).
    """
    if check:
        check_activations("x", x)
        check_tensor("weight", weight, (x.shape[1],), x.dtype, x.device)
    T, H = x.shape
    if out is None:
        out = torch.empty_like(x)
    elif check:
        check_tensor("out", out, (T, H), x.dtype, x.device)
    if T:
        block = triton.next_power_of_2(H)
        options = launch_options(min(16, max(1, block // 512)), 1, pdl)
        _rms_norm_kernel[(T,)](x, weight, out, H, eps, BLOCK_H=block, **options)
    return out


def cost(T: int, H: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return (2 * T * H + H) * itemsize, 4 * T * H
