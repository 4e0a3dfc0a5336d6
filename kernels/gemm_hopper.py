"""The GEMM of `gemm.py` for Hopper (compute capability 9.0): persistent programs whose warps have different roles.

One warp fetches tiles by TMA, two groups of four warps multiply, each 64 rows of a tile: fetching goes on while the groups
scale, activate and store. It takes Gluon, since Triton's own pipeline lets all warps wait for each other at every step.

A tile has 128 rows and a pair of strips of columns: neighbours or, for a gated activation, a strip of gate and the same strip of
up. A second pair of narrower strips gives the widths between powers of two with which whole rounds of tiles come out even.

Hopper's tensor cores add fp8 products in about 14 bits. So every 1024 or 2048 of K the sums are set aside: in fp32, or, where
registers do not suffice, in fp16, divided by what keeps the largest possible sum finite.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minirt.kernels.common import processors, shared_limit
from minirt.kernels.tuning import Tunable, bucket

# Renamed after Triton 3.6.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_put = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

_ROWS = 128  # of a tile: 64 for each group of warps
_ROW_BYTES = 128  # of K in a step: what one swizzle of TMA spans
_LARGEST = 448  # of float8_e4m3fn
# Columns of the two pairs of strips; with a gated activation, half of them are of gate.
WIDTHS = ((256, 0), (128, 64), (128, 16), (128, 0), (64, 32), (64, 16), (64, 0))


@dataclass(frozen=True)
class HopperConfig:
    """Columns of both pairs of strips of a tile (`more` may be 0), tiles on their way, steps in K before sums are set aside
    (0: never), and how many programs share the tiles."""

    width: int
    more: int
    num_stages: int
    promote: int
    programs: int


TUNABLE = Tunable("gemm_hopper", HopperConfig, (__file__,))


@gluon.jit
def _first(tile, T, tiles_n, COLUMNS: gl.constexpr, SHIFT: gl.constexpr):
    """The first row and the first column of a tile, in groups of 8 tiles of rows, so that neighbours share weights in L2.

    With SHIFT the last rows' tile starts early enough to be full, because TMA is slow with rows past the end: some rows are
    computed twice, with the same result.
    """
    group = tile // (8 * tiles_n)
    rest = tile % (8 * tiles_n)
    group_rows = min((T + 127) // 128 - group * 8, 8)
    t = (group * 8 + rest % group_rows) * 128
    if SHIFT:
        t = min(t, max(T - 128, 0))
    return t, rest // group_rows * COLUMNS


@gluon.jit
def _fetch_pair(weight, n, k, N, bar, tiles, ACTIVATION: gl.constexpr):
    """Fetch two strips of the weight from row n on: neighbours, or of gate and of up."""
    STRIP: gl.constexpr = tiles.shape[0] // 2
    _fetch(weight, [n, k], bar, tiles.slice(0, STRIP))
    _fetch(weight, [n + (N if ACTIVATION is not None else STRIP), k], bar, tiles.slice(STRIP, STRIP))


@gluon.jit
def _fetch_tiles(
    x, weight, more_weight, x_tiles, w_tiles, more_tiles, full, empty, T, N, tiles, tiles_n,
    K: gl.constexpr, ACTIVATION: gl.constexpr, MORE: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = x_tiles.shape[0]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    WIDTH: gl.constexpr = w_tiles.shape[1]
    FIRST: gl.constexpr = WIDTH // (2 if ACTIVATION is not None else 1)  # columns of the first pair
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        t, n = _first(tile, T, tiles_n, COLUMNS, SHIFT)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (128 + WIDTH + MORE) * BLOCK_K * x.dtype.primitive_bitwidth // 8)
            _fetch(x, [t, k], bar, x_tiles.index(stage))
            _fetch_pair(weight, n, k, N, bar, w_tiles.index(stage), ACTIVATION)
            if MORE != 0:
                _fetch_pair(more_weight, n + FIRST, k, N, bar, more_tiles.index(stage), ACTIVATION)
            step += 1


@gluon.jit
def _add_products(
    x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, first, last, MORE: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Sums of the products of the steps `first` … `last` of a tile, for 64 of its rows; what has been read is released."""
    STAGES: gl.constexpr = x_tiles.shape[0]
    for i in range(first, last):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = x_tiles.index(stage).slice(64 * GROUP, 64)
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
def _activate(x, ACTIVATION: gl.constexpr):
    """SiLU, or GELU in its erf or tanh form, of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x / (1.0 + gl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@gluon.jit
def _scaled(acc, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, inside):
    if scale_ptr is not None:
        acc *= gl.load(x_scale_ptr + t, mask=t < T, other=0.0)[:, None]
        acc *= gl.load(scale_ptr + n, mask=inside, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _store(out, value, t, n, buffer):
    buffer.store(value.to(out.dtype))
    fence_async_shared()
    _put(out, [t, n], buffer)


@gluon.jit
def _finish_pair(
    acc, out, buffer, second_buffer, x_scale_ptr, scale_ptr, bias_ptr, first_t, first_n, T, N, DEPTH: gl.constexpr,
    ACTIVATION: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Scale, activate or add, and store a pair of strips. With RESIDUAL that is in the buffers."""
    STRIP: gl.constexpr = acc.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STRIP, DEPTH])
    left, right = acc.reshape([64, 2, STRIP]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, HALF, assert_trivial=True)
    right = gl.convert_layout(right, HALF, assert_trivial=True)
    t = first_t + gl.arange(0, 64, gl.SliceLayout(1, HALF))
    n = first_n + gl.arange(0, STRIP, gl.SliceLayout(0, HALF))
    left = _scaled(left, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, n < N)
    if ACTIVATION is not None:
        right = _scaled(right, x_scale_ptr, scale_ptr, bias_ptr, t, n + N, T, n < N)
        left = _activate(left, ACTIVATION) * right
        tma.store_wait(0)
        _store(out, left, first_t, first_n, buffer)
    else:
        right = _scaled(right, x_scale_ptr, scale_ptr, bias_ptr, t, n + STRIP, T, n + STRIP < N)
        if RESIDUAL:
            _store(out, left + buffer.load(HALF).to(gl.float32), first_t, first_n, buffer)
            right += second_buffer.load(HALF).to(gl.float32)
            _store(out, right, first_t, first_n + STRIP, second_buffer)
        else:
            tma.store_wait(0)
            _store(out, left, first_t, first_n, buffer)
            tma.store_wait(0)
            _store(out, right, first_t, first_n + STRIP, buffer)


