"""`low_rank`: y = scaling · A · x of each row's adapter, which the product of a linear takes beside x.

Sums are in fp32, in a fixed order. With a few rows, a program computes one value; with more, a tile of rows by a block of
columns, for a part of K. One row may be raw, of a product that computes the norm: then y is of x times the norm's weight, and
the product divides its sums by the root mean square, those of y too.

Programs trigger after they waited. So what was written before y is complete when the next kernel starts: a product streams its
weights through x at once, and waits before it reads y.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.launch import Workspace, cdiv, even_parts, launch_options, next_power_of_2
from minirt.kernels.linear.epilogue import add_parts, touch
from minirt.kernels.linear.product import LOW_RANK_BLOCK, LowRank, Norm
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared

_FEW = 8  # rows
_LONG = 8192  # columns of x, from which a value takes eight warps
_SMALL = 256  # rows up to which most time is latency, so that K is split for many programs
_PARTS = 4  # of K, with more rows
_SHORTEST = 256  # columns of x of a part


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        P, R: modules, and most ranks. PLACES: of adapters.
        BLOCK: columns of a step. BLOCK_C: of them, columns of a program. PARTS, SPAN: of K.
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


@triton.jit
def _column(steps_ptr, scales_ptr, job, scale_stride, C):
    """Columns of a program, which are rows of A: their places and factors."""
    block, c = job // (C.BLOCK // C.BLOCK_C), tl.arange(0, C.BLOCK_C)
    column = tl.load(steps_ptr + 1 + block) * C.BLOCK + job % (C.BLOCK // C.BLOCK_C) * C.BLOCK_C + c
    place, module = column // (C.P * C.R), column // C.R % C.P
    inside = place < C.PLACES
    factor = tl.load(scales_ptr + place * scale_stride + module, mask=inside, other=0.0)
    return column, tl.where(inside, place, -2), factor


@prepared
@triton.jit(do_not_specialize=["scale_stride", "y_stride"])
def _few_rows_kernel(x_ptr, norm_ptr, a_ptr, scales_ptr, adapters_ptr, steps_ptr, y_ptr, x_stride, scale_stride, y_stride, C,
                     PDL: tl.constexpr):  # fmt: skip
    """One value of one row."""
    t, c = tl.program_id(0), tl.program_id(1)
    COUNT: tl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    adapter = tl.load(adapters_ptr + t)
    used = c < tl.load(steps_ptr) * C.BLOCK
    column = tl.load(steps_ptr + 1 + c // C.BLOCK, mask=used, other=0) * C.BLOCK + c % C.BLOCK
    place, module = column // (C.P * C.R), column // C.R % C.P
    mine = used & (place == adapter)
    factor = tl.load(scales_ptr + place * scale_stride + module, mask=mine, other=0.0)
    end = tl.where(mine & (factor != 0), C.K, 0)
    k = tl.arange(0, C.BLOCK_K)
    a = ()
    for i in tl.static_range(COUNT):
        inside = i * C.BLOCK_K + k < end
        a += (tl.load(a_ptr + tl.where(mine, column, 0).to(tl.int64) * C.K + i * C.BLOCK_K + k, mask=inside, other=0.0),)  # type: ignore[assignment]
    if PDL:
        wait_for_input(False)
    sums = tl.zeros((C.BLOCK_K,), tl.float32)
    for i in tl.static_range(COUNT):
        inside = i * C.BLOCK_K + k < end
        x = tl.load(x_ptr + t.to(tl.int64) * x_stride + i * C.BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + i * C.BLOCK_K + k, mask=inside, other=0.0).to(tl.float32)
        sums += x * a[i].to(tl.float32)
    y = tl.sum(sums, 0) * factor
    tl.store(y_ptr + t.to(tl.int64) * y_stride + c, tl.where(end > 0, y, 0.0).to(y_ptr.dtype.element_ty), mask=used)


@prepared
@triton.jit(do_not_specialize=["T", "scale_stride", "y_stride"])
def _shrink_kernel(x_ptr, a_ptr, scales_ptr, adapters_ptr, steps_ptr, y_ptr, sums_ptr, counters_ptr, T, x_stride, scale_stride,
                   y_stride, C, PDL: tl.constexpr):  # fmt: skip
    """A tile of rows, some columns, a part of K."""
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
        a_ptrs = a_ptr + tl.where(needed > 0, column, 0).to(tl.int64) * C.K  # instead of a mask
        if PDL:
            if C.PARTS > 1:  # while the kernel that computes x still runs
                for ahead in tl.static_range(0, C.SPAN, 64):
                    touch(a_ptrs + tl.minimum(start + ahead, C.K - 1))
            wait_for_input(False)
        y_ptrs = y_ptr + t.to(tl.int64)[:, None] * y_stride + (job * C.BLOCK_C + tl.arange(0, C.BLOCK_C))[None, :]
        acc = tl.zeros((C.BLOCK_T, C.BLOCK_C), tl.float32)
        last = part == 0
        if some:
            x_ptrs = x_ptr + tl.minimum(t, T - 1).to(tl.int64) * x_stride
            for at in range(start, tl.minimum(start + C.SPAN, C.K), C.BLOCK_K):
                x, a = _tile(x_ptrs, at, C), _tile(a_ptrs, at, C)
                acc = tl.dot(x, a.T, acc, input_precision="ieee")
            if C.PARTS > 1:
                of = tile * tl.num_programs(1) + job
                at = tl.arange(0, C.BLOCK_T)[:, None] * C.BLOCK_C + tl.arange(0, C.BLOCK_C)[None, :]
                sums_ptr += of * (C.PARTS * C.BLOCK_T * C.BLOCK_C)
                acc, last = add_parts(acc, at, None, sums_ptr, counters_ptr + of, part, C.PARTS)
        if last:
            y = tl.where(mine, acc * factor[None, :], 0.0)
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None])
    elif PDL:
        wait_for_input(False)


@triton.jit
def _tile(ptrs, start, C):
    k = start + tl.arange(0, C.BLOCK_K)
    if C.K % C.BLOCK_K == 0:
        return tl.load(ptrs[:, None] + k[None, :])
    else:
        return tl.load(ptrs[:, None] + k[None, :], mask=(k < C.K)[None, :], other=0.0)


@lru_cache(4096)
def _constants(T: int, K: int, P: int, R: int, places: int, itemsize: int) -> _Constants:
    """They take few values for all T, because each is a kernel. With many rows, few blocks of columns are expected to be used."""
    if T <= _FEW:
        return _Constants(K, P, R, places, LOW_RANK_BLOCK, 1, 1, 1024 if K <= _LONG else 2048, 1, K)
    # From a sweep of 18 for each of 16 to 128 rows, on an H200. Programs: of a tile of rows.
    block_c, row_bytes, programs = (64, 256, 132) if T <= 32 else (16, 128, 132) if T <= 64 else (16, 256, 200)
    if T > _SMALL:
        block_c, row_bytes = 64, 128
    block_k, block_t = row_bytes // itemsize, min(64, max(16, next_power_of_2(T)))
    jobs = cdiv(most_steps(P, R, places) * LOW_RANK_BLOCK, block_c)
    parts = even_parts(cdiv(K, block_k), max(1, min(programs // jobs if T <= _SMALL else _PARTS, cdiv(K, _SHORTEST))))
    span = cdiv(cdiv(K, block_k), parts) * block_k
    return _Constants(K, P, R, places, LOW_RANK_BLOCK, block_c, block_t, block_k, parts, span)


def low_rank(
    x: Tensor, norm: Norm | None = None, *, weights: AdapterWeights, rows: AdapterRows, workspace: Workspace, pdl: bool = False
) -> LowRank:
    """What a product takes for the adapters of its rows, for x [T, K] with any row stride.

    Args:
        norm: of the product, for one row. workspace: whose counters are used.
    """
    (T, K), (places, P, R, _) = x.shape, weights.a.shape
    steps = most_steps(P, R, places, T)
    y, used = x.new_empty(T, steps * LOW_RANK_BLOCK), rows.steps[P]
    C = _constants(T, K, P, R, places, x.element_size())
    jobs = steps * LOW_RANK_BLOCK // C.BLOCK_C
    strides = x.stride(0), weights.scales.stride(0), y.stride(0)
    if T <= _FEW:
        norm_weight = None if norm is None else norm.weight
        _few_rows_kernel[(T, jobs)](
            x, norm_weight, weights.a, weights.scales, rows.adapters, used, y, *strides, C,
            **launch_options(4 if K <= _LONG else 8, 1, pdl),
        )  # fmt: skip
    else:
        sums = counters = None
        tiles = cdiv(T, C.BLOCK_T)
        if C.PARTS > 1:
            sums = torch.empty(tiles * jobs * C.PARTS, C.BLOCK_T, C.BLOCK_C, dtype=torch.float32, device=x.device)
            counters = workspace.counters(tiles * jobs)
        _shrink_kernel[(tiles, jobs, C.PARTS)](
            x, weights.a, weights.scales, rows.adapters, used, y, sums, counters, T, *strides, C,
            **launch_options(4, 3 if C.BLOCK_K * x.element_size() == 128 else 2, pdl),
        )  # fmt: skip
    return LowRank(y, weights.b, rows.adapters, used, P * R, y.stride(0), weights.b.stride(0))
