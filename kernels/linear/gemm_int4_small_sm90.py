"""Linear layers of few tokens with 4-bit weights (see `int4_words`) for Hopper: words reach tensor cores through registers.

A program computes a few rows for all tokens. Its warps divide K and share nothing until their sums are added at the end. So no
warp waits for another, and each has several tiles in flight, the first of them before it waits for the kernel that computes x.
With one token the norm is fused, as in `gemv`.

A thread loads 8 neighbouring words of a row at once, 16 bytes. The order of the columns in a product is free if x has the
same one, so these words are the left operands (m16n8k16) of two steps of 16 columns, four times over. x is loaded in the same
way, from L1. A word is unpacked to q − z, exact in 16 bits. Each group's sum is multiplied by its scale in fp32.

Integer instructions limit the kernel, not FMAs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.compile.tuning import Family, around
from minirt.kernels.launch import Gpu, cdiv, launch_options, next_power_of_2
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows
from minirt.kernels.linear.int4_words import factor, offset, scale_words, unpack, unpack_e2m1, unpack_symmetric
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK

MAX_TOKENS = 8  # the columns of the MMA


@dataclass(frozen=True)
class Int4SmallSm90Config:
    """A launch configuration of `gemm_int4_small_sm90`.

    Args:
        rows: outputs of a program: 16 or 32. A gated program reads two weight rows for each.
        num_warps: warps of a program, each with a separate part of K.
        tiles: tiles of each warp in flight.
        chains: sums that the products of a group are added to in turn: 1 or 2.
        registers: the most registers of a thread; None for no limit.
    """

    rows: int
    num_warps: int
    tiles: int
    registers: int | None = None
    chains: int = 1


@gluon.jit
def times(x, y):
    """x · y, rounded to their 16-bit dtype, two values at a time."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def first_chunk(warp, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """The first chunk of a warp. The first warps have one chunk more than the others if WARPS does not divide the chunks."""
    MOST: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    return warp * (MOST - 1) + gl.minimum(warp, CHUNKS - WARPS * (MOST - 1))


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP: groups have 32 · GROUP columns. SIZE: K, padded. WARPS: that divide K."""

    K: int
    SIZE: int
    GROUP: int
    ROWS: int
    BLOCK_T: int
    WARPS: int
    TILES: int
    CHAINS: int


@gluon.jit
def _columns(ptrs, k, i: gl.constexpr, j: gl.constexpr, C):
    """Columns of x, or of the norm's weight, for nibble j of tile i. Masked only if they may reach past K."""
    COUNT: gl.constexpr = (C.K + 128 * C.WARPS - 1) // (128 * C.WARPS)
    if C.K % (128 * C.WARPS) == 0 or i < COUNT - 2:
        return gl.load(ptrs + (128 * i + 32 * j))
    else:
        return gl.load(ptrs + (128 * i + 32 * j), mask=k + (128 * i + 32 * j) < C.K, other=0.0)


@gluon.jit
def _tile(weight, scales, stride, wide_warp, warp, i: gl.constexpr, C):
    """Tile i of each warp: (words, the scale words of each of its groups). Zero past the last one of a warp."""
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    COUNT: gl.constexpr = (CHUNKS + C.WARPS - 1) // C.WARPS
    MORE: gl.constexpr = CHUNKS - C.WARPS * (COUNT - 1)  # warps that have COUNT tiles
    GROUPS: gl.constexpr = (C.K + 32 * C.GROUP - 1) // (32 * C.GROUP)
    MOST: gl.constexpr = 4 // C.GROUP  # groups of a chunk
    if i < COUNT - 1 or MORE == C.WARPS:
        words = gl.load(weight + 32 * i, eviction_policy="evict_first")
    else:
        words = gl.load(weight + 32 * i, mask=wide_warp < MORE, other=0, eviction_policy="evict_first")
    tile = (words,)
    for g in gl.static_range(MOST):
        scale_ptrs = scales + (i * MOST + g) * stride
        if i < COUNT - 2 or (MORE == C.WARPS and GROUPS == CHUNKS * MOST):
            tile += (gl.load(scale_ptrs),)  # type: ignore[assignment]
        else:
            group = (first_chunk(warp, CHUNKS, C.WARPS) + i) * MOST + g
            valid = (group < GROUPS) & ((i < COUNT - 1) | (warp < MORE))
            tile += (gl.load(scale_ptrs, mask=valid, other=0),)  # type: ignore[assignment]
    return tile


