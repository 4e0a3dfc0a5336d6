"""The products of a mixture of experts with 4-bit weights for Hopper: as in `experts_sm90`, with the loop of `gemm_int4_sm90`.

Programs are persistent. One warp fetches words and tokens by TMA. Two groups of four warps unpack 64 rows of an expert's weight
each into registers, the left operand of `wgmma`; the tokens of one expert are on its N side. With few tokens two programs share
an SM, so that unpacking, which takes as long as reading, hides what waits.

With a gated activation, a group has 32 rows of gate and 32 of up, which alternate in eights, as in `gemm_int4_sm90`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.compile.tuning import Family, cached_lookup
from minirt.kernels.hopper.ring import ring_barriers, wait_empty
from minirt.kernels.hopper.tiles import halves
from minirt.kernels.hopper.tma import tma_tile
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, next_power_of_2, shared_limit, sm_count
from minirt.kernels.linear.epilogue import finish, load_rows
from minirt.kernels.linear.gemm_int4_sm90 import add_chunks, fetch_words, fetch_x, of_pairs, touch_scales, weight_rows
from minirt.kernels.linear.int4_words import group_words, scale_words
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.moe.experts_sm90 import store, work_item
from minirt.kernels.moe.route import Routing, token_regime
from minirt.kernels.prepared import Tile, Tiled, compile_time, prepared

_ROWS = 128  # weight rows of a tile: 64 for each group of warps
_HIGHEST = 128  # tokens of a tile
_SHARING = 32  # the most tokens of a tile with which two programs share an SM


@dataclass(frozen=True)
class ExpertsInt4Sm90Config:
    """A launch configuration.

    Args:
        block_t: tokens of a tile: 8 to 128, a power of two.
        num_stages: chunks of 128 columns in flight.
        programs: programs that share an SM, 1 or 2.
    """

    block_t: int
    num_stages: int
    programs: int = 1


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. QUANTUM: groups have 32 · QUANTUM columns. COLUMNS: outputs of a tile. PROGRAMS: of an SM."""

    K: int
    GATED: bool
    QUANTUM: int
    BLOCK_T: int
    COLUMNS: int
    STAGES: int
    PROGRAMS: int


@gluon.jit
def _scales_of(ep, strides, expert):
    """(Pointer to an expert's scale words, distance of its groups)."""
    of_expert, of_group = strides
    return ep.scale + expert.to(gl.int64) * of_expert, of_group


