"""Quantizes activations to FP8 before linear layers with FP8 weights.

Values are e4m3, with an fp32 scale for each row or, before weights with a scale for each block, for each row and 128 columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments, check_tensor
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import cdiv, launch_options, next_power_of_2, require_fp8, sm_count, token_block
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared
from minirt.kernels.reference import FP8_BLOCK
from minirt.kernels.regimes import Limits, Regime

CASES = [{"T": 1, "K": 16}, {"T": 3, "K": 97}, {"T": 17, "K": 576}, {"T": 129, "K": 1536}, {"T": 2, "K": 29568}]

_BLOCK = 4096  # values in one load
_SHORT, _ROWS = 1024, 8  # programs quantize `_ROWS` rows each if rows have at most `_SHORT` columns
_GROUPS = 8  # of 128 columns, which one program quantizes


# The number of programs for a row depends on `token_block`, so that few variants are compiled.
REGIMES = (Regime("quantize", "tokens", 1, variant=token_block, limits=Limits(("fp16", "fp32"))),)


@prepared
@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize one of PARTS parts of a row. Each program reads the whole row to find the scale, and writes one part."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    x_ptr += t * K
    out_ptr += t * K
    if PDL:
        wait_for_input(EARLY)
    row = ()  # all loads before the first use
    for i in tl.static_range(BLOCKS):
        row += (tl.load(x_ptr + i * BLOCK_K + k, mask=i * BLOCK_K + k < K, other=0.0),)
    highest = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(BLOCKS):
        highest = tl.maximum(highest, finite_magnitude(row[i]))
    scale = fp8_scale(tl.max(highest, 0))
    for i in tl.static_range((BLOCKS + PARTS - 1) // PARTS):
        at = (i * PARTS + part) * BLOCK_K + k
        x = row[i] if PARTS == 1 else tl.load(x_ptr + at, mask=at < K, other=0.0)  # the second load hits L1
        tl.store(out_ptr + at, to_fp8(x, scale).to(tl.float8e4nv, bitcast=True), mask=at < K)
    if part == 0:
        tl.store(scale_ptr + t, scale)


@prepared
@triton.jit(do_not_specialize=["T"])
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, T, K, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Quantize BLOCK_T short rows."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside = (t < T)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    if PDL:
        wait_for_input(EARLY)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    scale = fp8_scale(tl.max(finite_magnitude(x), 1))
    tl.store(out_ptr + at, to_fp8(x, scale[:, None]).to(tl.float8e4nv, bitcast=True), mask=inside)
    tl.store(scale_ptr + t, scale, mask=t < T)


@triton.jit
def group_scales(x, GROUP: tl.constexpr):
    """x [n · GROUP] as [n, GROUP], and the scale of each group [n]."""
    x = tl.reshape(x, [x.shape[0] // GROUP, GROUP])
    return x, fp8_scale(tl.max(finite_magnitude(x), 1))


@triton.jit
def quantize_groups(x, scale_ptr, first, groups, GROUP: tl.constexpr):
    """Quantize x [n · GROUP] of a row, from group `first` of `groups` on. Returns e4m3 values, stores the scales."""
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    x, scale = group_scales(x, GROUP)
    group = first + tl.arange(0, GROUPS)
    tl.store(scale_ptr + group, scale, mask=group < groups)
    return tl.reshape(to_fp8(x, scale[:, None]).to(tl.float8e4nv, bitcast=True), [GROUPS * GROUP])


@prepared
@triton.jit
def _quantize_groups_kernel(
    x_ptr, out_ptr, scale_ptr, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Quantize GROUPS groups of a row."""
    ALL: tl.constexpr = (K + GROUP - 1) // GROUP
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    if PDL:
        wait_for_input(EARLY)
    x = tl.load(x_ptr + t * K + k, mask=k < K, other=0.0)
    y = quantize_groups(x, scale_ptr + t * ALL, tl.program_id(1) * GROUPS, ALL, GROUP)
    tl.store(out_ptr + t * K + k, y, mask=k < K)


def quantized_buffers(
    x: Tensor, out: Tensor | None, scale: Tensor | None, check: bool, blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """The outputs for x [T, K], allocated unless given: values [T, K] e4m3 and scales [T] or, with `blocks`, [T, ⌈K / 128⌉]."""
    T, K = x.shape
    shape = (T, cdiv(K, FP8_BLOCK)) if blocks else (T,)
    if out is None:
        out = x.new_empty(T, K, dtype=torch.float8_e4m3fn)
    if scale is None:
        scale = x.new_empty(*shape, dtype=torch.float32)
    elif check:
        check_tensor("scale", scale, shape, torch.float32, x.device)
    return out, scale


def quantize(
    x: Tensor, out: Tensor | None = None, scale: Tensor | None = None, *, blocks: bool = False, early: bool = False,
    pdl: bool = False, check: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [T, K] → values [T, K] e4m3 and scale [T] fp32, so that values · scale ≈ x (compute capability 8.9 and later).

    The scale maps a row's largest finite magnitude to 448. It is 1 for a row of zeros. NaN and infinities become NaN. With
    `blocks`, each 128 columns of a row have a scale, and `scale` is [T, ⌈K / 128⌉]. `out`, `scale`: optional output tensors.
    `early`, `pdl`: as for `rms_norm`.
    """
    if check:
        check_arguments("quantize", x=x, out=out)
    require_fp8(x.device)
    out, scale = quantized_buffers(x, out, scale, check, blocks)
    T, K = x.shape
    if T and K and blocks:
        groups = min(_GROUPS, next_power_of_2(scale.shape[1]))
        options = launch_options(max(1, groups // 2), 1, pdl)
        grid = (T, cdiv(scale.shape[1], groups))
        _quantize_groups_kernel[grid](x, out, scale, K=K, GROUP=FP8_BLOCK, GROUPS=groups, EARLY=early, **options)
    elif T and 0 < K <= _SHORT:
        options = launch_options(_ROWS // 2, 1, pdl)
        _quantize_rows_kernel[(cdiv(T, _ROWS),)](
            x, out, scale, T, K, BLOCK_T=_ROWS, BLOCK_K=next_power_of_2(K), EARLY=early, **options
        )
    elif T and K:
        block = min(_BLOCK, next_power_of_2(K))
        # With few tokens, there are enough SMs for several programs per row.
        parts = max(1, min(cdiv(K, block), sm_count(x.device) // token_block(T)))
        options = launch_options(max(1, block // 256), 1, pdl)
        _quantize_kernel[(T, parts)](x, out, scale, K=K, BLOCK_K=block, PARTS=parts, EARLY=early, **options)
    return out, scale


def cost(T: int, K: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return T * (K * (itemsize + 1) + 4), 4 * T * K
