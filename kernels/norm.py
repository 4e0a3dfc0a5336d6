"""RMSNorm (Zhang & Sennrich 2019) as a separate kernel, before the linear layers of two or more tokens.

Before a linear layer with fp8 weights, it also quantizes its output to e4m3, with a scale for each row or for each row and 128
columns. `@prepared` makes launches fast (`prepared.py`); with PDL, the kernel starts while the one before it ends (`pdl.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import launch_options, next_power_of_2, require_fp8
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared
from minirt.kernels.quantize import quantize_groups, quantized_buffers
from minirt.kernels.reference import FP8_BLOCK

CASES = [{"T": 1, "H": 16}, {"T": 3, "H": 97}, {"T": 17, "H": 576}, {"T": 129, "H": 1536}, {"T": 2, "H": 5120}]


class Branch(NamedTuple):
    """What is added to a norm's input, both after norms: `other` [T, H], and the weights [H] of the input's norm and its own."""

    weight: Tensor
    other: Tensor
    other_weight: Tensor


@triton.jit
def normalize(x, weight, H, eps):
    """RMSNorm of a row of H elements, 0 behind them. weight: may be None."""
    wide = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    # Round the normalized value to the activation dtype before it is multiplied by the weight, as transformers does.
    y = (wide * inverse_rms).to(x.dtype)
    if weight is not None:
        y *= weight
    return y


@prepared
@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, branch, residual_ptr, factor_ptr, out_ptr, scale_ptr, H, eps, BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one row of out [T, H], quantized if `scale_ptr` is given: with a scale [T] or, if GROUP, [T, ⌈H / GROUP⌉].

    A residual [T, H], if it is given, is added to the result, and the sum multiplied by a factor [1], if it is given. Before
    that, `branch` is added to x, if it is given.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    weight = weight_ptr
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + h, mask=inside, other=0.0)
    if branch is not None:
        branch_weight = tl.load(branch.weight + h, mask=inside, other=0.0)
        other_weight = tl.load(branch.other_weight + h, mask=inside, other=0.0)
    if PDL:
        wait_for_input(EARLY)
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0)
    if branch is not None:
        other = normalize(tl.load(branch.other + t * H + h, mask=inside, other=0.0), other_weight, H, eps)
        x = (normalize(x, branch_weight, H, eps).to(tl.float32) + other.to(tl.float32)).to(x.dtype)
    y = normalize(x, weight, H, eps)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + t * H + h, mask=inside, other=0.0)
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    if factor_ptr is not None:
        y = (y.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(x.dtype)
    if GROUP is not None:
        groups = (H + GROUP - 1) // GROUP
        y = quantize_groups(y, scale_ptr + t * groups, 0, groups, GROUP)
    elif scale_ptr is not None:
        y = y.to(tl.float32)
        scale = fp8_scale(tl.max(finite_magnitude(y), 0))
        tl.store(scale_ptr + t, scale)
        y = to_fp8(y, scale).to(tl.float8e4nv, bitcast=True)
    tl.store(out_ptr + t * H + h, y, mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None, *, early: bool = False, pdl: bool = False,
    check: bool = True,
) -> Tensor:  # fmt: skip
    """Rows of `x` [T, H] divided by their root mean square, times `weight` [H] → [T, H]. `out` may be `x`.

    With `pdl`, the kernel overlaps with the kernel before it in the stream (sm_90 and later). With `early` as well, the next
    kernel may start before this one has its input. Without `check`, `weight` may be None: nothing is multiplied.
    """
    if check:
        check_arguments("rms_norm", x=x, weight=weight, out=out)
    out = torch.empty_like(x) if out is None else out
    _launch(x, weight, eps, out, None, None, None, False, early, pdl)
    return out


def norm_residual(
    y: Tensor, weight: Tensor, eps: float, residual: Tensor, out: Tensor | None = None, *, factor: Tensor | None = None,
    branch: Branch | None = None, early: bool = False, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """factor · (residual + rms_norm(y, weight, eps)), all [T, H]: a norm after a layer, before its residual is added (Gemma).

    factor: [1] of y's dtype, None: 1. The sum is rounded before. `branch`: rms_norm(y, branch.weight) + rms_norm(branch.other,
    branch.other_weight), rounded, takes y's place. `out` may be `y` or `residual`. `early` and `pdl`: as for `rms_norm`.
    """
    if check:
        check_arguments("norm_residual", y=y, weight=weight, residual=residual, out=out)
    out = torch.empty_like(y) if out is None else out
    _launch(y, weight, eps, out, residual, factor, None, False, early, pdl, branch)
    return out


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, scale: Tensor | None = None, *,
    blocks: bool = False, early: bool = False, pdl: bool = False, check: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`quantize(rms_norm(x, weight, eps))` in one kernel: x [T, H] → values [T, H] e4m3 and scale [T] fp32.

    With `blocks`, the scale is [T, ⌈H / 128⌉], as that of `quantize`.
    """
    if check:
        check_arguments("rms_norm_quantize", x=x, weight=weight, out=out)
    require_fp8(x.device)
    out, scale = quantized_buffers(x, out, scale, check, blocks)
    _launch(x, weight, eps, out, None, None, scale, blocks, early, pdl)
    return out, scale


def _launch(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, residual: Tensor | None, factor: Tensor | None,
    scale: Tensor | None, blocks: bool, early: bool, pdl: bool, branch: Branch | None = None,
) -> None:  # fmt: skip
    T, H = x.shape
    if T:
        group = FP8_BLOCK if blocks else None
        block = max(group or 1, next_power_of_2(H))
        options = launch_options(min(16, max(1, block // 512)), 1, pdl)
        _rms_norm_kernel[(T,)](
            x, weight, branch, residual, factor, out, scale, H, eps, BLOCK_H=block, GROUP=group, EARLY=early, **options
        )


def cost(T: int, H: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of `rms_norm`."""
    return (2 * T * H + H) * itemsize, 4 * T * H


def residual_cost(T: int, H: int, itemsize: int) -> tuple[int, int]:
    """`cost` of `norm_residual`."""
    return (3 * T * H + H) * itemsize, 5 * T * H


def quantized_cost(T: int, H: int, itemsize: int) -> tuple[int, int]:
    """`cost` of `rms_norm_quantize`."""
    return (T * H + H) * itemsize + T * H, 4 * T * H
