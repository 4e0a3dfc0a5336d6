"""The GEMM of `gemm.py` for Hopper (compute capability 9.0): persistent and warp-specialized.

One warp fetches tiles by TMA. Two or three groups of four warps multiply, each for 64 rows of a tile. Fetching continues while
the groups scale, activate and store. The kernel is written in Gluon, because Triton's own pipeline makes all warps wait for
each other at every step.

A tile has 128 or 192 rows, so up to 192 tokens take one pass over the weights, and up to 384 take two. Its columns are those of a
pair of strips of weight rows: two neighbouring strips or, for a gated activation, a strip of gate and the same strip of up. A
second pair of narrower strips gives widths between the powers of two, with which the last round of tiles is full. Where there is
one pair of neighbouring strips, a last round that would have work for at most half of the programs takes single strips as tiles.

K is split in two parts if few tiles would leave SMs idle, or if the tiles would be so narrow that reading from L2 takes longer
than multiplying. Both programs of a tile write their sums to the workspace, and the second to arrive adds both.

Hopper's tensor cores add fp8 products with about 14 bits. So after every 1024 or 2048 elements of K the sums are set aside: in
fp32 or, if registers do not suffice, in fp16, scaled so that the largest possible sum is finite.

If the weight has a scale for each block, a step in K is one block of columns. After each step, a scale for each token and one for
each strip multiply the products, and fp32 sums take them. (DeepGEMM does the same, Zhao et al. 2025.) No strip reaches into a
second block of rows. While one group of warps adds, another one multiplies.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.errors import InputError
from minirt.kernels.arrival import arrive_last
from minirt.kernels.compile.tuning import Family, cached_lookup
from minirt.kernels.hopper.ring import barriers, release, release_before, ring_barriers, wait_empty, wait_full
from minirt.kernels.hopper.tiles import halves, places
from minirt.kernels.hopper.tma import tma_load, tma_store, tma_tile
from minirt.kernels.launch import Gpu, begin_together, cdiv, launch_options, next_power_of_2, shared_limit
from minirt.kernels.linear.epilogue import finish, load_part, load_rows, load_tokens, store_packed_maxima, store_part
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.linear.tile_order import tile_origin
from minirt.kernels.prepared import Tile, Tiled, compile_time, prepared


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        COLUMNS: output columns of a tile; FIRST: of its first pair of strips.
        SECOND: weight rows of the second pair; 0: there is none. (If gated, it has half as many output columns.)
        SHIFT: see `_first`.
        STRIPS: whether the tiles from `whole` on are single strips.
        PROMOTE: steps in K after which the sums are set aside, divided by SCALE; 0: never.
    """

    K: int
    GATED: bool
    SCALE_ROWS: int | None
    COLUMNS: int
    FIRST: int
    SECOND: int
    STAGES: int
    SHIFT: bool
    STRIPS: bool
    PROMOTE: int
    SCALE: float
    SPLIT: int
    GROUPS: int


