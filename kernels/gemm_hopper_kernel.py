"""The kernel of `gemm_hopper.py`, in Gluon: what the fetching warp does, what the multiplying groups do, and how they meet."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.gemm_hopper_epilogue import finish_tile, leave_peaks
from minirt.kernels.hopper import fetch, synchronize


@gluon.jit
def _first(tile, T, tiles_n, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr):
    """The first row and the first column of a tile, in groups of 8 tiles of rows, so that neighbours share weights in L2.

    With SHIFT the last rows' tile starts early enough to be full, because TMA is slow with rows past the end: some rows are
    computed twice, with the same result.
    """
    group = tile // (8 * tiles_n)
    rest = tile % (8 * tiles_n)
    group_rows = min((T + ROWS - 1) // ROWS - group * 8, 8)
    t = (group * 8 + rest % group_rows) * ROWS
    if SHIFT:
        t = min(t, max(T - ROWS, 0))
    return t, rest // group_rows * COLUMNS


@gluon.jit
def _group_row(t, T, SHIFT: gl.constexpr, GROUP: gl.constexpr):
    """The first row of a group of warps in the tile that starts at row t: with fewer rows than a tile's too, 64, full."""
    row = t + 64 * GROUP
    if SHIFT:
        row = min(row, max(T - 64, 0))
    return row


