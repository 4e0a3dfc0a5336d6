"""`add_adapters`: scaling · B · A · rms_norm(x) of each row's adapter, added to the output of a linear, by one kernel.

Its first programs shrink: they multiply x by the norm's weight and by A, for a tile of rows, some ranks and a part of K. The root
mean square divides the finished sums, so they read the raw residual stream, and sum its squares beside. The others expand: they
read B, wait for the first ones, add the parts in their order and multiply them by B. All compute in fp32, with operands of 16
bits rounded to TF32.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import TILE_N, AdapterWeights, Groups
from minirt.kernels.arrival import arrive, wait_for_arrivals
from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import cdiv, launch_options, next_power_of_2
from minirt.kernels.linear.epilogue import activate
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared

CASES = [{"T": 1, "N": 96, "K": 576}, {"T": 7, "N": 131, "K": 97}, {"T": 37, "N": 40, "K": 1100}]

_SPAN, _LONG_SPAN, _LONG = 512, 1024, 8192  # columns of x that a program takes, in steps with tiles of 16 rows; of longer rows
_MANY_SPAN, _LARGE_SPAN = 2048, 4096  # in others; with ranks above `_SMALL_RANK`, for which the sums of parts would be large
_SMALL_RANK = 64


@compile_time
class _Constants(NamedTuple):
    """What the kernel compiles in.

    Args:
        P, R: modules, and most ranks.
        BLOCK_N, PIECES: rows of B of a program, and programs of a tile of them.
        PARTS, SPAN: of K. BLOCKS: of BLOCK_R of the P · R rows of A. BLOCK_T: rows of x.
        FEW: whether A is read before the wait.
        PRECISION: of the products.
    """

    P: int
    R: int
    PARTS: int
    SPAN: int
    BLOCKS: int
    BLOCK_R: int
    BLOCK_T: int
    BLOCK_K: int
    BLOCK_N: int
    PIECES: int
    FEW: bool
    PRECISION: str
    ACTIVATION: str | None


@triton.jit
def _tile(ptrs, k, rows, K):
    """Columns k of rows."""
    return tl.load(ptrs + k[None, :], mask=rows[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _normed(x, squares, norm_ptr, k, K):
    """x times the norm's weight, and the squares of x added to those before."""
    if norm_ptr is not None:
        squares += tl.sum(x * x, 1)
        x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return x, squares


