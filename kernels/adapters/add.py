"""`add_adapters`: scaling · B · A · rms_norm(x) of each row's adapter, added to the output of a linear, by two kernels.

The first one shrinks: it multiplies x by the norm's weight and by A, for a tile of rows, 16 ranks and a part of K. The root mean
square divides the finished sums, so it reads the raw residual stream, and sums its squares beside. The second one expands: it
adds the parts in their order and multiplies them by B. Both compute in fp32, with operands of 16 bits rounded to TF32.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterWeights, Groups
from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import cdiv, launch_options
from minirt.kernels.linear.epilogue import activate
from minirt.kernels.linear.product import Expansion
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared

CASES = [{"T": 1, "N": 96, "K": 576}, {"T": 7, "N": 131, "K": 97}, {"T": 37, "N": 40, "K": 1100}]

_SPAN = 512  # columns of x that a program takes, in steps with tiles of 16 rows
_MANY_SPAN, _LARGE_SPAN = 1024, 4096  # in others; with ranks above `_SMALL_RANK`, for which the sums of parts would be large
_SMALL_RANK = 64


@compile_time
class _Constants(NamedTuple):
    """What both kernels compile in. P, R: modules and most ranks. PARTS, SPAN: of K. PRECISION: of the products."""

    P: int
    R: int
    PARTS: int
    BLOCK_T: int
    BLOCK_R: int
    BLOCK_K: int
    BLOCK_N: int
    SPAN: int
    FEW: bool
    PRECISION: str
    ACTIVATION: str | None


@triton.jit
def _tile(ptrs, k, rows, K):
    """Columns k of rows, in fp32."""
    return tl.load(ptrs + k[None, :], mask=rows[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _normed(x, squares, norm_ptr, k, K):
    """x times the norm's weight, and the squares of x added to those before."""
    if norm_ptr is not None:
        squares += tl.sum(x * x, 1)
        x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return x, squares


@prepared
@triton.jit(do_not_specialize=["T", "rank_stride"])
def _shrink_kernel(x_ptr, norm_ptr, w, order_ptr, tiles_ptr, y_ptr, squares_ptr, K, T, x_stride, rank_stride, C,
                   PDL: tl.constexpr):  # fmt: skip
    """One tile of rows, 16 ranks of one module, and a part of K. With few rows, A is read before the wait."""
    BLOCKS: tl.constexpr = C.R // C.BLOCK_R
    STEPS: tl.constexpr = C.SPAN // C.BLOCK_K
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    module, block, part = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS, tl.program_id(2)
    adapter, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    rank = tl.load(w.ranks + adapter * rank_stride + module, mask=adapter >= 0, other=0)
    rank = tl.where(count > 0, rank, 0)
    i, r = tl.arange(0, C.BLOCK_T), block * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    row = tl.load(order_ptr + first + i, mask=i < count, other=0).to(tl.int64)
    a_ptrs = w.a + ((adapter * C.P + module).to(tl.int64) * C.R + r[:, None]) * K
    x_ptrs = x_ptr + row[:, None] * x_stride
    start = part * C.SPAN
    sums = tl.zeros((C.BLOCK_T, C.BLOCK_R), tl.float32)
    squares = tl.zeros((C.BLOCK_T,), tl.float32)
    ahead = ()
    if C.FEW:
        for step in tl.static_range(STEPS):
            ahead += (_tile(a_ptrs, start + step * C.BLOCK_K + tl.arange(0, C.BLOCK_K), r < rank, K),)  # type: ignore[assignment]
    if PDL:
        wait_for_input(False)
    if block * C.BLOCK_R < rank:
        if C.FEW:
            for step in tl.static_range(STEPS):
                k = start + step * C.BLOCK_K + tl.arange(0, C.BLOCK_K)
                x, squares = _normed(_tile(x_ptrs, k, i < count, K), squares, norm_ptr, k, K)
                sums = tl.dot(x, tl.trans(ahead[step]), sums, input_precision=C.PRECISION)
        else:
            for at in range(start, tl.minimum(start + C.SPAN, K), C.BLOCK_K):
                k = at + tl.arange(0, C.BLOCK_K)
                x, squares = _normed(_tile(x_ptrs, k, i < count, K), squares, norm_ptr, k, K)
                sums = tl.dot(x, tl.trans(_tile(a_ptrs, k, r < rank, K)), sums, input_precision=C.PRECISION)
        place = part.to(tl.int64) * T + row
        tl.store(y_ptr + (place[:, None] * C.P + module) * C.R + r[None, :], sums, mask=(i < count)[:, None])
        if norm_ptr is not None:  # at compile time
            tl.store(squares_ptr + place * C.P + module, squares, mask=i < tl.where(block == 0, count, 0))


