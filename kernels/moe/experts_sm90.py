"""The products of a mixture of experts for Hopper (compute capability 9.0): persistent and warp-specialized.

The weights are on the M side of the tensor cores' MMA, the tokens of one expert on its N side: acc [n, t]. So a tile can have as
few as 8 tokens, and an expert with few tokens costs little more than reading its weights. One warp fetches tiles by TMA. One or
two groups of four warps multiply, each for 64 rows of two strips of the weight: strips of gate and up, or two neighbouring
strips. Fetching continues while the groups activate and store.

A tile of many tokens has 128 or 64 rows of x, and `extra` rows that a second MMA multiplies. So heights between the powers of two
are possible, and one tile can hold all tokens of most experts: an expert's weights then pass from L2 to an SM once.

The rows of x are in the order of `Routing.order`, so the tokens of an expert are contiguous. A tile that reaches past the end of
an expert's tokens also multiplies rows of the next expert. MMA columns are independent, and those results are not stored.

If the weights have a scale for each block, a step in K is one block of columns, as in `gemm_sm90`. While a group adds the
products of one strip, the tensor cores compute those of the other. The number of tiles is read on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.compile.tuning import Family, cached_lookup
from minirt.kernels.hopper.ring import release, ring_barriers, wait_empty, wait_full
from minirt.kernels.hopper.tiles import halves
from minirt.kernels.hopper.tma import tma_load, tma_tile
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, shared_limit, sm_count
from minirt.kernels.linear.epilogue import finish, load_rows, load_tokens
from minirt.kernels.linear.product import Product, ProductFacts, scale_rows
from minirt.kernels.moe.mixture import Mixture
from minirt.kernels.moe.route import Routing, token_regime
from minirt.kernels.prepared import Tile, Tiled, compile_time, prepared

_ROW_BYTES = 128  # bytes of K in a step: the span of one TMA swizzle
_PROMOTE = 2048  # elements of K after which sums of fp8 products are set aside, see `gemm_sm90`


@dataclass(frozen=True)
class ExpertsSm90Config:
    """A launch configuration.

    Args:
        block_t: rows of x in a tile that one MMA multiplies, 8 to 128.
        strip: rows of one of the two strips of the weight in a tile: 64 for each group of warps, of which there are one or two.
        num_stages: tiles in flight.
        programs: programs that share an SM.
        extra: further rows of x in a tile, fewer than block_t.
    """

    block_t: int
    strip: int
    num_stages: int
    programs: int = 1
    extra: int = 0

    @property
    def rows(self) -> int:
        """Rows of x in a tile."""
        return self.block_t + self.extra


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        STRIP: rows of one of the two strips of a tile. COLUMNS: output columns of a tile.
        EXTRA: further rows of x in a tile.
        PROMOTE: steps in K after which sums are set aside.
    """

    K: int
    GATED: bool
    SCALE_ROWS: int | None
    STRIP: int
    COLUMNS: int
    EXTRA: int
    STAGES: int
    PROMOTE: int


