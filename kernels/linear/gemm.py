"""Linear layers for many tokens: tiled GEMMs with scales, bias, residual or the gated activation in the epilogue.

Tiles are computed in groups of rows, so that neighbouring tiles share weights in the L2 cache. From sm_90 on, TMA moves the
tiles where their alignment permits. A round of tiles is one tile for each SM. The tiles of an incomplete last round are cut into
smaller ones, so that the round keeps more SMs busy for less time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.compile.tuning import Family
from minirt.kernels.fp8 import block_scales, require_one_scale
from minirt.kernels.launch import Gpu, cdiv, fit_stages, next_power_of_2, require_fp8, shared_limit
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows, load_tokens, low_rank_step
from minirt.kernels.linear.product import LOW_RANK_BLOCK, Product, ProductFacts
from minirt.kernels.linear.tile_order import tile_origin
from minirt.kernels.prepared import compile_time, prepared, tiled

CASES = [{"T": 129, "N": 96, "K": 576}, {"T": 1, "N": 131, "K": 97}, {"T": 300, "N": 72, "K": 64}, {"T": 150, "N": 257, "K": 264}]

# (rows, columns, warps) for devices with much shared memory, then for the others. With the activation, a program computes two
# such tiles: one of gate and one of up.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 64, 4))
_GATED_TILES = ((128, 128, 8), (128, 64, 4), (64, 64, 4))
_SMALL_TILES = ((128, 128, 8), (64, 64, 4))
_SMALL_GATED_TILES = ((128, 64, 8), (64, 64, 4))
# Hopper's tensor cores add fp8 products with about 14 bits. After this many elements of K, the sum is added to one in fp32.
PROMOTE_AFTER = 512
_FEW_ROUNDS = 8  # with more rounds, an incomplete last one does not matter


@dataclass(frozen=True)
class GemmConfig:
    """A launch configuration of `gemm`.

    Args:
        block_t, block_n: rows and columns of an output tile.
        block_k: step in K.
        tma: whether TMA moves the tiles; rows must be aligned.
        rest: number of parts into which the tiles of an incomplete last round are cut.
        num_sms: number of SMs, which is the number of tiles in a round.
    """

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False
    rest: int = 1
    num_sms: int = 1


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. PROMOTE: steps in K after which sums are added in fp32; 0: never."""

    K: int
    SCALE_ROWS: int | None
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_K: int
    REST: int
    TMA: bool
    TMA_OUT: bool
    PROMOTE: int
    LOW_RANK_BLOCK: int = 0


@triton.jit
def _load(ptrs, start, k, C):
    """Load `ptrs` + start. Masks by k (which broadcasts to `ptrs`) only if BLOCK_K does not divide K."""
    if C.K % C.BLOCK_K == 0:
        return tl.load(ptrs + start)
    else:
        return tl.load(ptrs + start, mask=start + k < C.K, other=0.0)