@triton.jit
def _rows_of_b(w, adapter, n, inside, r, rank, N, C):
    """Ranks r of rows n of an adapter's B, in fp32."""
    ptrs = w.b + (adapter.to(tl.int64) * N + n[:, None]) * C.R + r[None, :]
    return tl.load(ptrs, mask=inside[:, None] & (r < rank)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _delta(w, y_ptr, squares_ptr, b, adapter, module, rank, factor, row, valid, n, inside, N, K, T, eps, C):
    """scaling · B · A · rms_norm(x) of a tile of rows, for rows n of the linear's weight. `b`: its first 16 ranks."""
    sums = tl.zeros((C.BLOCK_T, C.BLOCK_N), tl.float32)
    factors = tl.zeros((C.BLOCK_T,), tl.float32) + factor
    if squares_ptr is not None:
        squares = tl.zeros((C.BLOCK_T,), tl.float32)
        for part in tl.static_range(C.PARTS):
            squares += tl.load(squares_ptr + (part * T + row) * C.P + module, mask=valid, other=0.0)
        factors *= tl.rsqrt(tl.where(rank > 0, squares, 0.0) / K + eps)
    for start in range(0, rank, C.BLOCK_R):
        r = start + tl.arange(0, C.BLOCK_R)
        y = tl.zeros((C.BLOCK_T, C.BLOCK_R), tl.float32)
        for part in tl.static_range(C.PARTS):
            ptrs = y_ptr + ((part * T + row)[:, None] * C.P + module) * C.R + r[None, :]
            y += tl.load(ptrs, mask=valid[:, None], other=0.0)
        y = tl.where((r < rank)[None, :], y * factors[:, None], 0.0)
        sums = tl.dot(y, tl.trans(b), sums, input_precision=C.PRECISION)
        b = _rows_of_b(w, adapter, n, inside, r + C.BLOCK_R, rank, N, C)
    return sums


@prepared
@triton.jit(do_not_specialize=["T", "rank_stride"])
def _expand_kernel(w, order_ptr, tiles_ptr, y_ptr, squares_ptr, base_ptr, out_ptr, N, K, T, base_stride, rank_stride, eps, C,
                   PDL: tl.constexpr):  # fmt: skip
    """One tile of rows, and a tile of the rows of B, whose first ranks are read before the wait."""
    GATED: tl.constexpr = C.ACTIVATION is not None
    tile_ptr, part_ptr = tiles_ptr + tl.program_id(0) * 3, w.tiles + tl.program_id(1) * 4
    n, end, module = tl.load(part_ptr) + tl.arange(0, C.BLOCK_N), tl.load(part_ptr + 1), tl.load(part_ptr + 2)
    adapter, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    i, r, inside, half = tl.arange(0, C.BLOCK_T), tl.arange(0, C.BLOCK_R), n < end, N // 2
    factor_at, known = adapter * rank_stride + module, adapter >= 0
    rank, factor = tl.load(w.ranks + factor_at, mask=known, other=0), tl.load(w.scales + factor_at, mask=known, other=0.0)
    row = tl.load(order_ptr + first + i, mask=i < count, other=0).to(tl.int64)
    b = _rows_of_b(w, adapter, n, inside, r, rank, N, C)
    if GATED:
        up = tl.load(part_ptr + 3)
        up_at = adapter * rank_stride + up
        up_rank, up_factor = tl.load(w.ranks + up_at, mask=known, other=0), tl.load(w.scales + up_at, mask=known, other=0.0)
        up_b = _rows_of_b(w, adapter, half + n, inside, r, up_rank, N, C)
    if PDL:
        wait_for_input(False)
    if (count > 0) & (known | GATED):
        valid = i < count
        stored = valid[:, None] & inside[None, :]
        base_ptrs = base_ptr + row[:, None] * base_stride + n[None, :]
        dtype = out_ptr.dtype.element_ty
        sums = tl.load(base_ptrs, mask=stored, other=0.0).to(tl.float32)
        if GATED:
            ups = tl.load(base_ptrs + half, mask=stored, other=0.0).to(tl.float32)
            ups += _delta(w, y_ptr, squares_ptr, up_b, adapter, up, up_rank, up_factor, row, valid, half + n, inside, N, K, T,
                          eps, C)  # fmt: skip
        sums += _delta(w, y_ptr, squares_ptr, b, adapter, module, rank, factor, row, valid, n, inside, N, K, T, eps, C)
        if GATED:
            result = activate(sums, C.ACTIVATION) * ups
            tl.store(out_ptr + row[:, None] * half + n[None, :], result.to(dtype), mask=stored)
        else:
            tl.store(base_ptrs, sums.to(dtype), mask=stored)


@lru_cache(1024)
def _constants(P: int, R: int, K: int, block: int, itemsize: int, activation: str | None) -> _Constants:
    few, precision = block == 16, "ieee" if itemsize == 4 else "tf32"
    span = _SPAN if few else _MANY_SPAN if R <= _SMALL_RANK else _LARGE_SPAN
    return _Constants(P, R, cdiv(K, span), block, 16, 256 if few else 64, 64, span, few, precision, activation)


def add_adapters(
    x: Tensor, weights: AdapterWeights, groups: Groups, out: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0,
    activation: str | None = None, *, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """`reference.add_adapters`: x [T, K] with any row stride, as `out` [T, N], to which rows with an adapter are added.

    Returns `out`, or with an activation a new tensor [T, N / 2].
    """
    if check:
        fields = {f"weights.{name}": tensor for name, tensor in weights._asdict().items()} | {"groups.order": groups.order}
        check_arguments("add_adapters", x=x, out=out, norm_weight=norm_weight, **fields)
    T, N = len(x), out.shape[1]
    result = out if activation is None else out.new_empty(T, N // 2)
    if T:
        C, y, squares = _shrink(x, weights, groups, norm_weight, activation, pdl)
        grid = len(groups.tiles), len(weights.tiles) // (1 if activation is None else 2)
        _expand_kernel[grid](
            weights, groups.order, groups.tiles, y, squares, out, result, N, x.shape[1], T, out.stride(0),
            weights.ranks.stride(0), eps, C, **launch_options(4, 1, pdl),
        )  # fmt: skip
    return result


def expansion(
    x: Tensor, weights: AdapterWeights, groups: Groups, norm_weight: Tensor | None = None, *, pdl: bool = False
) -> Expansion:
    """The first half of `add_adapters` for one token; the product of the linear does the rest. Unchecked."""
    y = _shrink(x, weights, groups, norm_weight, None, pdl)[1]
    b, scales, ranks, stride = weights.b, weights.scales, weights.ranks, weights.ranks.stride(0)
    return Expansion(b, y, scales, ranks, weights.modules, groups.tiles, stride)


def _shrink(
    x: Tensor, weights: AdapterWeights, groups: Groups, norm_weight: Tensor | None, activation: str | None, pdl: bool
) -> tuple[_Constants, Tensor, Tensor | None]:
    (T, K), (_, P, R, _) = x.shape, weights.a.shape
    C = _constants(P, R, K, groups.block, x.element_size(), activation)
    y = torch.empty(C.PARTS, T, P, R, dtype=torch.float32, device=x.device)
    squares = None if norm_weight is None else torch.empty(C.PARTS, T, P, dtype=torch.float32, device=x.device)
    _shrink_kernel[(len(groups.tiles), P * (R // C.BLOCK_R), C.PARTS)](
        x, norm_weight, weights, groups.order, groups.tiles, y, squares, K, T, x.stride(0), weights.ranks.stride(0), C,
        **launch_options(4, 1, pdl),
    )  # fmt: skip
    return C, y, squares