@gluon.jit
def work_item(routing, sizes, item, C):
    """A work item: (expert, first place, end of the expert's places, first column)."""
    most, columns, _ = sizes
    tile = gl.minimum(item // columns, most - 1)
    # Past L1, which may hold what an earlier kernel had written there: this is read before the PDL wait.
    expert = gl.load(routing.tiles + tile, cache_modifier=".cg")
    first = gl.load(routing.tiles + most + tile, cache_modifier=".cg")
    end = gl.load(routing.tiles + 2 * most + tile, cache_modifier=".cg")
    return expert, first, end, item % columns * C.COLUMNS


@gluon.jit
def _fetch_strips(weight, expert, n, k, N, bar, tiles, C):
    """Fetch two strips of an expert's weight from row n on: two neighbours, or one of gate and one of up."""
    row = expert * N * (2 if C.GATED else 1) + n
    tma_load(weight, [row, k], bar, tiles.slice(0, C.STRIP))
    tma_load(weight, [row + (N if C.GATED else C.STRIP), k], bar, tiles.slice(C.STRIP, C.STRIP))


@gluon.jit
def _expect(ring, stage, high, C):
    """Announce the bytes of a step, of a high tile or of one whose `extra` rows are left out."""
    x_tiles, _, w_tiles, full, _ = ring
    ROW: gl.constexpr = w_tiles.shape[2] * x_tiles.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (x_tiles.shape[1] + w_tiles.shape[1]) * ROW
    if C.EXTRA == 0:
        mbarrier.expect(full.index(stage), BYTES)
    else:
        mbarrier.expect(full.index(stage), BYTES + C.EXTRA * ROW, pred=high)
        mbarrier.expect(full.index(stage), BYTES, pred=high == 0)


@gluon.jit
def _fetch_rows(x, extra_x, t, k, ring, stage, high, C):
    """Fetch a tile's rows of x from row t on."""
    bar = ring[3].index(stage)
    tma_load(x, [t, k], bar, ring[0].index(stage))
    if C.EXTRA != 0:
        tma_load(extra_x, [t + x.block_type.shape[0], k], bar, ring[1].index(stage), pred=high)


@gluon.jit
def _fetch_tiles(x, extra_x, weight, ring, routing, sizes, C, PDL: gl.constexpr):
    """Task of the fetching warp."""
    x_tiles, _, w_tiles, full, empty = ring
    _, columns, N = sizes
    BLOCK_K: gl.constexpr = w_tiles.shape[2]
    BLOCK_T: gl.constexpr = x_tiles.shape[1]
    AHEAD: gl.constexpr = min(C.STAGES, (C.K + BLOCK_K - 1) // BLOCK_K)
    first_item = gl.program_id(0)
    items = gl.load(routing.used, cache_modifier=".cg") * columns
    step = 0
    ahead = 0
    if PDL:
        # The kernel before may still write x. The lists were written by an earlier one, which has ended.
        expert, t, end, n = work_item(routing, sizes, first_item, C)
        high = end - t > BLOCK_T
        ahead += gl.where(first_item < items, AHEAD, 0)
        for i in range(ahead):
            _expect(ring, i, high, C)
            _fetch_strips(weight, expert, n, i * BLOCK_K, N, full.index(i), w_tiles.index(i), C)
        gdc_wait()
        for i in range(ahead):
            _fetch_rows(x, extra_x, t, i * BLOCK_K, ring, i, high, C)
        step += ahead
    for item in range(first_item, items, gl.num_programs(0)):
        expert, t, end, n = work_item(routing, sizes, item, C)
        high = end - t > BLOCK_T
        skipped = gl.where(item == first_item, ahead, 0)
        for k in range(skipped * BLOCK_K, C.K, BLOCK_K):
            stage = wait_empty(empty, step)
            _expect(ring, stage, high, C)
            _fetch_rows(x, extra_x, t, k, ring, stage, high, C)
            _fetch_strips(weight, expert, n, k, N, full.index(stage), w_tiles.index(stage), C)
            step += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _group_strips(w_tiles, stage, C, GROUP: gl.constexpr):
    """The group's 64 rows of both strips."""
    tile = w_tiles.index(stage)
    return tile.slice(64 * GROUP, 64), tile.slice(C.STRIP + 64 * GROUP, 64)


@gluon.jit
def _add_products(ring, left, right, extra_left, extra_right, step, first, last, C, EXTRA: gl.constexpr, GROUP: gl.constexpr):
    """Add the products of steps `first` … `last` - 1 of a tile, for the group's 64 rows of both strips."""
    x_tiles, extra_tiles, w_tiles, full, empty = ring
    for i in range(first, last):
        stage = wait_full(full, step)
        x = x_tiles.index(stage).permute((1, 0))
        w_left, w_right = _group_strips(w_tiles, stage, C, GROUP)
        left = warpgroup_mma(w_left, x, left, use_acc=i > first, is_async=True)
        right = warpgroup_mma(w_right, x, right, use_acc=i > first, is_async=True)
        if EXTRA != 0:
            extra = extra_tiles.index(stage).permute((1, 0))
            extra_left = warpgroup_mma(w_left, extra, extra_left, use_acc=i > first, is_async=True)
            extra_right = warpgroup_mma(w_right, extra, extra_right, use_acc=i > first, is_async=True)
            left, right, extra_left, extra_right = warpgroup_mma_wait(4, deps=[left, right, extra_left, extra_right])
        else:
            left, right = warpgroup_mma_wait(2, deps=[left, right])
        release(empty, step + C.STAGES - 1, i > first)  # the step before
        step += 1
    if EXTRA != 0:
        left, right, extra_left, extra_right = warpgroup_mma_wait(0, deps=[left, right, extra_left, extra_right])
    else:
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    release(empty, step + C.STAGES - 1)
    return left, right, extra_left, extra_right, step


@gluon.jit
def _sum_products(ring, left, right, extra_left, extra_right, step, C, EXTRA: gl.constexpr, GROUP: gl.constexpr):
    """The products of a tile, for the group's 64 rows of both strips. Sums start at zero, which is what they are given as."""
    BLOCK_K: gl.constexpr = ring[2].shape[2]
    STEPS: gl.constexpr = (C.K + BLOCK_K - 1) // BLOCK_K
    if STEPS > C.PROMOTE:
        left_aside, right_aside, extra_left_aside, extra_right_aside = left, right, extra_left, extra_right
        for k in range(0, STEPS, C.PROMOTE):
            left, right, extra_left, extra_right, step = _add_products(
                ring, left, right, extra_left, extra_right, step, k, min(k + C.PROMOTE, STEPS), C, EXTRA, GROUP
            )
            left_aside += left
            right_aside += right
            if EXTRA != 0:
                extra_left_aside += extra_left
                extra_right_aside += extra_right
        return left_aside, right_aside, extra_left_aside, extra_right_aside, step
    else:
        return _add_products(ring, left, right, extra_left, extra_right, step, 0, STEPS, C, EXTRA, GROUP)


@gluon.jit
def _sum_blocks(ring, ep, left, right, step, tile, N, C, GROUP: gl.constexpr):
    """`_sum_products` of weights with scales of blocks. The sums are scaled."""
    x_tiles, _, w_tiles, full, empty = ring
    expert, first, end, n = tile
    BLOCKS: gl.constexpr = (C.K + 127) // 128
    place = first + gl.arange(0, left.shape[1], gl.SliceLayout(0, left.type.layout))
    x_scales = ep.x_scale + gl.minimum(place, end - 1) * BLOCKS
    # The group's 64 rows of a strip lie in one block of the expert's. Those past N have the scales of the last row.
    rows = N * (2 if C.GATED else 1)
    scales = ep.scale + expert * ((rows + C.SCALE_ROWS - 1) // C.SCALE_ROWS) * BLOCKS
    left_scales = scales + gl.minimum(n, N - 1) // C.SCALE_ROWS * BLOCKS
    right_row = N + gl.minimum(n, N - 1) if C.GATED else gl.minimum(n + C.STRIP, N - 1)
    right_scales = scales + right_row // C.SCALE_ROWS * BLOCKS
    left_products, right_products = left, right
    for i in range(BLOCKS):
        # Loaded before the tiles are awaited. Of 32 steps, one finds the scales of a token in L2, the others in L1.
        x_scale, left_scale, right_scale = gl.load(x_scales + i), gl.load(left_scales + i), gl.load(right_scales + i)
        stage = wait_full(full, step)
        x = x_tiles.index(stage).permute((1, 0))
        w_left, w_right = _group_strips(w_tiles, stage, C, GROUP)
        left_products = warpgroup_mma(w_left, x, left_products, use_acc=False, is_async=True)
        right_products = warpgroup_mma(w_right, x, right_products, use_acc=False, is_async=True)
        left_products = warpgroup_mma_wait(1, deps=[left_products])
        left += left_products * (x_scale * left_scale)[None, :]
        right_products = warpgroup_mma_wait(0, deps=[right_products])
        release(empty, step)
        right += right_products * (x_scale * right_scale)[None, :]
        step += 1
    return left, right, step


@gluon.jit
def _finish_strip(acc, acc_up, ep, tokens, tile, n, N, C):
    """`epilogue.finish` for the group's 64 rows of a strip from column n on."""
    expert, _, _, _ = tile
    n += gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))[:, None]
    rows = load_rows(ep, expert * N * (2 if C.GATED else 1) + n, n < N, N, C.SCALE_ROWS is None)
    return finish(acc, acc_up, rows, tokens, (), ep)


@gluon.jit
def store(value, out_ptr, rows, inside, n, N, STORED: gl.constexpr):
    """out[rows[t], n + i] = value[i, t], where inside[t] and n + i < N."""
    column = n + gl.arange(0, value.shape[0], gl.SliceLayout(1, STORED))
    at = rows.to(gl.int64)[None, :] * N + column[:, None]
    stored = gl.convert_layout(value.to(out_ptr.dtype.element_ty), STORED)
    gl.store(out_ptr + at, stored, mask=inside[None, :] & (column < N)[:, None])


@gluon.jit
def _finish(left, right, ep, out_ptr, order_ptr, tile, N, C):
    """Scale, activate and store a group's 64 rows of both strips for the tokens of `tile` from its first place on."""
    ROWS: gl.constexpr = left.shape[1]
    expert, first, end, n = tile
    if ROWS > 64:  # in halves, which take less shared memory for the exchange
        lefts = halves(left)
        rights = halves(right)
        _finish(lefts[0], rights[0], ep, out_ptr, order_ptr, tile, N, C)
        _finish(lefts[1], rights[1], ep, out_ptr, order_ptr, (expert, first + ROWS // 2, end, n), N, C)
    else:
        WIDE: gl.constexpr = 8 if ROWS >= 16 else 4
        STORED: gl.constexpr = gl.BlockedLayout([WIDE, 1], [64 // WIDE, WIDE // 2], [1, 4], [0, 1])
        place = (first + gl.arange(0, ROWS, gl.SliceLayout(0, left.type.layout)))[None, :]
        stored_place = first + gl.arange(0, ROWS, gl.SliceLayout(0, STORED))
        tokens = load_tokens(ep, place, place < end, C.SCALE_ROWS is None)
        if C.GATED:
            out = _finish_strip(left, right, ep, tokens, tile, n, N, C)
            store(out, out_ptr, stored_place, stored_place < end, n, N, STORED)
        else:
            stored_pair = gl.load(order_ptr + stored_place, mask=stored_place < end, other=0)
            left = _finish_strip(left, left, ep, tokens, tile, n, N, C)
            right = _finish_strip(right, right, ep, tokens, tile, n + C.STRIP, N, C)
            store(left, out_ptr, stored_pair, stored_place < end, n, N, STORED)
            store(right, out_ptr, stored_pair, stored_place < end, n + C.STRIP, N, STORED)


@gluon.jit
def _multiply_tiles(ring, ep, out_ptr, routing, sizes, C, PDL: gl.constexpr, GROUP: gl.constexpr):
    """Task of one group of four warps."""
    x_tiles = ring[0]
    columns, N = sizes[1], sizes[2]
    if C.SCALE_ROWS is not None:
        gl.static_assert(C.EXTRA == 0, "tiles with scales of blocks have no further rows")
    BLOCK_T: gl.constexpr = x_tiles.shape[1]
    MOST: gl.constexpr = max(C.EXTRA, 8)
    DEPTH: gl.constexpr = 256 // x_tiles.dtype.primitive_bitwidth
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, DEPTH])
    EXTRA_PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MOST, DEPTH])
    step = 0
    if PDL:
        gdc_wait()  # these warps write the output
    items = gl.load(routing.used) * columns
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, end, n = work_item(routing, sizes, item, C)
        n += 64 * GROUP
        tile = (expert, first, end, n)
        left = gl.zeros([64, BLOCK_T], gl.float32, PRODUCTS)
        right = gl.zeros([64, BLOCK_T], gl.float32, PRODUCTS)
        extra_left = gl.zeros([64, MOST], gl.float32, EXTRA_PRODUCTS)
        extra_right = gl.zeros([64, MOST], gl.float32, EXTRA_PRODUCTS)
        high = end - first > BLOCK_T
        if C.SCALE_ROWS is not None:
            left, right, step = _sum_blocks(ring, ep, left, right, step, tile, N, C, GROUP)
        elif C.EXTRA == 0:
            left, right, _, _, step = _sum_products(ring, left, right, extra_left, extra_right, step, C, 0, GROUP)
        elif high:
            left, right, extra_left, extra_right, step = _sum_products(
                ring, left, right, extra_left, extra_right, step, C, C.EXTRA, GROUP
            )
        else:
            left, right, extra_left, extra_right, step = _sum_products(
                ring, left, right, extra_left, extra_right, step, C, 0, GROUP
            )
        _finish(left, right, ep, out_ptr, routing.order, tile, N, C)
        if C.EXTRA != 0 and high:
            _finish(extra_left, extra_right, ep, out_ptr, routing.order, (expert, first + BLOCK_T, end, n), N, C)


@prepared
@gluon.jit(do_not_specialize=["most"])
def _experts_sm90_kernel(x, extra_x, weight, ep, out_ptr, routing, most, columns, N, C, PDL: gl.constexpr):
    """With an activation: rows of x and out are places, the weight [E · 2N, K] is gate and up. Without: rows of out are pairs.

    With SCALE_ROWS, scales are those of blocks of SCALE_ROWS rows and 128 columns.
    """
    BLOCK_T: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    x_tiles = gl.allocate_shared_memory(x.dtype, [C.STAGES, BLOCK_T, BLOCK_K], x.layout)
    extra_tiles = x_tiles
    if C.EXTRA != 0:
        extra_tiles = gl.allocate_shared_memory(x.dtype, [C.STAGES, C.EXTRA, BLOCK_K], extra_x.layout)
    w_tiles = gl.allocate_shared_memory(x.dtype, [C.STAGES, 2 * C.STRIP, BLOCK_K], weight.layout)
    full, empty = ring_barriers(C.STAGES, C.STRIP // 64)
    fence_async_shared()
    ring = (x_tiles, extra_tiles, w_tiles, full, empty)
    sizes = (most, columns, N)
    if C.STRIP == 64:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ring, ep, out_ptr, routing, sizes, C, PDL, 0)),
                (_fetch_tiles, (x, extra_x, weight, ring, routing, sizes, C, PDL)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (ring, ep, out_ptr, routing, sizes, C, PDL, 0)),
                (_multiply_tiles, (ring, ep, out_ptr, routing, sizes, C, PDL, 1)),
                (_fetch_tiles, (x, extra_x, weight, ring, routing, sizes, C, PDL)),
            ],
            [4, 1],
            [240, 24],
        )