@triton.jit
def _shrink(x_ptr, norm_ptr, w, y_ptr, squares_ptr, adapter, job, row, valid, K, T, x_stride, rank_stride, C, PDL: tl.constexpr):
    """y of a tile of rows: some ranks, a part of K."""
    STEPS: tl.constexpr = C.SPAN // C.BLOCK_K
    block, part = job % C.BLOCKS, job // C.BLOCKS
    r = block * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    rank = tl.load(w.ranks + tl.maximum(adapter, 0) * rank_stride + r // C.R, mask=r < C.P * C.R, other=0)
    live = r % C.R < tl.where(adapter >= 0, rank, 0)
    a_ptrs = w.a + (adapter.to(tl.int64) * (C.P * C.R) + r[:, None]) * K
    x_ptrs = x_ptr + row[:, None] * x_stride
    start = part * C.SPAN
    sums = tl.zeros((C.BLOCK_T, C.BLOCK_R), tl.float32)
    squares = tl.zeros((C.BLOCK_T,), tl.float32)
    ahead = ()
    if C.FEW:
        for step in tl.static_range(STEPS):
            ahead += (_tile(a_ptrs, start + step * C.BLOCK_K + tl.arange(0, C.BLOCK_K), live, K),)  # type: ignore[assignment]
    if PDL:
        wait_for_input(False)
    if tl.max(live.to(tl.int32), 0) > 0:
        if C.FEW:
            for step in tl.static_range(STEPS):
                k = start + step * C.BLOCK_K + tl.arange(0, C.BLOCK_K)
                x, squares = _normed(_tile(x_ptrs, k, valid, K).to(tl.float32), squares, norm_ptr, k, K)
                sums = tl.dot(x, tl.trans(ahead[step].to(tl.float32)), sums, input_precision=C.PRECISION)
        else:
            for at in range(start, tl.minimum(start + C.SPAN, K), C.BLOCK_K):
                k = at + tl.arange(0, C.BLOCK_K)
                a = _tile(a_ptrs, k, live, K).to(tl.float32)
                x, squares = _normed(_tile(x_ptrs, k, valid, K).to(tl.float32), squares, norm_ptr, k, K)
                sums = tl.dot(x, tl.trans(a), sums, input_precision=C.PRECISION)
        place = part.to(tl.int64) * T + row
        inside = valid[:, None] & (r < C.P * C.R)[None, :]
        tl.store(y_ptr + place[:, None] * (C.P * C.R) + r[None, :], sums, mask=inside, cache_modifier=".cg")
        if norm_ptr is not None:  # at compile time
            tl.store(squares_ptr + place * C.BLOCKS + block, squares, mask=valid, cache_modifier=".cg")


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
            squares_ptrs = squares_ptr + (part * T + row) * C.BLOCKS + module * C.R // C.BLOCK_R
            squares += tl.load(squares_ptrs, mask=valid, other=0.0, cache_modifier=".cg")
        factors *= tl.rsqrt(tl.where(rank > 0, squares, 0.0) / K + eps)
    for start in range(0, rank, 16):
        r = start + tl.arange(0, 16)
        y = tl.zeros((C.BLOCK_T, 16), tl.float32)
        for part in tl.static_range(C.PARTS):
            ptrs = y_ptr + ((part * T + row)[:, None] * C.P + module) * C.R + r[None, :]
            y += tl.load(ptrs, mask=valid[:, None], other=0.0, cache_modifier=".cg")
        y = tl.where((r < rank)[None, :], y * factors[:, None], 0.0)
        sums = tl.dot(y, tl.trans(b), sums, input_precision=C.PRECISION)
        b = _rows_of_b(w, adapter, n, inside, r + 16, rank, N, C)
    return sums


@triton.jit
def _expand(w, y_ptr, squares_ptr, mark_ptr, base_ptr, out_ptr, adapter, job, row, valid, N, K, T, base_stride, rank_stride, eps,
            C, PDL: tl.constexpr):  # fmt: skip
    """A tile of rows, and a tile of the rows of B, whose first ranks are read before the wait."""
    GATED: tl.constexpr = C.ACTIVATION is not None
    part_ptr, start = w.tiles + job // C.PIECES * 4, job % C.PIECES * C.BLOCK_N
    n, end, module = tl.load(part_ptr) + start + tl.arange(0, C.BLOCK_N), tl.load(part_ptr + 1), tl.load(part_ptr + 2)
    r, inside, half = tl.arange(0, 16), n < end, N // 2
    factor_at, known = adapter * rank_stride + module, adapter >= 0
    rank, factor = tl.load(w.ranks + factor_at, mask=known, other=0), tl.load(w.scales + factor_at, mask=known, other=0.0)
    b = _rows_of_b(w, adapter, n, inside, r, rank, N, C)
    if GATED:
        up = tl.load(part_ptr + 3)
        up_at = adapter * rank_stride + up
        up_rank, up_factor = tl.load(w.ranks + up_at, mask=known, other=0), tl.load(w.scales + up_at, mask=known, other=0.0)
        up_b = _rows_of_b(w, adapter, half + n, inside, r, up_rank, N, C)
    if PDL:
        wait_for_input(False)
    if known | GATED:
        stored = valid[:, None] & inside[None, :]
        base_ptrs = base_ptr + row[:, None] * base_stride + n[None, :]
        dtype = out_ptr.dtype.element_ty
        sums = tl.load(base_ptrs, mask=stored, other=0.0).to(tl.float32)
        if GATED:
            ups = tl.load(base_ptrs + half, mask=stored, other=0.0).to(tl.float32)
        if known:  # noqa: SIM102  (`and` would evaluate both)
            if not wait_for_arrivals(mark_ptr, C.BLOCKS * C.PARTS):
                sums += float("nan")
        if GATED:
            ups += _delta(w, y_ptr, squares_ptr, up_b, adapter, up, up_rank, up_factor, row, valid, half + n, inside, N, K, T,
                          eps, C)  # fmt: skip
        sums += _delta(w, y_ptr, squares_ptr, b, adapter, module, rank, factor, row, valid, n, inside, N, K, T, eps, C)
        if GATED:
            result = activate(sums, C.ACTIVATION) * ups
            tl.store(out_ptr + row[:, None] * half + n[None, :], result.to(dtype), mask=stored)
        else:
            tl.store(base_ptrs, sums.to(dtype), mask=stored)


@prepared
@triton.jit(do_not_specialize=["T", "rank_stride"])
def _add_adapters_kernel(x_ptr, norm_ptr, w, order_ptr, tiles_ptr, y_ptr, squares_ptr, marks_ptr, base_ptr, out_ptr, N, K,
                         T, x_stride, base_stride, rank_stride, eps, C, PDL: tl.constexpr):  # fmt: skip
    """One tile of rows: a part of its y, or of its output. In the grid, all parts of y come first."""
    FIRST: tl.constexpr = C.BLOCKS * C.PARTS
    tile, job = tl.program_id(0), tl.program_id(1)
    tile_ptr = tiles_ptr + tile * 3
    adapter, first, count = tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
    i = tl.arange(0, C.BLOCK_T)
    valid = i < count
    row = tl.load(order_ptr + first + i, mask=valid, other=0).to(tl.int64)
    if count == 0:
        if PDL:
            wait_for_input(False)
    elif job < FIRST:
        _shrink(x_ptr, norm_ptr, w, y_ptr, squares_ptr, adapter, job, row, valid, K, T, x_stride, rank_stride, C, PDL)
        if adapter >= 0:
            arrive(marks_ptr + tile)
    else:
        _expand(w, y_ptr, squares_ptr, marks_ptr + tile, base_ptr, out_ptr, adapter, job - FIRST, row, valid, N, K, T,
                base_stride, rank_stride, eps, C, PDL)  # fmt: skip


@lru_cache(1024)
def _constants(P: int, R: int, K: int, block: int, itemsize: int, activation: str | None) -> _Constants:
    few, precision = block == 16, "ieee" if itemsize == 4 else "tf32"
    few_span = _SPAN if K <= _LONG else _LONG_SPAN
    span = few_span if few else _MANY_SPAN if R <= _SMALL_RANK else _LARGE_SPAN
    block_r = 16 if few else min(64, next_power_of_2(P * R))
    block_k, block_n = (256, TILE_N) if few else (64, 64)
    return _Constants(
        P, R, cdiv(K, span), span, cdiv(P * R, block_r), block_r, block, block_k, block_n, TILE_N // block_n, few, precision,
        activation,
    )  # fmt: skip


def _options(few: bool, pdl: bool) -> Mapping[str, Any]:
    """Two programs of many rows fit on an SM, so that enough of `out` is in flight."""
    return launch_options(8, 1, pdl) if few else {"maxnreg": 128, **launch_options(8, 3, pdl)}


def add_adapters(
    x: Tensor, weights: AdapterWeights, groups: Groups, out: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0,
    activation: str | None = None, *, marks: Tensor, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """`reference.add_adapters`: x [T, K] with any row stride, as `out` [T, N], to which rows with an adapter are added.

    `marks`: −1 for each tile of rows, int32; they are written. Returns `out`, or with an activation a new tensor [T, N / 2].
    """
    if check:
        fields = {f"weights.{name}": tensor for name, tensor in weights._asdict().items()} | {"groups.order": groups.order}
        check_arguments("add_adapters", x=x, out=out, norm_weight=norm_weight, **fields)
    (T, K), (_, P, R, _), N, tiles = x.shape, weights.a.shape, out.shape[1], len(groups.tiles)
    result = out if activation is None else out.new_empty(T, N // 2)
    if T:
        C = _constants(P, R, K, groups.block, x.element_size(), activation)
        y = torch.empty(C.PARTS, T, P * R, dtype=torch.float32, device=x.device)
        squares = None if norm_weight is None else torch.empty(C.PARTS, T, C.BLOCKS, dtype=torch.float32, device=x.device)
        jobs = C.BLOCKS * C.PARTS + len(weights.tiles) // (1 if activation is None else 2) * C.PIECES
        _add_adapters_kernel[tiles, jobs](
            x, norm_weight, weights, groups.order, groups.tiles, y, squares, marks, out, result, N, K, T,
            x.stride(0), out.stride(0), weights.ranks.stride(0), eps, C, **_options(C.FEW, pdl),
        )  # fmt: skip
    return result