@gluon.jit
def multiply(tile, x, acc, GROUP: gl.constexpr, CHAINS: gl.constexpr):
    """acc + a tile's products. x: the columns of the four nibbles of its words."""
    LEFT: gl.constexpr = tile[0].type.layout
    SUMS: gl.constexpr = acc.type.layout
    if tile[1].dtype == gl.uint32:
        q = unpack_e2m1(tile[0], x[0].dtype)
        for j in gl.static_range(4):
            acc += mma_v2(q[j], x[j], gl.zeros(acc.shape, gl.float32, SUMS)) * factor(tile[1], j)[:, :, None]
    else:
        for g in gl.static_range(4 // GROUP):
            words = tile[1 + g]
            if words.dtype == gl.int32:
                zero = gl.convert_layout(offset(words, x[0].dtype), gl.SliceLayout(2, LEFT), assert_trivial=True)
                zero, _ = gl.broadcast(zero[:, :, None], tile[0])
                q = unpack(tile[0], zero)
            else:
                q = unpack_symmetric(tile[0], x[0].dtype)
            # Two chains of products, because each product waits for the one before it in its chain.
            part = gl.zeros(acc.shape, gl.float32, SUMS)
            other = part
            for j in gl.static_range(GROUP * g, GROUP * g + GROUP):
                if CHAINS == 2 and GROUP > 1 and j % 2 == 1:
                    other = mma_v2(q[j], x[j], other)
                else:
                    part = mma_v2(q[j], x[j], part)
            if CHAINS == 2 and GROUP > 1:
                part += other
            acc += part * factor(words)[:, :, None]
    return acc


@gluon.jit
def _square_sum(x_ptr, K: gl.constexpr, SIZE: gl.constexpr):
    """The sum of the squares of one token."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([min(8, SIZE // (32 * gl.num_warps()))], [32], [gl.num_warps()], [0])
    k = gl.arange(0, SIZE, LAYOUT)
    x = gl.load(x_ptr + k, mask=k < K, other=0.0).to(gl.float32)
    return gl.sum(x * x, 0)


@prepared
@gluon.jit(do_not_specialize=["T", "N"])
def _gemm_int4_small_sm90_kernel(x_ptr, norm, weight_ptr, ep, out_ptr, T, N, C, PDL: gl.constexpr):
    """ROWS columns of out [T, N]."""
    if PDL:
        gdc_launch_dependents()  # at the start, see `pdl`
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    COUNT: gl.constexpr = (CHUNKS + C.WARPS - 1) // C.WARPS  # tiles of a warp
    GATED: gl.constexpr = ep.activation is not None
    all_rows = (2 * N if GATED else N).to(gl.int64)
    n0 = gl.program_id(0) * C.ROWS
    # Rows past the end, and tokens past T, repeat the last one instead of being masked. They are not stored.
    wide_warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    row = gl.minimum(n0 + gl.arange(0, C.ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT))), N - 1)[None, :, None]
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    weight = weight_ptr + (row.to(gl.int64) * (CHUNKS * 32) + (first_chunk(wide_warp, CHUNKS, C.WARPS) * 32 + word))
    warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
    scale_row = gl.minimum(n0 + gl.arange(0, C.ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS))), N - 1)[None, :]
    scales = ep.scale + (scale_row + first_chunk(warp, CHUNKS, C.WARPS) * (4 // C.GROUP) * all_rows)
    up = N.to(gl.int64) * (CHUNKS * 32)
    gate_tiles, up_tiles = (), ()
    for i in gl.static_range(C.TILES):
        gate_tiles += (_tile(weight, scales, all_rows, wide_warp, warp, i, C),)  # type: ignore[assignment]
        if GATED:
            up_tiles += (_tile(weight + up, scales + N, all_rows, wide_warp, warp, i, C),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    t = gl.minimum(gl.arange(0, C.BLOCK_T, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))), T - 1)[None, None, :]
    right_warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    k = first_chunk(right_warp, CHUNKS, C.WARPS) * 128
    k += gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    x_ptrs = x_ptr + (t.to(gl.int64) * C.K + k)
    acc = gl.zeros([C.WARPS, C.ROWS, C.BLOCK_T], gl.float32, SUMS)
    acc_up = acc
    for i in gl.static_range(COUNT):
        x = ()
        for j in gl.static_range(4):
            columns = _columns(x_ptrs, k, i, j, C)
            if norm is not None:
                weights, _ = gl.broadcast(_columns(norm.weight + k, k, i, j, C), columns)
                columns = times(columns, weights)
            x += (columns,)  # type: ignore[assignment]
        acc = multiply(gate_tiles[i], x, acc, C.GROUP, C.CHAINS)
        if i + C.TILES < COUNT:
            gate_tiles += (_tile(weight, scales, all_rows, wide_warp, warp, i + C.TILES, C),)  # type: ignore[assignment]
        if GATED:
            acc_up = multiply(up_tiles[i], x, acc_up, C.GROUP, C.CHAINS)
            if i + C.TILES < COUNT:
                up_tiles += (  # type: ignore[assignment]
                    _tile(weight + up, scales + N, all_rows, wide_warp, warp, i + C.TILES, C),
                )
    inverse_rms = 1.0
    if norm is not None:
        # The root mean square divides the finished sums. x is in L1 by now.
        inverse_rms = gl.rsqrt(_square_sum(x_ptr, C.K, C.SIZE) / C.K + norm.eps)
    ENDS: gl.constexpr = gl.SliceLayout(0, SUMS)
    n = n0 + gl.arange(0, C.ROWS, gl.SliceLayout(1, ENDS))[:, None]
    token = gl.arange(0, C.BLOCK_T, gl.SliceLayout(0, ENDS))[None, :]
    at = token.to(gl.int64) * N + n
    stored = (n < N) & (token < T)
    result = gl.sum(acc, 0) * inverse_rms
    result_up = gl.sum(acc_up, 0) * inverse_rms if GATED else result
    rows = load_rows(ep, n, n < N, N, False)
    result = finish(result, result_up, rows, (), load_residual(ep, at, stored), ep)
    gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=stored)


def rule(facts: ProductFacts, gpu: Gpu) -> Int4SmallSm90Config:
    """From sweeps (docs/decisions/int4.md)."""
    chunks, gated = cdiv(facts.K, INT4_CHUNK), facts.gated
    if chunks >= 64:
        return Int4SmallSm90Config(16, 8, 4, 128)
    # Three programs of a gated product share the registers of an SM.
    return Int4SmallSm90Config(16, min(4, next_power_of_2(chunks)), 4 if gated else 7, 168 if gated else None)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[Int4SmallSm90Config]:
    """Configurations around the rule's."""
    c = rule(facts, gpu)
    return [
        Int4SmallSm90Config(16, warps, tiles, registers, chains)
        for warps in around(c.num_warps, 8) for tiles in (2, 4, 7) for registers in {None, 128, c.registers} for chains in (1, 2)
    ]


def gemm_int4_small_sm90(product: Product, config: Int4SmallSm90Config | None = None) -> None:
    """Write the output of a product of 1 to 8 tokens."""
    x, ep, T = product.x, product.epilogue, product.x.shape[0]
    _, group = scale_words(product)
    facts = product.facts(T)
    N, K, c = facts.N, facts.K, config or FAMILY.lookup(x.device, facts)
    constants = _Constants(
        K, max(32 * c.num_warps, next_power_of_2(K)), group // 32, c.rows, MAX_TOKENS, c.num_warps,
        min(c.tiles, cdiv(cdiv(K, INT4_CHUNK), c.num_warps)), c.chains,
    )  # fmt: skip
    _gemm_int4_small_sm90_kernel[(cdiv(N, c.rows),)](
        x, product.norm, product.weight, ep, product.out, T, N, C=constants, maxnreg=c.registers,
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip


FAMILY = Family("gemm_int4_small_sm90", Int4SmallSm90Config, (__file__,), ("N", "K", "gated"), rule, candidates)