def derive_config(block_t: int, strip: int, programs: int = 1, extra: int = 0) -> ExpertsSm90Config:
    """The configuration with as many tiles in flight as fit in shared memory."""
    scratch = 64 * (min(block_t, 64) + 8) * 2 * (strip // 64)  # in which the groups turn results into rows
    budget = shared_limit(90) // programs - 1024 * programs - scratch
    stages = min(8, budget // ((block_t + extra + 2 * strip) * _ROW_BYTES))
    return ExpertsSm90Config(block_t, strip, stages, programs, extra)


def block_t(T: int, K: int, itemsize: int, blocks: bool = False) -> int:
    """Rows of a tile for a step of T tokens: at least the tokens of most experts. K: the longest row, of `itemsize` bytes.

    `blocks`, here and below: whether the weights have a scale for each block.
    """
    rows = 8 if T <= 16 else 16 if T <= 64 else 32 if T <= 256 else 64 if T <= 512 else 96 if T <= 1024 else 160
    return min(rows, _highest(K, itemsize, blocks))


def _highest(K: int, itemsize: int, blocks: bool) -> int:
    """Rows of the highest tile: the sums of FP8 products that are set aside take registers, and so do products beside sums."""
    return 64 if blocks or (itemsize == 1 and K > _PROMOTE) else 160


def rule(facts: ProductFacts, gpu: Gpu) -> ExpertsSm90Config:
    """The configuration for tiles of `facts.rows` rows."""
    rows = facts.rows
    extra = rows % 64 if rows > 64 else 0
    return derive_config(rows, 64, 2) if rows <= 64 else derive_config(rows - extra, 128, extra=extra)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[ExpertsSm90Config]:
    """All configurations for rows of up to K values, of tiles of any height."""
    every = ((8, 0), (16, 0), (32, 0), (64, 0), (64, 32), (128, 0), (128, 32))  # block_t, extra
    heights = [(t, extra) for t, extra in every if t + extra <= _highest(facts.K, facts.itemsize, facts.blocks)]
    shapes = ((64, 2), (64, 1), (128, 1))  # strip, programs
    return [derive_config(t, strip, n, extra) for t, extra in heights for strip, n in shapes if n == 1 or t + extra <= 64]


def _usable(c: ExpertsSm90Config, facts: ProductFacts) -> bool:
    """Both products of a mixture share the tiles, so the height is given."""
    return c.rows == facts.rows


FAMILY = Family(
    "experts_sm90", ExpertsSm90Config, (__file__,), ("T", "E", "k", "N", "K", "itemsize", "gated", "blocks"), rule, candidates,
    tokens=token_regime, usable=_usable,
)  # fmt: skip


def suits(m: Mixture) -> bool:
    """Whether blocks with a scale hold the 64 rows that a group of warps multiplies, and none of both gate and up."""
    if not m.blocks:
        return True
    up_rows, down_rows = scale_rows(m.gate_up, m.gate_up_scale) or 1, scale_rows(m.down, m.down_scale) or 1
    return min(up_rows, down_rows) >= 64 and m.down.shape[2] % up_rows == 0


class _Plan(NamedTuple):
    """What the launches of products of one shape and token regime have in common.

    Args:
        columns: tiles beside each other.
        programs: of an SM.
        x, extra_x, weight: tiles; `extra_x` None: there are no further rows.
    """

    columns: int
    programs: int
    x: Tile
    extra_x: Tile | None
    weight: Tile
    constants: _Constants
    options: Mapping[str, Any]


def _plan(c: ExpertsSm90Config, facts: ProductFacts, rows: int | None, pdl: bool) -> _Plan:
    """`rows`: of the blocks that share a scale."""
    K, itemsize, width, block_k = facts.K, facts.itemsize, c.strip * (1 if facts.gated else 2), _ROW_BYTES // facts.itemsize
    registers = {"maxnreg": most_registers(256 * c.programs)} if c.programs > 1 else {}  # one group: 8 warps with the padding
    promote = _PROMOTE // block_k if itemsize == 1 else cdiv(K, block_k)
    return _Plan(
        cdiv(facts.N, width), c.programs, tma_tile(c.block_t, block_k, itemsize),
        tma_tile(c.extra, block_k, itemsize) if c.extra else None, tma_tile(c.strip, block_k, itemsize, K),
        _Constants(K, facts.gated, rows, c.strip, width, c.extra, c.num_stages, promote),
        {**registers, **launch_options(4, 1, pdl)},
    )  # fmt: skip


@cached_lookup
def _lookup_plan(device: torch.device, facts: ProductFacts, rows: int | None, pdl: bool) -> _Plan:
    return _plan(FAMILY.lookup(device, facts), facts, rows, pdl)


def launch(product: Product, routing: Routing, config: ExpertsSm90Config | None = None) -> Tensor:
    """With an activation: act(gate) · up of each place, x [pairs, H] → out [pairs, I], both in the order of `routing.order`.
    Without: x [pairs, I] in that order → out [pairs, H], rows in the order of pairs.

    A given configuration must have the height of the routing's tiles. The weight is [E, rows, K]; FP8 scales are [E, rows] and
    [pairs], or of blocks (see `suits`) [E, ⌈rows / g⌉, ⌈K / 128⌉] and [pairs, ⌈K / 128⌉].
    """
    x, weight, out, (T, top_k), most = product.x, product.weight, product.out, routing.weights.shape, routing.tiles.shape[1]
    device, facts = x.device, product.facts(token_regime(T), weight.shape[0], top_k, routing.block_t)
    of = facts, product.scale_rows if facts.blocks else None, product.pdl
    plan = _lookup_plan(device, *of) if config is None else _plan(config, *of)
    _experts_sm90_kernel[(min(most * plan.columns, plan.programs * sm_count(device)),)](
        Tiled(x, plan.x), None if plan.extra_x is None else Tiled(x, plan.extra_x), Tiled(weight, plan.weight), product.epilogue,
        out, routing, most, plan.columns, facts.N, C=plan.constants, **plan.options,
    )  # fmt: skip
    return out
