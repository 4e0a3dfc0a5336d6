"""`low_rank`: y = scaling · A · rms_norm(x) of each row's adapter, which the product of a linear takes beside x.

It multiplies x by the norm's weight and by A. The root mean square divides the finished sums, so it reads the raw residual
stream, and needs no kernel before it. Products are in fp32, with operands of 16 bits rounded to TF32: x times the norm's weight
may exceed fp16. With a few rows, a program computes one value; with more, a tile of rows by a block of columns, for a part of K.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.launch import Workspace, cdiv, even_parts, launch_options
from minirt.kernels.linear.epilogue import add_parts, touch
from minirt.kernels.linear.product import LOW_RANK_BLOCK, LowRank
from minirt.kernels.prepared import compile_time, prepared

_FEW = 8  # rows
_LONG = 8192  # columns of x, from which a value takes eight warps
_STEPS = 256  # rows up to which a program has 16 columns
_PROGRAMS = 160  # that a split of K should give
_SHORTEST = 256  # columns of x of a part


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        P, R: modules, and most ranks. PLACES: of adapters.
        BLOCK: columns of a step. BLOCK_C: of them, columns of a program. PARTS, SPAN: of K.
        DIVIDE: whether the root mean square divides the sums; else the product does it.
    """

    K: int
    P: int
    R: int
    PLACES: int
    BLOCK: int
    BLOCK_C: int
    BLOCK_T: int
    BLOCK_K: int
    PARTS: int
    SPAN: int
    DIVIDE: bool
    PRECISION: str