@gluon.jit
def _multiply_tiles(
    x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full, out, more_out, staging,
    more_staging, x_scale_ptr, scale_ptr, bias_ptr, T, N, tiles, tiles_n, K: gl.constexpr, ACTIVATION: gl.constexpr,
    MORE: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr, PROMOTE: gl.constexpr, SCALE: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = w_tiles.shape[1]
    FIRST: gl.constexpr = WIDTH // (2 if ACTIVATION is not None else 1)  # columns of the first pair
    STEPS: gl.constexpr = (K + x_tiles.shape[2] - 1) // x_tiles.shape[2]
    CHUNK: gl.constexpr = PROMOTE if PROMOTE != 0 else STEPS
    DEPTH: gl.constexpr = 256 // x_tiles.dtype.primitive_bitwidth
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, DEPTH])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE if MORE != 0 else WIDTH, DEPTH])
    ASIDE: gl.constexpr = gl.float32 if SCALE == 1 else gl.float16
    RESIDUAL: gl.constexpr = residual is not None
    SECOND: gl.constexpr = 2 * GROUP + 1 if RESIDUAL else GROUP  # without a residual, a group has one buffer
    BUFFER: gl.constexpr = 2 * GROUP if RESIDUAL else GROUP
    arrived = residual_full.index(GROUP)
    step = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        t, n = _first(tile, T, tiles_n, COLUMNS, SHIFT)
        t += 64 * GROUP
        if RESIDUAL:
            tma.store_wait(0)
            mbarrier.expect(arrived, 64 * (WIDTH + MORE) * 2)
            _fetch(residual, [t, n], arrived, staging.index(BUFFER))
            _fetch(residual, [t, n + WIDTH // 2], arrived, staging.index(SECOND))
            if MORE != 0:
                _fetch(more_residual, [t, n + WIDTH], arrived, more_staging.index(BUFFER))
                _fetch(more_residual, [t, n + WIDTH + MORE // 2], arrived, more_staging.index(SECOND))
        acc = gl.zeros([64, WIDTH], gl.float32, WIDE)
        more = gl.zeros([64, MORE], gl.float32, NARROW) if MORE != 0 else 0
        if CHUNK < STEPS:
            aside = gl.zeros([64, WIDTH], ASIDE, WIDE)
            more_aside = aside
            if MORE != 0:
                more_aside = gl.zeros([64, MORE], ASIDE, NARROW)
            for first in range(0, STEPS, CHUNK):
                last = min(first + CHUNK, STEPS)
                acc, more, step = _add_products(
                    x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, first, last, MORE, GROUP
                )
                if first > 0:
                    acc += aside.to(gl.float32) * SCALE
                    if MORE != 0:
                        more += more_aside.to(gl.float32) * SCALE
                if last < STEPS:
                    aside = (acc * (1 / SCALE)).to(ASIDE)
                    if MORE != 0:
                        more_aside = (more * (1 / SCALE)).to(ASIDE)
        else:
            acc, more, step = _add_products(
                x_tiles, w_tiles, more_tiles, full, empty, acc, more, step, 0, STEPS, MORE, GROUP
            )
        if RESIDUAL:
            mbarrier.wait(arrived, phase)
            phase ^= 1
        _finish_pair(
            acc, out, staging.index(BUFFER), staging.index(SECOND), x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N, DEPTH,
            ACTIVATION, RESIDUAL,
        )  # fmt: skip
        if MORE != 0:
            _finish_pair(
                more, more_out, more_staging.index(BUFFER), more_staging.index(SECOND), x_scale_ptr, scale_ptr, bias_ptr,
                t, n + FIRST, T, N, DEPTH, ACTIVATION, RESIDUAL,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "tiles"])
def _hopper_kernel(
    x, weight, more_weight, residual, more_residual, out, more_out, x_scale_ptr, scale_ptr, bias_ptr, T, N, tiles, tiles_n,
    K: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, SHIFT: gl.constexpr, PROMOTE: gl.constexpr,
    SCALE: gl.constexpr,
):  # fmt: skip
    """out [T, N] of x [T, K] and weight [N, K], or [2N, K] with ACTIVATION: descriptors, for each pair of strips its own."""
    STRIP: gl.constexpr = weight.block_type.shape[0]
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    MORE: gl.constexpr = more_weight.block_type.shape[0] if more_weight is not None else 0
    COLUMNS: gl.constexpr = (STRIP + MORE) * (1 if ACTIVATION is not None else 2)
    BUFFERS: gl.constexpr = 2 if residual is None else 4
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 128, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * STRIP, BLOCK_K], weight.layout)
    staging = gl.allocate_shared_memory(out.dtype, [BUFFERS, 64, STRIP], out.layout)
    more_tiles = w_tiles  # stand in where there is no second pair
    more_staging = staging
    if MORE != 0:
        more_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * MORE, BLOCK_K], more_weight.layout)
        more_staging = gl.allocate_shared_memory(out.dtype, [BUFFERS, 64, MORE], more_out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    residual_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(residual_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full,
             out, more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, T, N, tiles, tiles_n, K, ACTIVATION,
             2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, 0)),
            (_multiply_tiles, (x_tiles, w_tiles, more_tiles, full, empty, residual, more_residual, residual_full,
             out, more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, T, N, tiles, tiles_n, K, ACTIVATION,
             2 * MORE, COLUMNS, SHIFT, PROMOTE, SCALE, 1)),
            (_fetch_tiles, (x, weight, more_weight, x_tiles, w_tiles, more_tiles, full, empty, T, N, tiles, tiles_n, K,
             ACTIVATION, 2 * MORE, COLUMNS, SHIFT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def config_for(width: int, more: int, K: int, itemsize: int, residual: bool, programs: int) -> HopperConfig:
    """What follows from the columns of both pairs of strips."""
    columns = width + more
    buffers = 2 * 64 * 2 * (columns if residual else columns // 2)  # of 16-bit outputs
    stages = (shared_limit(90) - 512 - buffers) // ((_ROWS + columns) * _ROW_BYTES)
    steps, most = triton.cdiv(K * itemsize, _ROW_BYTES), 8 if columns <= 192 else 16
    promote = triton.cdiv(steps, triton.cdiv(steps, most)) if itemsize == 1 and steps > most else 0
    return HopperConfig(width, more, min(8, stages), promote, programs)


def choose_config(
    T: int, N: int, K: int, itemsize: int, gated: bool, residual: bool, num_processors: int
) -> HopperConfig:
    """The configuration for a shape: of T only the power of two above it counts. N counts the outputs.

    The widths that take the least time, in a model fitted to measurements on an H200 (bench/LOG.md): microseconds a step in K,
    and a round of tiles.
    """
    rows, steps = triton.cdiv(triton.next_power_of_2(T), _ROWS), triton.cdiv(K * itemsize, _ROW_BYTES)

    def time(widths: tuple[int, int]) -> float:
        width, more = widths
        tiles = rows * triton.cdiv(N, (width + more) // (2 if gated else 1))
        step = 0.08 + 0.002 * width + (0.055 + 0.0013 * more if more else 0.0)
        return triton.cdiv(tiles, num_processors) * (steps * step + 1.5)

    return config_for(*min(WIDTHS, key=time), K, itemsize, residual, num_processors)


@functools.cache
def configured(
    device: torch.device, tokens: int, N: int, K: int, itemsize: int, gated: bool, residual: bool
) -> HopperConfig:
    """The configuration that was tuned for a shape with `tokens`, a power of two, or else the rule's."""
    tuned = TUNABLE.find(device, bucket(T=tokens, N=N, K=K, itemsize=itemsize, gated=gated, residual=residual))
    return tuned or choose_config(tokens, N, K, itemsize, gated, residual, processors(device))


def suits(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    """Whether TMA can move the operands: rows and addresses aligned to 16 bytes, output and residual alike and of 16 bits."""
    ends = [out] if residual is None else [out, residual]
    aligned = all(t.data_ptr() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 for t in (x, weight, *ends))
    return aligned and x.element_size() <= 2 and all(t.element_size() == 2 and t.dtype == out.dtype for t in ends)


def gemm_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None,
    scale: Tensor | None,
    x_scale: Tensor | None,
    config: HopperConfig | None = None,
) -> None:
    """`gemm`, or `gemm_gated` with an activation, of operands that `suits` and that fit each other; T is at least 1."""
    (T, K), N = x.shape, out.shape[1]
    gated = activation is not None
    tokens = triton.next_power_of_2(T)
    c = config or configured(x.device, tokens, N, K, x.element_size(), gated, residual is not None)
    tiles_n = triton.cdiv(N, (c.width + c.more) // (2 if gated else 1))
    tiles = triton.cdiv(T, _ROWS) * tiles_n
    block_k = _ROW_BYTES // x.element_size()
    operands = [
        _described(t, [strip, block_k] if t is weight else [64, strip])
        for t in (weight, residual, out)
        for strip in (c.width // 2, c.more // 2)
    ]
    in_place = residual is not None and residual.data_ptr() == out.data_ptr()  # then no row may be computed twice
    # Sums of fp8 products are at most _LARGEST² · K, and fp16 holds 65504.
    halvings = max(0, math.ceil(math.log2(_LARGEST**2 * K / 65504))) if c.width + c.more > 192 else 0
    _hopper_kernel[(min(tiles, c.programs),)](
        _described(x, [_ROWS, block_k]), *operands, x_scale, scale, bias, T, N, tiles, tiles_n, K=K, ACTIVATION=activation,
        STAGES=c.num_stages, SHIFT=not in_place, PROMOTE=c.promote, SCALE=2.0**halvings, num_warps=4,
    )  # fmt: skip


def _described(tensor: Tensor | None, tile: list[int]) -> TensorDescriptor | None:
    if tensor is None or tile[0] == 0 or tile[1] == 0:
        return None
    dtype = gl.float8e4nv if tensor.dtype == torch.float8_e4m3fn else gl.float16  # only the width counts
    return TensorDescriptor.from_tensor(tensor, tile, gl.NVMMASharedLayout.get_default_for(tile, dtype))