@gluon.jit
def _fetch_tiles(x, weight, ring, ep, routing, sizes, strides, C, PDL: gl.constexpr):
    """Task of the fetching warp."""
    x_tiles, w_tiles, full, empty = ring
    _, columns, N = sizes
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    AHEAD: gl.constexpr = min(C.STAGES, CHUNKS)
    BYTES: gl.constexpr = C.BLOCK_T * 128 * 2 + 128 * 64
    first_item = gl.program_id(0)
    items = gl.load(routing.used, cache_modifier=".cg") * columns
    step = 0
    ahead = 0
    if PDL:
        # The kernel before may still write x. The lists were written by an earlier one, which has ended.
        expert, t, _, n = work_item(routing, sizes, first_item, C)
        row = expert * N * (2 if C.GATED else 1) + n
        scales, of_group = _scales_of(ep, strides, expert)
        ahead += gl.where(first_item < items, AHEAD, 0)
        for i in range(ahead):
            mbarrier.expect(full.index(i), BYTES)
            fetch_words(weight, row, N, i, full.index(i), w_tiles.index(i), C.GATED)
            touch_scales(scales, n, N, of_group, i, C)
        gdc_wait()
        for i in range(ahead):
            fetch_x(x, t, i, full.index(i), x_tiles, i)
        step += ahead
    for item in range(first_item, items, gl.num_programs(0)):
        expert, t, _, n = work_item(routing, sizes, item, C)
        row = expert * N * (2 if C.GATED else 1) + n
        scales, of_group = _scales_of(ep, strides, expert)
        for i in range(gl.where(item == first_item, ahead, 0), CHUNKS):
            stage = wait_empty(empty, step)
            mbarrier.expect(full.index(stage), BYTES)
            fetch_words(weight, row, N, i, full.index(stage), w_tiles.index(stage), C.GATED)
            fetch_x(x, t, i, full.index(stage), x_tiles, stage)
            touch_scales(scales, n, N, of_group, i, C)
            step += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _finish(acc, ep, out_ptr, order_ptr, tile, N, C):
    """Activate and store a group's sums for the tokens of `tile` from its first place on."""
    TOKENS: gl.constexpr = acc.shape[1]
    expert, first, end, n = tile
    if TOKENS > 64:  # in halves, which take less shared memory for the exchange
        left, right = halves(acc)
        _finish(left, ep, out_ptr, order_ptr, tile, N, C)
        _finish(right, ep, out_ptr, order_ptr, (expert, first + TOKENS // 2, end, n), N, C)
    else:
        gate, up = acc, acc
        if C.GATED:
            gate, up = of_pairs(acc)
        HEIGHT: gl.constexpr = gate.shape[0]
        WIDE: gl.constexpr = min(8, HEIGHT * TOKENS // 128)
        STORED: gl.constexpr = gl.BlockedLayout([WIDE, 1], [HEIGHT // WIDE, 32 * WIDE // HEIGHT], [1, 4], [0, 1])
        row = n + gl.arange(0, HEIGHT, gl.SliceLayout(1, gate.type.layout))[:, None]
        rows = load_rows(ep, expert * N * (2 if C.GATED else 1) + row, row < N, N, False)
        place = first + gl.arange(0, TOKENS, gl.SliceLayout(0, STORED))
        at = place if C.GATED else gl.load(order_ptr + place, mask=place < end, other=0)
        store(finish(gate, up, rows, (), (), ep), out_ptr, at, place < end, n, N, STORED)


@gluon.jit
def _multiply_tiles(ring, ep, out_ptr, routing, sizes, strides, C, PDL: gl.constexpr, GROUP: gl.constexpr):
    """Task of one group of four warps."""
    _, columns, N = sizes
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    MX: gl.constexpr = ep.scale.dtype.element_ty == gl.uint32
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    step = 0
    if PDL:
        gdc_wait()  # these warps write the output
    items = gl.load(routing.used) * columns
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, first, end, n = work_item(routing, sizes, item, C)
        n += (32 if C.GATED else 64) * GROUP
        scales, of_group = _scales_of(ep, strides, expert)
        scales += weight_rows(n, N, C, LEFT)
        words = group_words(scales, of_group, 0, C.K, C.QUANTUM)
        acc = gl.zeros([64, C.BLOCK_T], gl.float32, PRODUCTS)
        acc = add_chunks(ring, scales, of_group, words, acc, step, 0, CHUNKS, MX, C, GROUP)
        step += CHUNKS
        _finish(acc, ep, out_ptr, routing.order, (expert, first, end, n), N, C)


@prepared
@gluon.jit(do_not_specialize=["most"])
def _experts_int4_sm90_kernel(x, weight, ep, out_ptr, routing, most, columns, scale_expert, scale_group, N, C, PDL: gl.constexpr):
    """With an activation: rows of x and out are places, the weight [E · 2N, words] is gate and up. Without: of out pairs.

    `scale_expert`, `scale_group`: from the scale words of an expert, or of a group, to those of the next.
    """
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * C.STAGES, C.BLOCK_T, 64], x.layout)
    w_tiles = gl.allocate_shared_memory(gl.int16, [C.STAGES, 128, 32], weight.layout)
    full, empty = ring_barriers(C.STAGES, 2)
    fence_async_shared()
    ring = (x_tiles, w_tiles, full, empty)
    sizes = (most, columns, N)
    strides = (scale_expert, scale_group)
    REGISTERS: gl.constexpr = 240 if C.PROGRAMS == 1 else 104
    gl.warp_specialize(
        [
            (_multiply_tiles, (ring, ep, out_ptr, routing, sizes, strides, C, PDL, 0)),
            (_multiply_tiles, (ring, ep, out_ptr, routing, sizes, strides, C, PDL, 1)),
            (_fetch_tiles, (x, weight, ring, ep, routing, sizes, strides, C, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def derive_config(block_t: int, programs: int = 1) -> ExpertsInt4Sm90Config:
    """The configuration with as many chunks in flight as fit in shared memory, up to eight."""
    scratch = 64 * (min(block_t, 64) + 8) * 2 * 2  # in which the groups turn results into rows
    budget = shared_limit(90) // programs - 1024 * programs - scratch
    return ExpertsInt4Sm90Config(block_t, min(8, budget // (block_t * 256 + _ROWS * 64)), programs)


def block_t(T: int, top_k: int, num_experts: int) -> int:
    """Tokens of a tile for a step of T tokens: those of most experts, if they choose evenly."""
    most = next_power_of_2(cdiv(3 * token_regime(T) * top_k, 2 * num_experts))
    return max(8, min(_HIGHEST, most))


def rule(facts: ProductFacts, gpu: Gpu) -> ExpertsInt4Sm90Config:
    """The configuration for tiles of `facts.rows` tokens."""
    return derive_config(facts.rows, 2 if facts.rows <= _SHARING else 1)


FAMILY = Family(
    "experts_int4_sm90", ExpertsInt4Sm90Config, (__file__,), ("T", "E", "k", "N", "K", "gated"), rule, tokens=token_regime
)


class _Plan(NamedTuple):
    """What the launches of products of one shape and token regime have in common. columns: tiles beside each other."""

    columns: int
    programs: int
    x: Tile
    weight: Tile
    constants: _Constants
    options: Mapping[str, Any]


def _plan(c: ExpertsInt4Sm90Config, facts: ProductFacts, group: int, pdl: bool) -> _Plan:
    width = _ROWS // (2 if facts.gated else 1)
    registers = {"maxnreg": most_registers(384 * c.programs)} if c.programs > 1 else {}  # two groups, and one padded
    return _Plan(
        cdiv(facts.N, width), c.programs, tma_tile(c.block_t, 64, 2),
        tma_tile(32 if facts.gated else _ROWS, 32, 2, cdiv(facts.K, 128) * 32),
        _Constants(facts.K, facts.gated, group // 32, c.block_t, width, c.num_stages, c.programs),
        {**registers, **launch_options(4, 1, pdl)},
    )  # fmt: skip


@cached_lookup
def _lookup_plan(device: torch.device, facts: ProductFacts, group: int, pdl: bool) -> _Plan:
    return _plan(FAMILY.lookup(device, facts), facts, group, pdl)


def launch(product: Product, routing: Routing, config: ExpertsInt4Sm90Config | None = None) -> Tensor:
    """As `experts_sm90.launch`, of words [E, rows, ⌈K / 128⌉ · 32] and scale words [E, groups, rows], see `int4_words`.

    A given configuration must have the height of the routing's tiles.
    """
    x, weight, out, (T, top_k), most = product.x, product.weight, product.out, routing.weights.shape, routing.tiles.shape[1]
    device, facts = x.device, product.facts(token_regime(T), weight.shape[0], top_k, routing.block_t)
    scale, group = scale_words(product)
    plan = _lookup_plan(device, facts, group, product.pdl) if config is None else _plan(config, facts, group, product.pdl)
    _experts_int4_sm90_kernel[(min(most * plan.columns, plan.programs * sm_count(device)),)](
        Tiled(x, plan.x), Tiled(weight, plan.weight), product.epilogue, out, routing, most, plan.columns, scale.stride(0),
        scale.stride(1), facts.N, C=plan.constants, **plan.options,
    )  # fmt: skip
    return out