@gluon.jit
def _store(out, value, t, n, staging, PIECE: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Store the next pieces of a pair of strips, from PIECE on, through the group's buffers in turn.

    When a pair starts, the buffers hold nothing that is still to be stored.
    """
    COLUMNS: gl.constexpr = out.block_type.shape[1]
    BUFFERS: gl.constexpr = staging.shape[0] // GROUPS
    if value.shape[1] > COLUMNS:
        left, right = halves(value)
        _store(out, left, t, n, staging, PIECE, GROUP, GROUPS)
        _store(out, right, t, n + left.shape[1], staging, PIECE + left.shape[1] // COLUMNS, GROUP, GROUPS)
    else:
        if PIECE >= BUFFERS:
            tma.store_wait(BUFFERS - 1)
        buffer = staging.index(BUFFERS * GROUP + PIECE % BUFFERS)
        buffer.store(value.to(out.dtype))
        fence_async_shared()
        tma_store(out, [t, n], buffer)


@gluon.jit
def _finish_strip(acc, acc_up, ep, added, t, n, T, N, C):
    """`epilogue.finish` for rows t … t + 63 and the columns from n on. `added`: (residual,) or ()."""
    t += gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))[:, None]
    n += gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))[None, :]
    rows = load_rows(ep, n, n < N, N, C.SCALE_ROWS is None)
    return finish(acc, acc_up, rows, load_tokens(ep, t, t < T, C.SCALE_ROWS is None), added, ep)


@gluon.jit
def _store_strip(acc, out, staging, ep, t, n, T, N, C, STRIP: gl.constexpr, GROUP: gl.constexpr):
    """Finish and store the left (STRIP = 0) or right strip of a pair, from column n on.

    If there is a residual, the group's buffer STRIP holds it.
    """
    added = ()
    if ep.residual is not None:
        added = (staging.index(2 * GROUP + STRIP).load(acc.type.layout).to(gl.float32),)
    value = _finish_strip(acc, acc, ep, added, t, n, T, N, C)
    _store(out, value, t, n, staging, STRIP * (acc.shape[1] // out.block_type.shape[1]), GROUP, C.GROUPS)


@gluon.jit
def _finish_pair(acc, out, staging, ep, t, n, T, N, C, GROUP: gl.constexpr):
    left, right = halves(acc)
    if C.GATED:
        _store(out, _finish_strip(left, right, ep, (), t, n, T, N, C), t, n, staging, 0, GROUP, C.GROUPS)
    else:
        _store_strip(left, out, staging, ep, t, n, T, N, C, 0, GROUP)
        _store_strip(right, out, staging, ep, t, n + left.shape[1], T, N, C, 1, GROUP)


@gluon.jit
def _finish_tile(acc, second, outs, buffers, ep, t, n, T, N, C, STRIPS: gl.constexpr, GROUP: gl.constexpr):
    if STRIPS == 1:
        _store_strip(acc, outs[0], buffers[0], ep, t, n, T, N, C, 0, GROUP)
    else:
        _finish_pair(acc, outs[0], buffers[0], ep, t, n, T, N, C, GROUP)
    if C.SECOND != 0:
        _finish_pair(second, outs[1], buffers[1], ep, t, n + C.FIRST, T, N, C, GROUP)


@gluon.jit
def _better(top, column, other_top, other_column):
    """The larger of two values with its column; the first of equal values. NaN, whose column is -1, is the largest."""
    other = (column >= 0) & ((other_column < 0) | (other_top > top))
    return gl.where(other, other_top, top), gl.where(other, other_column, column)


@gluon.jit
def _row_maxima(acc, ep, t, n, T, N, C, ROWS: gl.constexpr):
    """The largest value of each of 64 rows and its column, in the layout ROWS. Halves the columns to save registers."""
    if acc.shape[1] > 64:
        left, right = halves(acc)
        top, column = _row_maxima(left, ep, t, n, T, N, C, ROWS)
        other_top, other_column = _row_maxima(right, ep, t, n + left.shape[1], T, N, C, ROWS)
        return _better(top, column, other_top, other_column)
    else:
        x = _finish_strip(acc, acc, ep, (), t, n, T, N, C)
        n += gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        x = gl.where((n < N)[None, :], x, float("-inf"))
        top = gl.max(x, 1)
        column = gl.min(gl.where(x == top[:, None], n[None, :], gl.where(x < top[:, None], 2147483647, -1)), 1)
        return gl.convert_layout(top, ROWS), gl.convert_layout(column, ROWS)


@gluon.jit
def _store_row_maxima(acc, second, ep, t, n, T, N, C):
    """Store the largest value of each row of a tile with its column."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top, column = _row_maxima(acc, ep, t, n, T, N, C, ROWS)
    if C.SECOND != 0:
        second_top, second_column = _row_maxima(second, ep, t, n + acc.shape[1], T, N, C, ROWS)
        top, column = _better(top, column, second_top, second_column)
    store_packed_maxima(top, column, t + gl.arange(0, 64, ROWS), T, ep, n // C.COLUMNS)


@gluon.jit
def _first(tile, T, tiles_n, C):
    """The first row and the first column of a tile, in the order of `tile_origin`.

    With SHIFT, a tile of the last rows starts early enough to be full, because TMA is slow with rows past the end. Some rows are
    then computed twice, with the same result.
    """
    t, n = tile_origin(tile, T, tiles_n, 64 * C.GROUPS, C.COLUMNS)
    if C.SHIFT:
        t = min(t, max(T - 64 * C.GROUPS, 0))
    return t, n


@gluon.jit
def _first_of_strip(strip, whole, T, tiles_n, C):
    """The first row and the first column of a strip; its number counts from the first strip of tile `whole` on."""
    t, n = _first(whole + strip // 2, T, tiles_n, C)
    return t, n + strip % 2 * (C.COLUMNS // 2)


@gluon.jit
def _group_row(t, T, C, GROUP: gl.constexpr):
    """The first row of a group of warps in the tile that starts at row t. With SHIFT, all 64 rows exist if T is 64 or more."""
    row = t + 64 * GROUP
    if C.SHIFT:
        row = min(row, max(T - 64, 0))
    return row


@gluon.jit
def _group_rows(x_tiles, stage, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """A group's 64 rows of x in shared memory: half a buffer with two groups, a buffer with three (sizes are powers of two)."""
    if GROUPS == 2:
        return x_tiles.index(stage).slice(64 * GROUP, 64)
    else:
        return x_tiles.index(GROUPS * stage + GROUP)


@gluon.jit
def _fetch_rows(x, t, k, T, bar, x_tiles, stage, C):
    """Fetch a tile's rows of x: all at once, or 64 rows for each group of warps."""
    if x.block_type.shape[0] == 128:
        tma_load(x, [t, k], bar, x_tiles.index(stage))
    else:
        tma_load(x, [t, k], bar, _group_rows(x_tiles, stage, 0, C.GROUPS))
        for group in gl.static_range(1, C.GROUPS):
            tma_load(x, [_group_row(t, T, C, group), k], bar, _group_rows(x_tiles, stage, group, C.GROUPS))


@gluon.jit
def _fetch_pair(weight, n, k, N, bar, tiles, GATED: gl.constexpr):
    """Fetch two strips of the weight from row n on: two neighbours, or one of gate and one of up."""
    STRIP: gl.constexpr = tiles.shape[0] // 2
    tma_load(weight, [n, k], bar, tiles.slice(0, STRIP))
    tma_load(weight, [n + (N if GATED else STRIP), k], bar, tiles.slice(STRIP, STRIP))


@gluon.jit
def _fetch_weights(weight, second_weight, ring, stage, n, k, N, C):
    """Announce a step's bytes, those of x included, and fetch its strips of the weight."""
    x_tiles, w_tiles, second_tiles, full, _ = ring
    BYTES: gl.constexpr = (
        (64 * C.GROUPS + w_tiles.shape[1] + C.SECOND) * w_tiles.shape[2] * x_tiles.dtype.primitive_bitwidth // 8
    )
    bar = full.index(stage)
    mbarrier.expect(bar, BYTES)
    _fetch_pair(weight, n, k, N, bar, w_tiles.index(stage), C.GATED)
    if C.SECOND != 0:
        _fetch_pair(second_weight, n + C.FIRST, k, N, bar, second_tiles.index(stage), C.GATED)


@gluon.jit
def _fetch_strip(x, weight, ring, stage, t, n, x_k, k, T, C):
    """Fetch a step of a tile that is a single strip, from column x_k of x and column k of the weight on."""
    x_tiles, w_tiles, _, full, _ = ring
    STRIP: gl.constexpr = w_tiles.shape[1] // 2
    bar = full.index(stage)
    mbarrier.expect(bar, (64 * C.GROUPS + STRIP) * w_tiles.shape[2] * x_tiles.dtype.primitive_bitwidth // 8)
    tma_load(weight, [n, k], bar, w_tiles.index(stage).slice(0, STRIP))
    _fetch_rows(x, t, x_k, T, bar, x_tiles, stage, C)


@gluon.jit
def _added_steps(added, part, C):
    """Steps of a program's part of K for adapters, which are those of the last part. `added`: y, b for both pairs, `steps`."""
    return gl.where(part % C.SPLIT == C.SPLIT - 1, gl.load(added[3]), 0)


@gluon.jit
def _fetch_tiles(x, weight, second_weight, added, ring, sizes, C, PDL: gl.constexpr):
    """Task of the fetching warp."""
    x_tiles, w_tiles, _, full, empty = ring
    T, N, tiles, tiles_n, whole = sizes
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    PART: gl.constexpr = (C.K + C.SPLIT * BLOCK_K - 1) // (C.SPLIT * BLOCK_K) * BLOCK_K
    step = 0
    ahead = 0
    if PDL:
        # The kernel before may still write x, but never weights. So fetch as many weight tiles as fit before the wait.
        t, n = _first(gl.program_id(0) // C.SPLIT, T, tiles_n, C)
        first = gl.program_id(0) % C.SPLIT * PART
        ahead += min(C.STAGES, (min(first + PART, C.K) - first + BLOCK_K - 1) // BLOCK_K)
        for i in range(ahead):
            _fetch_weights(weight, second_weight, ring, i, n, first + i * BLOCK_K, N, C)
        gdc_wait()
        for i in range(ahead):
            _fetch_rows(x, t, first + i * BLOCK_K, T, full.index(i), x_tiles, i, C)
        step += ahead
    for part in range(gl.program_id(0), whole * C.SPLIT, gl.num_programs(0)):
        t, n = _first(part // C.SPLIT, T, tiles_n, C)
        first = part % C.SPLIT * PART
        # Not `ahead = 0` at the loop's end: Triton 3.6 drops it, and every tile would skip steps, which then never arrive.
        skipped = gl.where(part == gl.program_id(0), ahead, 0)
        for k in range(first + skipped * BLOCK_K, min(first + PART, C.K), BLOCK_K):
            stage = wait_empty(empty, step)
            _fetch_weights(weight, second_weight, ring, stage, n, k, N, C)
            _fetch_rows(x, t, k, T, full.index(stage), x_tiles, stage, C)
            step += 1
        if added[0] is not None:
            for i in range(_added_steps(added, part, C)):
                stage = wait_empty(empty, step)
                _fetch_weights(added[1], added[2], ring, stage, n, gl.load(added[3] + 1 + i) * BLOCK_K, N, C)
                _fetch_rows(added[0], t, i * BLOCK_K, T, full.index(stage), x_tiles, stage, C)
                step += 1
    if C.STRIPS:
        for strip in range(gl.program_id(0), 2 * (tiles - whole), gl.num_programs(0)):
            t, n = _first_of_strip(strip, whole, T, tiles_n, C)
            for k in range(0, C.K, BLOCK_K):
                _fetch_strip(x, weight, ring, wait_empty(empty, step), t, n, k, k, T, C)
                step += 1
            if added[0] is not None:
                for i in range(_added_steps(added, 0, C)):
                    k = gl.load(added[3] + 1 + i) * BLOCK_K
                    _fetch_strip(added[0], added[1], ring, wait_empty(empty, step), t, n, i * BLOCK_K, k, T, C)
                    step += 1
    if PDL:
        # Not earlier: the next kernel's programs would crowd onto the first idle SMs. They start beside the remaining products.
        gdc_launch_dependents()


@gluon.jit
def _add_products(ring, acc, second, step, first, last, C, GROUP: gl.constexpr):
    """Add the products of steps `first` … `last` - 1 of a tile, for 64 of its rows. Releases each stage after it is read."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    for i in range(first, last):
        stage = wait_full(full, step)
        x = _group_rows(x_tiles, stage, GROUP, C.GROUPS)
        w = w_tiles.index(stage).slice(0, acc.shape[1])
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=i > first, is_async=True)
        if C.SECOND != 0:
            second = warpgroup_mma(x, second_tiles.index(stage).permute((1, 0)), second, use_acc=i > first, is_async=True)
            acc, second = warpgroup_mma_wait(2, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        release_before(empty, step, i > first)
        step += 1
    if C.SECOND != 0:
        acc, second = warpgroup_mma_wait(0, deps=[acc, second])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    release_before(empty, step)
    return acc, second, step


@gluon.jit
def _strip_scales(ep, first, n, N, C):
    """Pointer to the scales of a strip: of weight row first + n, or of the last row if n is past N."""
    return ep.scale + (first + min(n, N - 1)) // C.SCALE_ROWS * ((C.K + 127) // 128)


@gluon.jit
def _factors(x_scale, left, right, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales [64, WIDTH] of a pair of strips. The compiler keeps two values for each row."""
    n = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    x_scale = gl.convert_layout(x_scale, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    return gl.where(n < WIDTH // 2, x_scale * left, x_scale * right)


@gluon.jit
def _add_blocks(ring, ep, acc, second, step, first, steps, t, n, T, N, C, GROUP: gl.constexpr):
    """`_add_products` with scales of blocks, for steps `first` … `first` + `steps` - 1 of a tile. Adds to fp32 sums."""
    x_tiles, w_tiles, second_tiles, full, empty = ring
    WIDE: gl.constexpr = acc.type.layout
    row = t + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    x_scales = ep.x_scale + gl.minimum(row, T - 1) * ((C.K + 127) // 128) + first
    # The right strip of a pair: the neighbour or, with an activation, the strip of up.
    left_scales = _strip_scales(ep, 0, n, N, C) + first
    RIGHT: gl.constexpr = 0 if C.GATED else acc.shape[1] // 2
    right_first = N if C.GATED else 0
    right_scales = _strip_scales(ep, right_first, n + RIGHT, N, C) + first
    if C.SECOND != 0:
        NARROW: gl.constexpr = second.type.layout
        FOURTH: gl.constexpr = C.FIRST if C.GATED else C.FIRST + C.SECOND // 2
        third_scales = _strip_scales(ep, 0, n + C.FIRST, N, C) + first
        fourth_scales = _strip_scales(ep, right_first, n + FOURTH, N, C) + first
    for i in range(steps):
        # Loaded before the tiles are awaited. Of 32 steps, one finds them in L2, the others in L1.
        x_scale, left, right = gl.load(x_scales + i), gl.load(left_scales + i), gl.load(right_scales + i)
        if C.SECOND != 0:
            third, fourth = gl.load(third_scales + i), gl.load(fourth_scales + i)
        stage = wait_full(full, step)
        x = _group_rows(x_tiles, stage, GROUP, C.GROUPS)
        products = gl.zeros(acc.shape, gl.float32, WIDE)
        products = warpgroup_mma(x, w_tiles.index(stage).permute((1, 0)), products, use_acc=False, is_async=True)
        if C.SECOND != 0:
            second_products = gl.zeros(second.shape, gl.float32, NARROW)
            second_products = warpgroup_mma(
                x, second_tiles.index(stage).permute((1, 0)), second_products, use_acc=False, is_async=True
            )
            products, second_products = warpgroup_mma_wait(0, deps=[products, second_products])
        else:
            products = warpgroup_mma_wait(0, deps=[products])
        release(empty, step)
        acc += products * _factors(x_scale, left, right, acc.shape[1], WIDE)
        if C.SECOND != 0:
            second += second_products * _factors(x_scale, third, fourth, second.shape[1], NARROW)
        step += 1
    return acc, second, step


@gluon.jit
def _add_other_part(acc, second, workspace, tile, part, C, GROUP: gl.constexpr):
    """Store the sums for the other part's program. If that program has already stored its sums, return the total, and True."""
    sums_ptr, counters_ptr = workspace
    WIDTH: gl.constexpr = acc.shape[1]
    of_group = C.GROUPS * tile + GROUP
    sums_ptr += of_group * C.SPLIT * 64 * (WIDTH + C.SECOND)
    second_ptr = sums_ptr + C.SPLIT * 64 * WIDTH
    store_part(acc, places(acc), None, sums_ptr, part)
    if C.SECOND != 0:
        store_part(second, places(second), None, second_ptr, part)
    last = arrive_last(counters_ptr + of_group, C.SPLIT)
    if last:
        acc += load_part(acc, places(acc), None, sums_ptr, 1 - part)
        if C.SECOND != 0:
            second += load_part(second, places(second), None, second_ptr, 1 - part)
    return acc, second, last


@gluon.jit
def _fetch_residual(
    residuals, arrived, buffers, t, n, STRIPS: gl.constexpr, WIDTH: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Fetch a group's rows of the residual into the buffers through which it stores them later. `arrived`: its barrier.

    WIDTH: columns of the first pair, of which a tile has one or both strips.
    """
    residual, second_residual = residuals
    staging, second_staging = buffers
    tma.store_wait(0)
    mbarrier.expect(arrived, 64 * (STRIPS * (WIDTH // 2) + SECOND) * 2)
    tma_load(residual, [t, n], arrived, staging.index(2 * GROUP))
    if STRIPS == 2:
        tma_load(residual, [t, n + WIDTH // 2], arrived, staging.index(2 * GROUP + 1))
    if SECOND != 0:
        tma_load(second_residual, [t, n + WIDTH], arrived, second_staging.index(2 * GROUP))
        tma_load(second_residual, [t, n + WIDTH + SECOND // 2], arrived, second_staging.index(2 * GROUP + 1))


@gluon.jit
def _multiply_tile(
    ring, residuals, arrived, outs, buffers, ep, workspace, added, sizes, part, t, n, step, phase, needed, C,
    STRIPS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile, or with SPLIT of a part of K: a pair of strips, and the second pair, or with STRIPS = 1 a single strip.

    Returns the numbers of the next step and of the next phase of the residual's barrier.
    """
    x_tiles, w_tiles, _, _, _ = ring
    T, N, _, _, _ = sizes
    WIDTH: gl.constexpr = w_tiles.shape[1] // 2 * STRIPS
    STEPS: gl.constexpr = (C.K + x_tiles.shape[2] - 1) // x_tiles.shape[2]
    PART: gl.constexpr = (STEPS + C.SPLIT - 1) // C.SPLIT
    CHUNK: gl.constexpr = C.PROMOTE if C.PROMOTE != 0 else PART
    DEPTH: gl.constexpr = 256 // x_tiles.dtype.primitive_bitwidth
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.SECOND if C.SECOND != 0 else WIDTH, DEPTH])
    ASIDE: gl.constexpr = gl.float32 if C.SCALE == 1 else gl.float16
    RESIDUAL: gl.constexpr = ep.residual is not None
    t = _group_row(t, T, C, GROUP)
    steps = STEPS if C.SPLIT == 1 else min(STEPS - part % C.SPLIT * PART, PART)
    if added[0] is not None:
        steps += _added_steps(added, part, C)
    if RESIDUAL:
        _fetch_residual(residuals, arrived, buffers, t, n, STRIPS, w_tiles.shape[1], C.SECOND, GROUP)
    acc = gl.zeros([64, WIDTH], gl.float32, WIDE)
    second = gl.zeros([64, C.SECOND], gl.float32, NARROW) if C.SECOND != 0 else 0
    if C.SCALE_ROWS is not None:
        acc, second, step = _add_blocks(ring, ep, acc, second, step, part % C.SPLIT * PART, steps, t, n, T, N, C, GROUP)
    elif CHUNK < PART:
        aside = gl.zeros([64, WIDTH], ASIDE, WIDE)
        second_aside = aside
        if C.SECOND != 0:
            second_aside = gl.zeros([64, C.SECOND], ASIDE, NARROW)
        for first in range(0, steps, CHUNK):
            last = min(first + CHUNK, steps)
            acc, second, step = _add_products(ring, acc, second, step, first, last, C, GROUP)
            if first > 0:
                acc += aside.to(gl.float32) * C.SCALE
                if C.SECOND != 0:
                    second += second_aside.to(gl.float32) * C.SCALE
            if last < steps:
                aside = (acc * (1 / C.SCALE)).to(ASIDE)
                if C.SECOND != 0:
                    second_aside = (second * (1 / C.SCALE)).to(ASIDE)
    else:
        acc, second, step = _add_products(ring, acc, second, step, 0, steps, C, GROUP)
    if RESIDUAL:
        mbarrier.wait(arrived, phase)
        phase ^= 1
    else:
        tma.store_wait(0)
    if C.SPLIT == 2:
        acc, second, last = _add_other_part(acc, second, workspace, part // C.SPLIT, part % C.SPLIT, C, GROUP)
        if last:
            _finish_tile(acc, second, outs, buffers, ep, t, n, T, N, C, STRIPS, GROUP)
    else:
        if ep.row_maxima is not None:
            _store_row_maxima(acc, second, ep, t, n, T, N, C)
        if needed != 0:
            _finish_tile(acc, second, outs, buffers, ep, t, n, T, N, C, STRIPS, GROUP)
    return step, phase


@gluon.jit
def _multiply_tiles(
    ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Task of one group of four warps: 64 rows of each of the program's tiles."""
    T, _, tiles, tiles_n, whole = sizes
    arrived = residual_full.index(GROUP)
    step = 0
    phase = 0
    if PDL:
        gdc_wait()  # these warps read the residual and write the output; the loading warp's wait does not cover them
    needed = 1
    if ep.row_maxima is not None:
        needed = gl.load(ep.logits_needed)
    for part in range(gl.program_id(0), whole * C.SPLIT, gl.num_programs(0)):
        t, n = _first(part // C.SPLIT, T, tiles_n, C)
        step, phase = _multiply_tile(
            ring, residuals, arrived, outs, buffers, ep, workspace, added, sizes, part, t, n, step, phase, needed, C, 2, GROUP
        )
    if C.STRIPS:
        for strip in range(gl.program_id(0), 2 * (tiles - whole), gl.num_programs(0)):
            t, n = _first_of_strip(strip, whole, T, tiles_n, C)
            step, phase = _multiply_tile(
                ring, residuals, arrived, outs, buffers, ep, workspace, added, sizes, 0, t, n, step, phase, needed, C, 1, GROUP
            )
    tma.store_wait(0)


@prepared
@gluon.jit(do_not_specialize=["T", "tiles", "whole"])
def _gemm_sm90_kernel(
    x, weight, second_weight, residual, second_residual, out, second_out, ep, sums_ptr, counters_ptr, T, N, tiles, tiles_n, whole,
    y, b, second_b, steps_ptr, C, PDL: gl.constexpr,
):  # fmt: skip
    """Write out [T, N] from x [T, K] and weight [N, K] ([2N, K] if gated). Each pair of strips has separate
    descriptors. With SCALE_ROWS, the scales are those of blocks: [⌈rows / SCALE_ROWS⌉, ⌈K / 128⌉], and of x [T, ⌈K / 128⌉]. With
    STRIPS, the tiles from `whole` on are computed strip by strip; else `whole` is `tiles`. y, b, steps: of `LowRank`, whose steps
    follow those of K.
    """
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    BUFFERS: gl.constexpr = C.GROUPS * (1 if residual is None and out.dtype.primitive_bitwidth == 16 else 2)
    TILES: gl.constexpr = C.STAGES if C.GROUPS == 2 else C.GROUPS * C.STAGES
    x_tiles = gl.allocate_shared_memory(x.dtype, [TILES, 128 if C.GROUPS == 2 else 64, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [C.STAGES, 2 * weight.block_type.shape[0], BLOCK_K], weight.layout)
    staging = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005, which Triton does not read
    second_tiles = w_tiles  # unused without a second pair
    second_staging = staging
    if C.SECOND != 0:
        second_tiles = gl.allocate_shared_memory(x.dtype, [C.STAGES, C.SECOND, BLOCK_K], second_weight.layout)
        second_staging = gl.allocate_shared_memory(out.dtype, [BUFFERS] + second_out.block_type.shape, second_out.layout)  # noqa: RUF005
    full, empty = ring_barriers(C.STAGES, C.GROUPS)
    residual_full = barriers(C.GROUPS, 1)
    fence_async_shared()
    ring = (x_tiles, w_tiles, second_tiles, full, empty)
    residuals, outs, buffers = (residual, second_residual), (out, second_out), (staging, second_staging)  # of each pair of strips
    workspace = (sums_ptr, counters_ptr)
    added = (y, b, second_b, steps_ptr)
    sizes = (T, N, tiles, tiles_n, whole)
    if C.GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL, 0)),
                (_multiply_tiles, (ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL, 1)),
                (_fetch_tiles, (x, weight, second_weight, added, ring, sizes, C, PDL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL, 0)),
                (_multiply_tiles, (ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL, 1)),
                (_multiply_tiles, (ring, residuals, residual_full, outs, buffers, ep, workspace, added, sizes, C, PDL, 2)),
                (_fetch_tiles, (x, weight, second_weight, added, ring, sizes, C, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


_ROWS = 128  # rows of a tile with two groups of warps, 64 for each
_ROWS_OF_THREE = 192
_ROW_BYTES = 128  # bytes of K in a step: the span of one TMA swizzle
_LARGEST = 448  # of float8_e4m3fn
_FINE = 512  # tokens; up to here, every number of tiles of rows has a separate configuration
_MOST_ROWS_IN_FP32 = 192  # weight rows of a tile whose sums are set aside in fp32
_LONGEST_WHOLE = 24  # steps in K; with fewer, splitting K gains nothing
# Weight rows of the two pairs of strips. With a gated activation, half of them are gate's.
WIDTHS = ((256, 0), (128, 64), (128, 16), (128, 0), (64, 32), (64, 16), (64, 0))
WIDTHS_OF_THREE = ((128, 128), *WIDTHS[1:])  # for three groups, whose registers cannot hold the sums of a single pair of 256
# For weights with a scale for each block: no strip reaches into a second block of 64 or 128 rows, and registers hold the products
# beside the sums. With three groups, registers suffice for 128 weight rows.
WIDTHS_OF_BLOCKS = ((128, 64), (128, 0), (64, 32), (64, 0))
GATED_WIDTHS_OF_BLOCKS = ((128, 0), (64, 0))
_MOST_ROWS_OF_THREE = 128
_FEWEST_SCALE_ROWS = 64


@dataclass(frozen=True)
class GemmSm90Config:
    """A launch configuration of `gemm_sm90`.

    Args:
        width, second: weight rows of the first and of the second pair of strips of a tile; `second` may be 0.
        num_stages: tiles in flight.
        promote: steps in K after which the sums are set aside; 0: never.
        programs: number of programs that share the tiles.
        split: number of parts of K: 1 or 2.
        groups: groups of warps: 2 or, if K is not split, 3.
    """

    width: int
    second: int
    num_stages: int
    promote: int
    programs: int
    split: int = 1
    groups: int = 2


def _pieces(width: int, second: int, groups: int, itemsize: int, residual: bool) -> tuple[int, int]:
    """How many output columns of each pair are stored at once.

    With fp32 outputs, and for the largest tiles, at most the span of one TMA swizzle, which leaves room for more tiles. With a
    residual a whole strip, because the residual arrives in the same buffers.
    """
    narrow = itemsize == 4 or (groups == 3 and width + second > 144 and not residual)
    most = _ROW_BYTES // 4 if narrow else width
    return min(width // 2, most), min(second // 2, most)


def derive_config(
    width: int, second: int, K: int, itemsize: int, residual: bool, programs: int, out_itemsize: int = 2, split: int = 1,
    groups: int = 2, blocks: bool = False,
) -> GemmSm90Config:  # fmt: skip
    """The configuration that follows from the weight rows of both pairs of strips, the parts of K and the groups of warps."""
    rows = width + second
    pieces = sum(_pieces(width, second, groups, out_itemsize, residual))
    buffers = groups * 64 * out_itemsize * pieces * (2 if residual or out_itemsize == 4 else 1)
    stages = (shared_limit(90) - 512 - buffers) // ((64 * groups + rows) * _ROW_BYTES)
    steps = cdiv(K * itemsize, _ROW_BYTES)
    split = min(split, steps)  # so that no part is empty
    steps, most = cdiv(steps, split), 8 if rows <= _MOST_ROWS_IN_FP32 else 16
    promote = cdiv(steps, cdiv(steps, most)) if itemsize == 1 and steps > most and not blocks else 0
    return GemmSm90Config(width, second, min(8, stages), promote, programs, split, groups)


def token_regime(T: int) -> int:
    """T rounded up to whole tiles (up to 512, like the buckets of CUDA graphs), else to a power of two."""
    return next_power_of_2(T) if T > _FINE else padded_tokens(T)


def padded_tokens(T: int) -> int:
    """T padded to whole tiles of rows."""
    return _ROWS_OF_THREE if _ROWS < T <= _ROWS_OF_THREE else cdiv(T, _ROWS) * _ROWS


def may_split(facts: ProductFacts, width: int, second: int, num_sms: int) -> bool:
    """Whether K can be split: two programs per tile run at once, each part is long enough, and registers can hold the sums."""
    tiles, most = cdiv(facts.T, _ROWS) * cdiv(facts.N, width + second), 144 if facts.itemsize == 1 else 192
    long = facts.K * facts.itemsize >= _LONGEST_WHOLE * _ROW_BYTES
    return not facts.gated and long and width + second <= most and 2 * tiles <= num_sms


def candidates(facts: ProductFacts, gpu: Gpu) -> list[GemmSm90Config]:
    """The configurations worth considering for a shape and a token regime.

    Three groups of warps need three tiles in flight in shared memory; with 16-bit values, a T that is a multiple of their tile's
    rows; with scales of blocks, registers for sums and products. The sums that other fp8 sets aside leave none for a third group.
    """
    T, K, itemsize, residual, out_itemsize, blocks = (
        facts.T, facts.K, facts.itemsize, facts.residual, facts.out_itemsize, facts.blocks
    )  # fmt: skip

    parts = 0 < facts.part < K

    def config(widths: tuple[int, int], split: int, groups: int) -> GemmSm90Config:
        c = derive_config(*widths, K, itemsize, residual, gpu.sms, out_itemsize, split, groups, blocks)
        return replace(c, promote=facts.part * itemsize // _ROW_BYTES if parts else 0) if facts.part else c

    all_widths = (GATED_WIDTHS_OF_BLOCKS if facts.gated else WIDTHS_OF_BLOCKS) if blocks else WIDTHS
    if parts:
        all_widths = tuple(widths for widths in all_widths if sum(widths) <= _MOST_ROWS_IN_FP32)
    configs = [config(widths, 1, 2) for widths in all_widths]
    if facts.splits and not facts.part:
        configs += [config(widths, 2, 2) for widths in all_widths if may_split(facts, *widths, gpu.sms)]
    of_three: list[tuple[int, int]] = []
    if blocks:
        of_three = [widths for widths in all_widths if sum(widths) <= _MOST_ROWS_OF_THREE]
    elif T % _ROWS_OF_THREE == 0 and itemsize == out_itemsize == 2 and not parts:
        of_three = list(WIDTHS_OF_THREE)
    configs += [c for c in (config(widths, 1, 3) for widths in of_three) if c.num_stages >= 3]
    return configs


def whole_tiles(tiles: int, programs: int) -> int:
    """How many tiles stay pairs of strips. The others would be a last round for at most half of the programs."""
    rest = tiles % programs
    return tiles - rest if tiles > programs and 2 * rest <= programs else tiles


def _computes_strips(c: GemmSm90Config, facts: ProductFacts) -> bool:
    """Whether tiles can be halved: two neighbouring strips, wide enough to keep tensor cores busy, of a plain 16-bit output."""
    plain = not facts.gated and not facts.blocks and facts.out_itemsize == 2
    return plain and c.width >= 128 and c.second == 0 and c.split == 1 and c.groups == 2


def predicted(c: GemmSm90Config, facts: ProductFacts) -> float:
    """Predicted microseconds: steps in K, rounds of tiles, a split (docs/decisions/linear-prefill.md).

    The step of three groups is a linear function of that of two. With scales of blocks, a step also waits for its products.
    """
    rows, blocks = c.width + c.second, facts.blocks
    tiles = cdiv(facts.T, 64 * c.groups) * cdiv(facts.N, rows // (2 if facts.gated else 1))
    step = 0.08 + 0.002 * c.width + (0.065 + 0.0013 * c.second if c.second else 0.0)
    if blocks:
        step = (step + 0.2) * (1.0 if c.groups == 2 else 1.2)
    elif c.groups == 3:
        step = 1.7 * step - 0.055
    steps = cdiv(facts.K * facts.itemsize, _ROW_BYTES)
    whole = whole_tiles(tiles, c.programs) if _computes_strips(c, facts) else tiles
    round_price, split_price = 1.5 if rows <= 192 else 3.0, 0.0 if c.split == 1 else 5.5 if blocks else 7.0
    time = cdiv(whole * c.split, c.programs) * (cdiv(steps, c.split) * step + round_price) + split_price
    if whole < tiles:
        time += steps * (step - 0.001 * c.width) + round_price / 2  # a round of strips
    return time


def rule(facts: ProductFacts, gpu: Gpu) -> GemmSm90Config:
    """The candidate with the least predicted time. It depends on T only through `token_regime`."""
    facts = facts._replace(T=token_regime(facts.T))
    return min(candidates(facts, gpu), key=lambda c: predicted(c, facts))


def _usable(c: GemmSm90Config, facts: ProductFacts) -> bool:
    """A bucket's name has no out_itemsize, so for logits a stored configuration may need too much shared memory."""
    return facts.out_itemsize == 2 and (facts.splits or c.split == 1)


def accepts(product: Product) -> bool:
    """Whether rows and addresses are aligned for TMA, a residual has 16 bits, as the output, and is not added to act(gate) · up,
    and blocks with a scale have enough rows."""
    x, residual, out = product.x, product.epilogue.residual, product.out
    if (product.scale_rows or _FEWEST_SCALE_ROWS) < _FEWEST_SCALE_ROWS:
        return False
    (_, N, K), itemsize, out_itemsize = product.shape, x.element_size(), out.element_size()
    addresses = x.data_ptr() | product.weight.data_ptr() | out.data_ptr()
    if residual is not None:
        if product.gated or residual.dtype != out.dtype or out_itemsize != 2:
            return False
        addresses |= residual.data_ptr()
    return itemsize <= 2 and (addresses | K * itemsize | N * out_itemsize) % 16 == 0


class _Plan(NamedTuple):
    """What the launches of products of one shape and token regime have in common.

    Args:
        columns: output columns of a tile.
        few_x_tile, x_tile: tiles of x, for at most 128 tokens and for more.
        weights, ends: tiles of the weight; and of the residual and the output. None: there is no second pair of strips.
        scale: factor of the sums that are set aside.
    """

    config: GemmSm90Config
    columns: int
    few_x_tile: Tile
    x_tile: Tile
    weights: tuple[Tile | None, Tile | None]
    ends: tuple[Tile | None, Tile | None]
    scale: float


def _plan(c: GemmSm90Config, facts: ProductFacts) -> _Plan:
    block_k, rows = _ROW_BYTES // facts.itemsize, c.width + c.second
    pieces = _pieces(c.width, c.second, c.groups, facts.out_itemsize, facts.residual)
    weights = [tma_tile(n // 2, block_k, facts.itemsize) if n else None for n in (c.width, c.second)]
    ends = [tma_tile(64, n, facts.out_itemsize) if n else None for n in pieces]
    few_x_tile, x_tile = (tma_tile(n, block_k, facts.itemsize) for n in (64, _ROWS if c.groups == 2 else 64))
    # Sums of fp8 products are at most _LARGEST² · K, and fp16 holds 65504.
    halvings = max(0, math.ceil(math.log2(_LARGEST**2 * facts.K / 65504))) if rows > _MOST_ROWS_IN_FP32 else 0
    columns = rows // 2 if facts.gated else rows
    return _Plan(c, columns, few_x_tile, x_tile, (weights[0], weights[1]), (ends[0], ends[1]), 2.0**halvings)


@cached_lookup
def _lookup_plan(device: torch.device, facts: ProductFacts) -> _Plan:
    return _plan(FAMILY.lookup(device, facts), facts)


def row_maxima_tiles(product: Product) -> int:
    """How many row maxima the kernel stores for each row. K is not split then."""
    T, N, _ = product.shape
    facts = product.facts(token_regime(T))._replace(splits=False)
    return cdiv(N, _lookup_plan(product.weight.device, facts).columns)


def gemm_sm90(product: Product, config: GemmSm90Config | None = None) -> None:
    """Write the output of a product of one or more tokens that `accepts` does not refuse. `dispatch` checks it before.

    Without a workspace, K is not split. Row maxima are stored only for products without a residual and an activation.
    """
    x, weight, out, ep, workspace = product.x, product.weight, product.out, product.epilogue, product.workspace
    residual, row_maxima, scale_rows, T = ep.residual, ep.row_maxima, product.scale_rows, x.shape[0]
    facts = product.facts(token_regime(T))
    N, K, gated = facts.N, facts.K, facts.gated
    plan = _lookup_plan(weight.device, facts) if config is None else _plan(config, facts)
    c, columns, few_x_tile, x_tile, weights, ends, sums_scale = plan
    tiles_n = cdiv(N, columns)
    tiles = cdiv(T, 64 * c.groups) * tiles_n
    strips = row_maxima is None and _computes_strips(c, facts)
    whole = whole_tiles(tiles, c.programs) if strips else tiles
    sums, counters = None, None
    if row_maxima is not None and (gated or residual is not None or c.split > 1 or row_maxima.shape[1] != tiles_n):
        expected, shown = f"a plain product, {tiles_n} places", f"{c}, {row_maxima.shape[1]} places"
        raise InputError("this product stores no row maxima", where="row_maxima", expected=expected, found=shown)
    if c.split > 1:
        if c.groups > 2:
            raise InputError("K is split for two groups of warps only", where="config", found=c)
        if workspace is None:
            raise InputError("missing", where="workspace", expected="room for the sums of a split K")
        sums, counters = workspace.sums(tiles * 2 * _ROWS * (c.width + c.second)), workspace.counters(2 * tiles)
    low_rank = product.low_rank
    y, b, steps = (None, None, None) if low_rank is None else (low_rank.y, low_rank.b, low_rank.steps)
    parts = ((weight, weights[0]), (weight, weights[1]), (residual, ends[0]), (residual, ends[1]), (out, ends[0]), (out, ends[1]))
    operands = [_tiled(tensor, tile) for tensor, tile in parts]
    x_tile = x_tile if T > _ROWS else few_x_tile
    in_place = residual is not None and begin_together(residual, out)  # then no row may be computed twice: see `_first`
    constants = _Constants(
        K, gated, scale_rows, columns, c.width // (2 if gated else 1), c.second, c.num_stages, not in_place, strips, c.promote,
        sums_scale, c.split, c.groups,
    )  # fmt: skip
    _gemm_sm90_kernel[(min(tiles * c.split, c.programs),)](
        Tiled(x, x_tile), *operands, ep, sums, counters, T, N, tiles, tiles_n, whole, _tiled(y, x_tile), _tiled(b, weights[0]),
        _tiled(b, weights[1]), steps, C=constants, **launch_options(4, 1, product.pdl),
    )  # fmt: skip


def _tiled(tensor: Tensor | None, tile: Tile | None) -> Tiled | None:
    return None if tensor is None or tile is None else Tiled(tensor, tile)


FAMILY = Family(
    "gemm_sm90", GemmSm90Config, (__file__,), ("T", "N", "K", "itemsize", "gated", "residual", "blocks"), rule, candidates,
    token_regime, _usable,
)  # fmt: skip