@triton.jit
def _column(steps_ptr, scales_ptr, job, scale_stride, C):
    """Columns of a program: their places, rows of A, and factors."""
    block, c = job // (C.BLOCK // C.BLOCK_C), tl.arange(0, C.BLOCK_C)
    column = tl.load(steps_ptr + 1 + block) * C.BLOCK + job % (C.BLOCK // C.BLOCK_C) * C.BLOCK_C + c
    place = column // (C.P * C.R)
    inside = place < C.PLACES
    factor = tl.load(scales_ptr + place * scale_stride + column % (C.P * C.R) // C.R, mask=inside, other=0.0)
    return column, tl.where(inside, place, -2), factor


@prepared
@triton.jit(do_not_specialize=["scale_stride", "y_stride"])
def _few_rows_kernel(x_ptr, norm_ptr, a_ptr, scales_ptr, adapters_ptr, steps_ptr, y_ptr, x_stride, scale_stride, y_stride, eps,
                     C, PDL: tl.constexpr):  # fmt: skip
    """One value of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t, c = tl.program_id(0), tl.program_id(1)
    COUNT: tl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    adapter = tl.load(adapters_ptr + t)
    used = c < tl.load(steps_ptr) * C.BLOCK
    column = tl.load(steps_ptr + 1 + c // C.BLOCK, mask=used, other=0) * C.BLOCK + c % C.BLOCK
    place = column // (C.P * C.R)
    mine = used & (place == adapter)
    factor = tl.load(scales_ptr + place * scale_stride + column % (C.P * C.R) // C.R, mask=mine, other=0.0)
    end = tl.where(mine & (factor != 0), C.K, 0)
    k = tl.arange(0, C.BLOCK_K)
    a = ()
    for i in tl.static_range(COUNT):
        inside = i * C.BLOCK_K + k < end
        a += (tl.load(a_ptr + tl.where(mine, column, 0).to(tl.int64) * C.K + i * C.BLOCK_K + k, mask=inside, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums, squares = tl.zeros((C.BLOCK_K,), tl.float32), tl.zeros((C.BLOCK_K,), tl.float32)
    for i in tl.static_range(COUNT):
        inside = i * C.BLOCK_K + k < end
        x = tl.load(x_ptr + t.to(tl.int64) * x_stride + i * C.BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + i * C.BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        sums += x * a[i].to(tl.float32)
    y = tl.sum(sums, 0) * factor
    if norm_ptr is not None and C.DIVIDE:
        y *= tl.rsqrt(tl.sum(squares, 0) / C.K + eps)
    tl.store(y_ptr + t.to(tl.int64) * y_stride + c, tl.where(end > 0, y, 0.0).to(y_ptr.dtype.element_ty), mask=used)


@prepared
@triton.jit(do_not_specialize=["T", "scale_stride", "y_stride"])
def _shrink_kernel(x_ptr, norm_ptr, a_ptr, scales_ptr, adapters_ptr, steps_ptr, y_ptr, sums_ptr, squares_ptr, counters_ptr, T,
                   x_stride, scale_stride, y_stride, eps, C, PDL: tl.constexpr):  # fmt: skip
    """A tile of rows, some columns, a part of K."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, job, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    live = job < tl.load(steps_ptr) * (C.BLOCK // C.BLOCK_C)
    adapter = tl.load(adapters_ptr + t, mask=t < tl.where(live, T, 0), other=-1)
    start = part * C.SPAN
    if live:
        column, place, factor = _column(steps_ptr, scales_ptr, job, scale_stride, C)
        mine = (adapter[:, None] == place[None, :]) & (factor != 0)[None, :]
        needed = tl.max(mine.to(tl.int32), 0)
        some = tl.max(needed, 0) > 0
        a_ptrs = a_ptr + column.to(tl.int64)[:, None] * C.K
        if PDL:
            if C.PARTS > 1:  # while the kernel that computes x still runs
                for ahead in tl.static_range(0, C.SPAN, 64):
                    touch(tl.where(needed > 0, a_ptr + column.to(tl.int64) * C.K + tl.minimum(start + ahead, C.K - 1), a_ptr))
            tl.extra.cuda.gdc_wait()
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * y_stride + (job * C.BLOCK_C + tl.arange(0, C.BLOCK_C))[None, :]
        acc = tl.zeros((C.BLOCK_T, C.BLOCK_C), tl.float32)
        squares = tl.zeros((C.BLOCK_T,), tl.float32)
        last = part == 0
        if some:
            row = tl.where(t < T, t, 0).to(tl.int64)
            x_ptrs = x_ptr + row[:, None] * x_stride
            for at in range(start, tl.minimum(start + C.SPAN, C.K), C.BLOCK_K):
                k = at + tl.arange(0, C.BLOCK_K)
                inside = k < C.K
                x = tl.load(x_ptrs + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
                a = tl.load(a_ptrs + k[None, :], mask=(needed > 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                if norm_ptr is not None:
                    squares += tl.sum(x * x, 1)
                    x *= tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)[None, :]
                acc = tl.dot(x, tl.trans(a), acc, input_precision=C.PRECISION)
            if C.PARTS > 1:
                of = tile * tl.num_programs(1) + job
                i = tl.arange(0, C.BLOCK_T)
                squares_ptr += of * (C.PARTS * C.BLOCK_T)
                if norm_ptr is not None:
                    tl.store(squares_ptr + part * C.BLOCK_T + i, squares, cache_modifier=".cg")
                at = i[:, None] * C.BLOCK_C + tl.arange(0, C.BLOCK_C)[None, :]
                sums_ptr += of * (C.PARTS * C.BLOCK_T * C.BLOCK_C)
                acc, last = add_parts(acc, at, None, sums_ptr, counters_ptr + of, part, C.PARTS)
                if last and norm_ptr is not None:
                    squares = tl.zeros((C.BLOCK_T,), tl.float32)
                    for p in tl.static_range(C.PARTS):
                        squares += tl.load(squares_ptr + p * C.BLOCK_T + i, cache_modifier=".cg")
        if last:
            y = acc * factor[None, :]
            if norm_ptr is not None:
                y *= tl.rsqrt(squares / C.K + eps)[:, None]
            tl.store(y_ptrs, tl.where(mine, y, 0.0).to(y_ptr.dtype.element_ty), mask=(t < T)[:, None])
    elif PDL:
        tl.extra.cuda.gdc_wait()


@lru_cache(4096)
def _plan(T: int, K: int, P: int, R: int, places: int, itemsize: int, divide: bool, steps: int) -> tuple[_Constants, int]:
    """The constants, and programs of a row (or tile of rows)."""
    precision = "ieee" if itemsize == 4 else "tf32"
    if T <= _FEW:
        block_k = 1024 if K <= _LONG else 2048
        return _Constants(K, P, R, places, LOW_RANK_BLOCK, 1, 1, block_k, 1, K, divide, precision), steps * LOW_RANK_BLOCK
    block_c, block_t, block_k = (16, min(64, max(16, 1 << (T - 1).bit_length())), 64) if T <= _STEPS else (64, 64, 64)
    jobs = steps * (LOW_RANK_BLOCK // block_c)
    parts = max(1, min(_PROGRAMS // (cdiv(T, block_t) * jobs), cdiv(K, _SHORTEST)))
    parts = even_parts(cdiv(K, block_k), parts)
    span = cdiv(cdiv(K, block_k), parts) * block_k
    return _Constants(K, P, R, places, LOW_RANK_BLOCK, block_c, block_t, block_k, parts, span, divide, precision), jobs


def low_rank(
    x: Tensor, weights: AdapterWeights, rows: AdapterRows, norm_weight: Tensor | None = None, eps: float = 0.0, *,
    workspace: Workspace, divide: bool = True, pdl: bool = False,
) -> LowRank:  # fmt: skip
    """What a product takes for the adapters of its rows, for x [T, K] with any row stride.

    Args:
        divide: whether y is of rms_norm(x); else of x · norm_weight, for a product that divides its sums itself.
        workspace: whose counters are used.
    """
    (T, K), (places, P, R, _), width = x.shape, weights.a.shape, weights.width
    steps = most_steps(width, places, T)
    y = x.new_empty(T, steps * LOW_RANK_BLOCK)
    C, jobs = _plan(T, K, P, R, places, x.element_size(), divide, steps)
    used = rows.steps[width]
    operands: tuple[Any, ...] = x, norm_weight, weights.a, weights.scales, rows.adapters, used, y
    strides = x.stride(0), weights.scales.stride(0), y.stride(0), eps
    if T <= _FEW:
        _few_rows_kernel[(T, jobs)](*operands, *strides, C, **launch_options(4 if K <= _LONG else 8, 1, pdl))
    else:
        sums = squares = counters = None
        tiles = cdiv(T, C.BLOCK_T)
        if C.PARTS > 1:
            programs = tiles * jobs * C.PARTS
            sums = torch.empty(programs, C.BLOCK_T, C.BLOCK_C, dtype=torch.float32, device=x.device)
            squares = torch.empty(programs, C.BLOCK_T, dtype=torch.float32, device=x.device)
            counters = workspace.counters(tiles * jobs)
        _shrink_kernel[(tiles, jobs, C.PARTS)](*operands, sums, squares, counters, T, *strides, C, **launch_options(4, 3, pdl))
    return LowRank(y, weights.b, rows.adapters, used, width, y.stride(0), weights.b.stride(0))