@triton.jit
def _add_products(
    x, weight, x_scales, scale_ptr, first_t, first_n, first_k, last_k, N, C, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """`tile_sums` from `first_k` to `last_k`."""
    BLOCKS: tl.constexpr = C.SCALE_ROWS is not None
    k = tl.arange(0, C.BLOCK_K)
    acc = tl.zeros((C.BLOCK_T, BLOCK_N), tl.float32)
    acc_up = acc
    if GATED and not TMA:
        up_ptrs = weight + tl.cast(N, tl.int64) * C.K
    for start in range(first_k, last_k, C.BLOCK_K):
        if BLOCKS:
            block = start // 128
            token = tl.load(x_scales + block)[:, None]
            factor = token * block_scales(scale_ptr, 0, first_n, block, N, C.K, C.SCALE_ROWS, BLOCK_N, 0)
            if GATED:
                factor_up = token * block_scales(scale_ptr, N, first_n, block, N, C.K, C.SCALE_ROWS, BLOCK_N, 0)
        a = x.load([first_t, start]) if TMA else _load(x, start, k[None, :], C)
        b = weight.load([first_n, start]).T if TMA else _load(weight, start, k[:, None], C)
        acc = acc + tl.dot(a, b) * factor if BLOCKS else tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            b = weight.load([N + first_n, start]).T if TMA else _load(up_ptrs, start, k[:, None], C)
            acc_up = acc_up + tl.dot(a, b) * factor_up if BLOCKS else tl.dot(a, b, acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def tile_sums(
    x, weight, x_scales, scale_ptr, first_t, first_n, N, C, BLOCK_N: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """x · weightᵀ of a tile [BLOCK_T, BLOCK_N], in fp32; GATED: of gate and of up, whose rows are N further.

    With C.SCALE_ROWS, scales of blocks multiply the products of each step before they are added.

    Args:
        x, weight: with TMA, descriptors. Else the pointers of the first step: [BLOCK_T, BLOCK_K] and [BLOCK_K, BLOCK_N].
        x_scales: pointers to the scale of the first 128 columns of each row of x. scale_ptr: to the weight's scales.
        C: K, SCALE_ROWS, BLOCK_T, BLOCK_K and PROMOTE of this launch.
    """
    if C.PROMOTE == 0:
        acc, acc_up = _add_products(x, weight, x_scales, scale_ptr, first_t, first_n, 0, C.K, N, C, BLOCK_N, GATED, TMA)
    else:
        acc = tl.zeros((C.BLOCK_T, BLOCK_N), tl.float32)
        acc_up = acc
        for first_k in range(0, C.K, C.PROMOTE * C.BLOCK_K):
            last_k = tl.minimum(first_k + C.PROMOTE * C.BLOCK_K, C.K)
            part, part_up = _add_products(
                x, weight, x_scales, scale_ptr, first_t, first_n, first_k, last_k, N, C, BLOCK_N, GATED, TMA
            )
            acc += part
            if GATED:
                acc_up += part_up
    return acc, acc_up


@triton.jit
def _compute_tile(x, weight, ep, residual, out, first_t, first_n, T, N, added, C, BLOCK_N: tl.constexpr):
    x_scales = ep.x_scale
    t = tl.minimum(first_t + tl.arange(0, C.BLOCK_T), T - 1)
    if C.SCALE_ROWS is not None:
        x_scales += t * ((C.K + 127) // 128)
    if not C.TMA:
        # Rows past the end repeat the last one instead of being masked; they are not stored.
        k = tl.arange(0, C.BLOCK_K)
        n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1)
        x += t.to(tl.int64)[:, None] * C.K + k[None, :]
        weight += n.to(tl.int64)[None, :] * C.K + k[:, None]
    acc, acc_up = tile_sums(x, weight, x_scales, ep.scale, first_t, first_n, N, C, BLOCK_N, ep.activation is not None, C.TMA)
    if added is not None:
        t, n = first_t + tl.arange(0, C.BLOCK_T), first_n + tl.arange(0, BLOCK_N)
        for i in tl.range(0, tl.load(added.steps), num_stages=1):
            y, b = low_rank_step(added, i, t, n, T, N, 0, C.LOW_RANK_BLOCK)
            acc = tl.dot(y, b.T, acc, input_precision="ieee")
            if ep.activation is not None:
                _, b = low_rank_step(added, i, t, n, T, N, N, C.LOW_RANK_BLOCK)
                acc_up = tl.dot(y, b.T, acc_up, input_precision="ieee")
    t = (first_t + tl.arange(0, C.BLOCK_T))[:, None]
    n = (first_n + tl.arange(0, BLOCK_N))[None, :]
    rows = load_rows(ep, n, n < N, N, C.SCALE_ROWS is None)
    tokens = load_tokens(ep, t, t < T, C.SCALE_ROWS is None)
    if C.TMA_OUT:
        added = ()
        if residual is not None:
            added = (residual.load([first_t, first_n]).to(tl.float32),)
        out.store([first_t, first_n], finish(acc, acc_up, rows, tokens, added, ep).to(out.dtype))
    else:
        at = t.to(tl.int64) * N + n
        inside = (t < T) & (n < N)
        acc = finish(acc, acc_up, rows, tokens, load_residual(ep, at, inside), ep)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@prepared
@triton.jit(do_not_specialize=["T", "whole"])
def _gemm_kernel(x, weight, residual, out, rest_weight, rest_residual, rest_out, ep, T, N, whole, added, C):
    """Write out [T, N]. x and weight are descriptors with TMA, else pointers; residual and out are descriptors with TMA_OUT.

    The first `whole` tiles are computed whole. The others are cut along their columns into REST parts, with separate descriptors
    of weight, residual and out.
    """
    pid = tl.program_id(0)
    if C.REST == 1 or pid < whole:
        first_t, first_n = tile_origin(pid, T, tl.cdiv(N, C.BLOCK_N), C.BLOCK_T, C.BLOCK_N)
        _compute_tile(x, weight, ep, residual, out, first_t, first_n, T, N, added, C, C.BLOCK_N)
    else:
        PART: tl.constexpr = C.BLOCK_N // C.REST
        first_t, first_n = tile_origin(whole + (pid - whole) // C.REST, T, tl.cdiv(N, C.BLOCK_N), C.BLOCK_T, C.BLOCK_N)
        first_n += (pid - whole) % C.REST * PART
        _compute_tile(x, rest_weight, ep, rest_residual, rest_out, first_t, first_n, T, N, added, C, PART)


def parts_of_rest(tiles: int, num_sms: int, block_n: int) -> int:
    """Number of parts, each of 32 columns or more, for the tiles of an incomplete last round; 1 if cutting them gains nothing."""
    left, rest = tiles % num_sms, 1
    if tiles > _FEW_ROUNDS * num_sms:
        return 1
    while left and 2 * rest * left <= num_sms and rest < 4 and block_n // (2 * rest) >= 32:
        rest *= 2
    return rest


def whole_tiles(tiles: int, config: GemmConfig) -> int:
    """How many tiles to compute whole: all, if the parts of the last round would be more than the SMs."""
    left = tiles % config.num_sms
    return tiles - left if config.rest > 1 and left * config.rest <= config.num_sms else tiles


def best_tile(
    tiles: Sequence[tuple[int, int, int]], T: int, N: int, steps: int, gated: bool, num_sms: int
) -> tuple[int, int, int, int]:
    """The tile (rows, columns, warps) that takes the least time, and the number of parts for the tiles of the last round.

    The time model counts steps in K of a 128 × 128 tile (docs/decisions/linear-prefill.md).
    """

    def one_round(block_t: int, columns: int) -> float:
        columns *= 2 if gated else 1
        step = max(block_t * columns / 2**14, (block_t + columns) / 280)  # arithmetic, or reading from L2
        return steps * step + 6.5

    def time(tile: tuple[int, int, int, int]) -> tuple[float, int]:
        block_t, block_n, _, rest = tile
        count = cdiv(T, block_t) * cdiv(N, block_n)
        rounds = count // num_sms if rest > 1 else cdiv(count, num_sms)
        last = one_round(block_t, block_n // rest) if rest > 1 else 0.0
        return rounds * one_round(block_t, block_n) + last, rest

    counts = (cdiv(T, block_t) * cdiv(N, block_n) for block_t, block_n, _ in tiles)
    rests = (parts_of_rest(n, num_sms, tile[1]) for n, tile in zip(counts, tiles, strict=True))
    return min(((*tile, rest) for tile, rest in zip(tiles, rests, strict=True)), key=time)


token_regime = next_power_of_2  # of T: configurations depend on it


def rule(facts: ProductFacts, gpu: Gpu) -> GemmConfig:
    """The tile that takes the least predicted time. It depends on T only through `token_regime`."""
    T, N, K, itemsize, gated, (cc, num_sms) = facts.T, facts.N, facts.K, facts.itemsize, facts.gated, gpu
    if itemsize == 4:
        return GemmConfig(64, 64, 32, 8, 1)
    large = shared_limit(cc) > 100 * 1024
    plain, two = (_TILES, _GATED_TILES) if large else (_SMALL_TILES, _SMALL_GATED_TILES)
    tiles: tuple[tuple[int, int, int], ...] = two if gated else plain
    if itemsize == 1:
        tiles = tuple(tile for tile in tiles if tile[0] * tile[1] <= 2**14 and not (gated and tile[1] > 64))
    block_k = (128 if large else 64) // itemsize
    block_t, block_n, num_warps, rest = best_tile(tiles, token_regime(T), N, cdiv(K, block_k), gated, num_sms)
    stage_bytes = (block_t + block_n * (2 if gated else 1)) * block_k * itemsize
    tma = cc >= 90 and K * itemsize % 16 == 0
    stages = fit_stages(stage_bytes, shared_limit(cc) - 2048, 8)
    return GemmConfig(block_t, block_n, block_k, num_warps, stages, tma, rest, num_sms)


def gemm(product: Product, config: GemmConfig | None = None) -> None:
    """Write the output of a product of one or more tokens, of 16 or 32 bits, or fp8 with scales. `dispatch` checks it before."""
    x, weight, out, ep, T = product.x, product.weight, product.out, product.epilogue, product.x.shape[0]
    eight, blocks = x.dtype == torch.float8_e4m3fn, product.scale_rows is not None
    if eight:
        require_fp8(x.device)
    facts = product.facts(token_regime(T))
    N, K, c = facts.N, facts.K, config or FAMILY.lookup(x.device, facts)
    require_one_scale(product.scale_rows, c.block_k)
    tiles = cdiv(T, c.block_t) * cdiv(N, c.block_n)
    whole = whole_tiles(tiles, c)
    tma = c.tma and all(t.data_ptr() % 16 == 0 for t in (x, weight))
    # A wider output (fp32 logits) does not fit in shared memory beside the tiles, so it is stored from registers.
    ends = [out] if ep.residual is None else [out, ep.residual]
    tma_out = tma and N % 8 == 0 and all(t.element_size() == 2 and t.data_ptr() % 16 == 0 for t in ends)
    rows = described(x, [c.block_t, c.block_k], tma)
    operands = [
        described(t, tile, by_tma)
        for n in (c.block_n, c.block_n // c.rest)
        for t, tile, by_tma in (
            (weight, [n, c.block_k], tma), (ep.residual, [c.block_t, n], tma_out), (out, [c.block_t, n], tma_out)
        )
    ]  # fmt: skip
    promote = PROMOTE_AFTER // c.block_k if eight and not blocks else 0
    if facts.part:
        promote = facts.part // c.block_k if facts.part < K else 0
    constants = _Constants(
        K, product.scale_rows, c.block_t, c.block_n, c.block_k, c.rest, tma, tma_out, promote,
        LOW_RANK_BLOCK if product.low_rank else 0,
    )  # fmt: skip
    _gemm_kernel[(whole + (tiles - whole) * c.rest,)](
        rows, *operands, ep, T, N, whole, product.low_rank, C=constants, num_warps=c.num_warps, num_stages=c.num_stages
    )


def described(tensor: Tensor | None, tile: list[int], tma: bool) -> Any:
    return tiled(tensor, *tile) if tma and tensor is not None else tensor


FAMILY = Family("gemm", GemmConfig, (__file__,), ("T", "N", "K", "itemsize", "gated"), rule, tokens=token_regime)