@gluon.jit
def _group_rows(x_tiles, stage, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """A group's 64 rows of x in shared memory: of two groups' tile a half, of three's a tile, as shapes are powers of two."""
    if GROUPS == 2:
        return x_tiles.index(stage).slice(64 * GROUP, 64)
    else:
        return x_tiles.index(GROUPS * stage + GROUP)


@gluon.jit
def _fetch_rows(x, t, k, T, bar, x_tiles, stage, SHIFT: gl.constexpr, GROUPS: gl.constexpr):
    """Fetch a tile's rows of x: all at once, or those of each group of warps, of which there may be fewer than a tile has."""
    if x.block_type.shape[0] == 128:
        fetch(x, [t, k], bar, x_tiles.index(stage))
    else:
        fetch(x, [t, k], bar, _group_rows(x_tiles, stage, 0, GROUPS))
        for group in gl.static_range(1, GROUPS):
            fetch(x, [_group_row(t, T, SHIFT, group), k], bar, _group_rows(x_tiles, stage, group, GROUPS))


@gluon.jit
def _fetch_pair(weight, n, k, N, bar, tiles, ACTIVATION: gl.constexpr):
    """Fetch two strips of the weight from row n on: neighbours, or of gate and of up."""
    STRIP: gl.constexpr = tiles.shape[0] // 2
    fetch(weight, [n, k], bar, tiles.slice(0, STRIP))
    fetch(weight, [n + (N if ACTIVATION is not None else STRIP), k], bar, tiles.slice(STRIP, STRIP))


@gluon.jit
def _fetch_tiles(
    x, weight, more_weight, x_tiles, w_tiles, more_tiles, full, empty, T, N, tiles, tiles_n,
    K: gl.constexpr, ACTIVATION: gl.constexpr, MORE: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = w_tiles.shape[0]
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    WIDTH: gl.constexpr = w_tiles.shape[1]
    FIRST: gl.constexpr = WIDTH // (2 if ACTIVATION is not None else 1)  # columns of the first pair
    BYTES: gl.constexpr = (64 * GROUPS + WIDTH + MORE) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    PART: gl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    step = 0
    ahead = 0
    if PDL:
        # The kernel before may still be writing x, and never writes weights: those that there is room for come ahead.
        t, n = _first(gl.program_id(0) // SPLIT, T, tiles_n, 64 * GROUPS, COLUMNS, SHIFT)
        first = gl.program_id(0) % SPLIT * PART
        ahead += min(STAGES, (min(first + PART, K) - first + BLOCK_K - 1) // BLOCK_K)
        for i in range(ahead):
            bar = full.index(i)
            mbarrier.expect(bar, BYTES)
            _fetch_pair(weight, n, first + i * BLOCK_K, N, bar, w_tiles.index(i), ACTIVATION)
            if MORE != 0:
                _fetch_pair(more_weight, n + FIRST, first + i * BLOCK_K, N, bar, more_tiles.index(i), ACTIVATION)
        gdc_wait()
        for i in range(ahead):
            _fetch_rows(x, t, first + i * BLOCK_K, T, full.index(i), x_tiles, i, SHIFT, GROUPS)
        step += ahead
    for part in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        t, n = _first(part // SPLIT, T, tiles_n, 64 * GROUPS, COLUMNS, SHIFT)
        first = part % SPLIT * PART
        # `ahead = 0` at the loop's end would not do: Triton 3.6 drops it, and the steps that it skips in every tile never arrive.
        skipped = gl.where(part == gl.program_id(0), ahead, 0)
        for k in range(first + skipped * BLOCK_K, min(first + PART, K), BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            _fetch_rows(x, t, k, T, bar, x_tiles, stage, SHIFT, GROUPS)
            _fetch_pair(weight, n, k, N, bar, w_tiles.index(stage), ACTIVATION)
            if MORE != 0:
                _fetch_pair(more_weight, n + FIRST, k, N, bar, more_tiles.index(stage), ACTIVATION)
            step += 1
    if PDL:
        # Only now, with what is left to multiply as time to start in: its programs would crowd on the first idle processors.
        gdc_launch_dependents()


@gluon.jit
def _add_products(
    x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, first, last, MORE: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Sums of the products of the steps `first` … `last` of a tile, for 64 of its rows; what has been read is released."""
    STAGES: gl.constexpr = w_tiles.shape[0]
    for i in range(first, last):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = _group_rows(x_tiles, stage, GROUP, GROUPS)
        acc = warpgroup_mma(x, w_tiles.index(stage).permute((1, 0)), acc, use_acc=i > first, is_async=True)
        if MORE != 0:
            more = warpgroup_mma(x, more_tiles.index(stage).permute((1, 0)), more, use_acc=i > first, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=i > first)  # of the step before
        step += 1
    if MORE != 0:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, more, step


@gluon.jit
def _offsets(acc):
    """Places in memory for sums acc [64, columns], so that a warp's stores are contiguous."""
    LAYOUT: gl.constexpr = acc.type.layout
    t = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    return (t // 8 % 2 * 256 + t // 16 * 64 + t % 8 * 8) + (n // 8 * 512 + n % 8)


@gluon.jit
def _add_other_part(acc, more, sums_ptr, counters_ptr, tile, part, MORE: gl.constexpr, GROUP: gl.constexpr):
    """Leave the sums for the other part's program; with its sums added, and True, if it was here before."""
    WIDTH: gl.constexpr = acc.shape[1]
    SIZE: gl.constexpr = 64 * (WIDTH + MORE)
    sums_ptr += (2 * tile + GROUP) * 2 * SIZE
    at = _offsets(acc)
    # Past L1 on both sides: the sums come through L2.
    gl.store(sums_ptr + part * SIZE + at, acc, cache_modifier=".cg")
    if MORE != 0:
        more_at = 64 * WIDTH + _offsets(more)
        gl.store(sums_ptr + part * SIZE + more_at, more, cache_modifier=".cg")
    synchronize()  # every thread's stores come before the one thread's release
    last = gl.atomic_add(counters_ptr + 2 * tile + GROUP, 1, sem="acq_rel", scope="gpu") == 1
    if last:
        acc += gl.load(sums_ptr + (1 - part) * SIZE + at, cache_modifier=".cg")
        if MORE != 0:
            more += gl.load(sums_ptr + (1 - part) * SIZE + more_at, cache_modifier=".cg")
        gl.store(counters_ptr + 2 * tile + GROUP, 0)
    return acc, more, last


@gluon.jit
def _multiply_tiles(
    x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out, more_out, staging,
    more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr, needed_ptr, stride, T, N, tiles, tiles_n,
    K: gl.constexpr, ACTIVATION: gl.constexpr, MORE: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
    PROMOTE: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr, GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = w_tiles.shape[1]
    FIRST: gl.constexpr = WIDTH // (2 if ACTIVATION is not None else 1)  # columns of the first pair
    STEPS: gl.constexpr = (K + x_tiles.shape[2] - 1) // x_tiles.shape[2]
    PART: gl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    CHUNK: gl.constexpr = PROMOTE if PROMOTE != 0 else PART
    DEPTH: gl.constexpr = 256 // x_tiles.dtype.primitive_bitwidth
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE != 0 else WIDTH, DEPTH])
    ASIDE: gl.constexpr = gl.float32 if SCALE == 1 else gl.float16
    RESIDUAL: gl.constexpr = residual is not None
    arrived = residual_full.index(GROUP)
    step = 0
    phase = 0
    if PDL:
        gdc_wait()  # the residual is read, and the output written, without waiting for x
    needed = 1
    if peaks_ptr is not None:
        needed = gl.load(needed_ptr)
    for part in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        t, n = _first(part // SPLIT, T, tiles_n, 64 * GROUPS, COLUMNS, SHIFT)
        t = _group_row(t, T, SHIFT, GROUP)
        steps = STEPS if SPLIT == 1 else min(STEPS - part % SPLIT * PART, PART)
        if RESIDUAL:
            tma.store_wait(0)
            mbarrier.expect(arrived, 64 * (WIDTH + MORE) * 2)
            fetch(residual, [t, n], arrived, staging.index(2 * GROUP))
            fetch(residual, [t, n + WIDTH // 2], arrived, staging.index(2 * GROUP + 1))
            if MORE != 0:
                fetch(more_residual, [t, n + WIDTH], arrived, more_staging.index(2 * GROUP))
                fetch(more_residual, [t, n + WIDTH + MORE // 2], arrived, more_staging.index(2 * GROUP + 1))
        acc = gl.zeros([64, WIDTH], gl.float32, WIDE)
        more = gl.zeros([64, MORE], gl.float32, NARROW) if MORE != 0 else 0
        if CHUNK < PART:
            aside = gl.zeros([64, WIDTH], ASIDE, WIDE)
            more_aside = aside
            if MORE != 0:
                more_aside = gl.zeros([64, MORE], ASIDE, NARROW)
            for first in range(0, steps, CHUNK):
                last = min(first + CHUNK, steps)
                acc, more, step = _add_products(
                    x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, first, last, MORE, GROUP, GROUPS
                )
                if first > 0:
                    acc += aside.to(gl.float32) * SCALE
                    if MORE != 0:
                        more += more_aside.to(gl.float32) * SCALE
                if last < steps:
                    aside = (acc * (1 / SCALE)).to(ASIDE)
                    if MORE != 0:
                        more_aside = (more * (1 / SCALE)).to(ASIDE)
        else:
            acc, more, step = _add_products(
                x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, 0, steps, MORE, GROUP, GROUPS
            )
        if RESIDUAL:
            mbarrier.wait(arrived, phase)
            phase ^= 1
        else:
            tma.store_wait(0)
        if SPLIT == 2:
            acc, more, last = _add_other_part(
                acc, more, sums_ptr, counters_ptr, part // SPLIT, part % SPLIT, MORE, GROUP
            )
            if last:
                finish_tile(
                    acc, more, out, more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N,
                    ACTIVATION, RESIDUAL, MORE, FIRST, GROUP, GROUPS,
                )  # fmt: skip
        else:
            if peaks_ptr is not None:
                leave_peaks(acc, more, peaks_ptr, stride, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N, MORE, COLUMNS)
            if needed != 0:
                finish_tile(
                    acc, more, out, more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N,
                    ACTIVATION, RESIDUAL, MORE, FIRST, GROUP, GROUPS,
                )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "tiles"])
def _hopper_kernel(
    x, weight, more_weight, residual, more_residual, out, more_out, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr,
    peaks_ptr, needed_ptr, stride, T, N, tiles, tiles_n, K: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
    SHIFT: gl.constexpr, PROMOTE: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [T, N] of x [T, K] and weight [N, K], or [2N, K] with ACTIVATION: descriptors, for each pair of strips its own.

    With PDL nothing is written, and nothing but weights read, before all earlier kernels of the stream have ended: each program
    waits for the one before, which ended after its own wait. So no memory is reused too early, whoever used it.
    """
    STRIP: gl.constexpr = weight.block_type.shape[0]
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    MORE: gl.constexpr = more_weight.block_type.shape[0] if more_weight is not None else 0
    COLUMNS: gl.constexpr = (STRIP + MORE) * (1 if ACTIVATION is not None else 2)
    BUFFERS: gl.constexpr = GROUPS * (1 if residual is None and out.dtype.primitive_bitwidth == 16 else 2)
    TILES: gl.constexpr = STAGES if GROUPS == 2 else GROUPS * STAGES
    x_tiles = gl.allocate_shared_memory(x.dtype, [TILES, 128 if GROUPS == 2 else 64, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * STRIP, BLOCK_K], weight.layout)
    staging = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005, which Triton does not read
    more_tiles = w_tiles  # stand in where there is no second pair
    more_staging = staging
    if MORE != 0:
        more_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * MORE, BLOCK_K], more_weight.layout)
        more_staging = gl.allocate_shared_memory(out.dtype, [BUFFERS] + more_out.block_type.shape, more_out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    residual_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(residual_full.index(i), count=1)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out,
                 more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr,
                 needed_ptr, stride, T, N, tiles, tiles_n, K, ACTIVATION, 2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, SPLIT,
                 PDL, GROUPS, 0)),
                (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out,
                 more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr,
                 needed_ptr, stride, T, N, tiles, tiles_n, K, ACTIVATION, 2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, SPLIT,
                 PDL, GROUPS, 1)),
                (_fetch_tiles, (x, weight, more_weight, x_tiles, w_tiles, more_tiles, full, empty, T, N, tiles, tiles_n, K,
                 ACTIVATION, 2 * MORE, COLUMNS, SHIFT, SPLIT, PDL, GROUPS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out,
                 more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr,
                 needed_ptr, stride, T, N, tiles, tiles_n, K, ACTIVATION, 2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, SPLIT,
                 PDL, GROUPS, 0)),
                (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out,
                 more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr,
                 needed_ptr, stride, T, N, tiles, tiles_n, K, ACTIVATION, 2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, SPLIT,
                 PDL, GROUPS, 1)),
                (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out,
                 more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, sums_ptr, counters_ptr, peaks_ptr,
                 needed_ptr, stride, T, N, tiles, tiles_n, K, ACTIVATION, 2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, SPLIT,
                 PDL, GROUPS, 2)),
                (_fetch_tiles, (x, weight, more_weight, x_tiles, w_tiles, more_tiles, full, empty, T, N, tiles, tiles_n, K,
                 ACTIVATION, 2 * MORE, COLUMNS, SHIFT, SPLIT, PDL, GROUPS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
