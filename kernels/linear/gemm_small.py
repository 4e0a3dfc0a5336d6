"""Linear layers of a few tokens, where reading the weights takes most of the time.

The weights are on the wide M side of the tensor cores' MMA. The tokens, padded to a power of two, are on its N side: acc [n, t].
From sm_90 on, TMA fetches the tiles where their alignment permits. Both operands have 16 or 32 bits, or both are e4m3. If N gives
too few programs, K is split: the last program to arrive adds the partial sums in a fixed order, so the same input gives the same
bits.

If the weight has a scale for each block, a step in K stays within 128 columns, so that one scale for each token and one for each
row of blocks multiply its products before they are added to the fp32 sums.

Two things are needed to read at full memory bandwidth: all programs are equal and run at once, so that none waits for a second
round; and each has enough tiles in flight.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minirt.errors import InputError
from minirt.kernels.compile.tuning import Family, around
from minirt.kernels.fp8 import block_scales, require_one_scale
from minirt.kernels.launch import (
    MOST_SUMS,
    Gpu,
    cdiv,
    even_parts,
    fit_stages,
    launch_options,
    registers,
    require_fp8,
    shared_limit,
    token_block,
)
from minirt.kernels.linear.epilogue import (
    add_parts,
    finish,
    load_residual,
    load_rows,
    load_tokens,
    low_rank_step,
    store_row_maxima,
    touch,
    touch_low_rank,
)
from minirt.kernels.linear.product import LOW_RANK_BLOCK, Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared, tiled
from minirt.kernels.reference import FP8_BLOCK

MAX_TOKENS = 128
_MOST_PARTS = 8  # of K; the last program to arrive reads the sums of all parts
_LARGE = 200 * 1024  # bytes: the most shared memory that is used, on devices that have more


@dataclass(frozen=True)
class GemmSmallConfig:
    """A launch configuration of `gemm_small`.

    Args:
        block_n, block_k: rows and columns of a tile of the weight.
        split: number of parts of K.
        programs: number of programs that should share an SM.
        tma: whether TMA fetches the tiles.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    split: int = 1
    programs: int = 1
    tma: bool = False


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        SCALE_ROWS: rows of a block with one scale; None: there are no blocks.
        SPLIT: parts of K, each of another program.
        LOW_RANK_BLOCK: columns of a step of `LowRank`.
        ONE_ORDER: elements of K in a part, see `product.part_of`; 0: the parts are even, and a program has one.
    """

    K: int
    SCALE_ROWS: int | None
    SPLIT: int
    BLOCK_N: int
    BLOCK_K: int
    BLOCK_T: int
    TMA: bool
    ONE_ORDER: int = 0
    LOW_RANK_BLOCK: int = 0


@triton.jit
def _load(ptrs, k, C, EVICT: tl.constexpr):
    """Load `ptrs`. Masks by k (which broadcasts to `ptrs`) only if BLOCK_K does not divide K."""
    if C.K % C.BLOCK_K == 0:
        return tl.load(ptrs, eviction_policy=EVICT)
    else:
        return tl.load(ptrs, mask=k < C.K, other=0.0, eviction_policy=EVICT)


@triton.jit
def _product(w, x, acc, C):
    """acc + w [BLOCK_N, BLOCK_K] · xᵀ, x [BLOCK_T, BLOCK_K]."""
    if w.dtype == tl.float8e4nv and C.ONE_ORDER == 0:
        # Hopper's tensor cores keep few bits of fp8 sums: after each step in K, the sum is added in fp32.
        return tl.dot(w, x.T, acc, max_num_imprecise_acc=w.shape[1])
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def _block_scales(ep, first, n0, block, N, C):
    return block_scales(ep.scale, first, n0, block, N, C.K, C.SCALE_ROWS, C.BLOCK_N, 1)


@prepared
@triton.jit(do_not_specialize=["T"])
def _gemm_small_kernel(x, weight, weight_ptr, ep, out_ptr, sums_ptr, counters_ptr, T, N, added, C, PDL: tl.constexpr):
    """out [T, N] of T ≤ BLOCK_T tokens: acc [BLOCK_N, BLOCK_T] += weight [BLOCK_N, BLOCK_K] · xᵀ [BLOCK_K, BLOCK_T].

    With TMA, x and weight are descriptors, else pointers. `weight_ptr` is always a pointer, because Triton prefetches nothing
    through a descriptor.
    """
    GATED: tl.constexpr = ep.activation is not None
    BLOCKS: tl.constexpr = C.SCALE_ROWS is not None
    EVEN: tl.constexpr = ((C.K + C.SPLIT * C.BLOCK_K - 1) // (C.SPLIT * C.BLOCK_K)) * C.BLOCK_K
    PART: tl.constexpr = C.ONE_ORDER if C.ONE_ORDER != 0 and C.SPLIT > 1 else EVEN
    tile = tl.program_id(0) // C.SPLIT
    part = tl.program_id(0) % C.SPLIT
    n0 = tile * C.BLOCK_N
    n = n0 + tl.arange(0, C.BLOCK_N)
    t = tl.arange(0, C.BLOCK_T)
    k = tl.arange(0, C.BLOCK_K)
    first = part * PART
    last = tl.minimum(first + PART, C.K)
    # Rows and tokens past the end repeat the last one instead of being masked; they are not stored.
    row_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * C.K
    up = tl.cast(N, tl.int64) * C.K  # an N of 1 is a constant
    stored = (n[:, None] < N) & (t[None, :] < T)
    at = t[None, :] * N + n[:, None]
    of_rows = load_rows(ep, n[:, None], n[:, None] < N, N, not BLOCKS)
    if added is not None:
        added_steps = tl.load(added.steps)
        added_first, added_last = part * added_steps // C.SPLIT, (part + 1) * added_steps // C.SPLIT
    if PDL:
        # While the kernel that computes x still runs, prefetch the weights' first cache lines (and translate their addresses).
        touch(row_ptrs + first)
        if GATED:
            touch(row_ptrs + first + up)
        if added is None:
            tl.extra.cuda.gdc_wait()
        else:  # x is complete, see `low_rank`
            for i in range(added_first, added_last):
                touch_low_rank(added, i, n, N, 0, C.LOW_RANK_BLOCK)
                if GATED:
                    touch_low_rank(added, i, n, N, N, C.LOW_RANK_BLOCK)
    of_tokens = load_tokens(ep, t[None, :], t[None, :] < T, not BLOCKS)
    if not C.TMA:
        x_ptrs = x + tl.minimum(t, T - 1)[:, None] * C.K + k[None, :]
        w_ptrs = row_ptrs[:, None] + k[None, :]
    acc = tl.zeros((C.BLOCK_N, C.BLOCK_T), tl.float32)
    acc_up = acc
    x_scales = ep.x_scale + tl.minimum(t, T - 1) * ((C.K + 127) // 128) if BLOCKS else None
    SEVERAL: tl.constexpr = C.SPLIT == 1 and C.ONE_ORDER != 0 and C.ONE_ORDER < C.K  # parts of a program
    if SEVERAL:
        sums = acc
        sums_up = acc_up
    for start in range(first, last, C.BLOCK_K):
        if SEVERAL:
            ended = start % C.ONE_ORDER == 0
            sums, acc = tl.where(ended, sums + acc, sums), tl.where(ended, 0.0, acc)
            if GATED:
                sums_up, acc_up = tl.where(ended, sums_up + acc_up, sums_up), tl.where(ended, 0.0, acc_up)
        j = (start + k)[None, :]
        if BLOCKS:
            # Loaded first, so that they arrive while the tiles are awaited. Of 32 steps, one finds them in L2, the others in L1.
            block = start // 128
            token = tl.load(x_scales + block)[None, :]
            factor = token * _block_scales(ep, 0, n0, block, N, C)
            if GATED:
                factor_up = token * _block_scales(ep, N, n0, block, N, C)
        if C.TMA:
            a = x.load([0, start])
            w = weight.load([n0, start])
        else:
            a = _load(x_ptrs + start, j, C, "evict_last")
            w = _load(w_ptrs + start, j, C, "evict_first")
        acc = acc + tl.dot(w, a.T) * factor if BLOCKS else _product(w, a, acc, C)
        if GATED:
            w = weight.load([N + n0, start]) if C.TMA else _load(w_ptrs + up + start, j, C, "evict_first")
            acc_up = acc_up + tl.dot(w, a.T) * factor_up if BLOCKS else _product(w, a, acc_up, C)
    if SEVERAL:
        acc = sums + acc
        acc_up = sums_up + acc_up
    if added is not None:  # its steps take no more shared memory than two of the weight
        if PDL:
            tl.extra.cuda.gdc_wait()
        for i in tl.range(added_first, added_last, num_stages=C.BLOCK_K // 32 if C.BLOCK_K >= 64 else 1):
            y, b = low_rank_step(added, i, t, n, T, N, 0, C.LOW_RANK_BLOCK)
            acc = tl.dot(b, y.T, acc, input_precision="ieee")
            if GATED:
                _, b = low_rank_step(added, i, t, n, T, N, N, C.LOW_RANK_BLOCK)
                acc_up = tl.dot(b, y.T, acc_up, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the last reads, see `pdl`
    residual = load_residual(ep, at, stored)  # before the wait for the other parts
    mine = True
    if C.SPLIT > 1:
        sums_ptr += tile * (C.SPLIT * C.BLOCK_N * C.BLOCK_T)
        place = t[None, :] * C.BLOCK_N + (n - n0)[:, None]
        acc, mine = add_parts(acc, place, stored, sums_ptr, counters_ptr + tile, part, C.SPLIT)
    if mine:
        acc = finish(acc, acc_up, of_rows, of_tokens, residual, ep)
        needed = 1
        if ep.row_maxima is not None:
            store_row_maxima(acc, n, t, N, T, ep, tile)
            needed = tl.load(ep.logits_needed)
        if needed != 0:
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


def _tile(block_t: int, tiles: int, gated: bool, itemsize: int, num_sms: int) -> tuple[int, int, int]:
    """(rows of a tile, bytes of a row per step, programs per SM) on a device with much shared memory. `tiles`: tiles of 64 rows.

    With more tokens, there is more arithmetic, and the sums of a split K are larger. So there are fewer programs, with more
    tiles in flight in each (docs/decisions/linear-decode.md).
    """
    few = tiles <= 2 * num_sms  # at most two tiles of 64 rows for an SM
    wide = not gated and not few  # larger tiles read x less often
    if block_t <= 32:
        return 64, 256, 2 if block_t == 32 and few and not gated else 3
    if block_t == 64 and (gated or wide):
        return (128 if wide else 64), 128, 3
    if block_t == 64:
        once = num_sms // tiles * tiles  # programs if each SM has at most one
        return 64, 256, 1 if once >= 0.7 * num_sms else 2
    if itemsize == 1 and not wide:
        return 64, 256, 2 if num_sms < tiles <= 2 * num_sms else 1
    return (128 if wide else 64), 128, 1


def _tile_in_one_order(block_t: int, tiles: int, K: int, parts: int, itemsize: int, num_sms: int) -> tuple[int, int, int, int]:
    """The same for 17 to 64 tokens, and the split, if `product.part_of` gives the parts: a program has one of them, or all.

    To exchange sums takes longer than all of a short K, or of FP8, on half of the SMs (docs/decisions/batch-invariance.md).
    """
    if tiles >= 0.7 * num_sms or (tiles >= 0.4 * num_sms and (K <= 4096 or itemsize == 1)):
        return 64, 256, cdiv(tiles, num_sms), 1
    programs = min(3, cdiv(tiles * parts, num_sms))
    return 64, 128 if programs == 3 and block_t == 64 else 256, programs, parts


def rule(facts: ProductFacts, gpu: Gpu) -> GemmSmallConfig:
    """From sweeps (docs/decisions/linear-decode.md). It depends on T only through `token_block`."""
    N, K, itemsize, gated, blocks, (cc, num_sms) = facts.N, facts.K, facts.itemsize, facts.gated, facts.blocks, gpu
    block_t, tiles, large = token_block(facts.T), cdiv(N, 64), shared_limit(cc) > _LARGE
    parts = cdiv(K, facts.part) if facts.part else 1
    one_order = parts if not gated and tiles < 2 * num_sms and parts * tiles * 64 * block_t <= MOST_SUMS else 1  # its split
    if itemsize == 4:
        block_n, step, programs = 32, 128, 2
    elif large and one_order > 1 and block_t in (32, 64):
        block_n, step, programs, one_order = _tile_in_one_order(block_t, tiles, K, parts, itemsize, num_sms)
    elif large:
        block_n, step, programs = _tile(block_t, tiles, gated, itemsize, num_sms)
    else:
        block_n, step, programs = 64, 128, 2
    if gated and itemsize > 1 and block_t <= 16 and 4 * tiles < 3 * num_sms:
        block_n = 32
    if parts > 1:
        block_n = min(block_n, 64)  # there may be two accumulators
    block_k = step // itemsize
    if blocks:
        # A step waits for its products. So more programs share an SM, if each keeps three tiles in flight.
        block_k = min(block_k, FP8_BLOCK)
        if large:
            block_n, programs = min(block_n, 64), 4 if block_t <= (16 if gated else 32) else 3 if gated and block_t <= 64 else 2
    budget = min(shared_limit(cc) // programs - 2048, _LARGE)
    row_bytes = (block_n * (2 if gated else 1) + block_t) * itemsize
    if 2 * row_bytes * block_k > budget:
        block_k //= 2
    # If three programs fit on an SM, split K for two and a half (with scales of blocks and
    # more than 16 tokens, for two): one part less gains more than a few more bytes in flight.
    enough = min(2 if blocks and block_t > 16 else 2.5, programs) * num_sms
    shortest = block_k * (12 if block_t == 128 else 2)  # a shorter part of K costs more for its sums than it gains
    split = 1 if gated else max(1, min(int(enough / cdiv(N, block_n)), _MOST_PARTS, K // shortest))
    split = one_order if facts.part else split
    # With 128 tokens, eight warps have the registers for the sums; fp8 needs them for its second, fp32 sums.
    num_warps = 8 if block_t == 128 and (itemsize == 1 or not large) else 4
    tma = cc >= 90 and itemsize <= 2 and K * itemsize % 16 == 0
    stages = fit_stages(row_bytes * block_k, budget, 8)
    return GemmSmallConfig(block_n, block_k, num_warps, stages, split, programs, tma)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[GemmSmallConfig]:
    """Configurations around the rule's."""
    c, configs = rule(facts, gpu), []
    # With enough tiles for several rounds, splitting K gains nothing, and the workspace has no room for the sums.
    parts = (1,) if facts.gated or cdiv(facts.N, c.block_n) > 8 * gpu.sms else (1, 2, 3, 4, 6)
    steps = around(c.block_k, FP8_BLOCK if facts.blocks else 256)
    for programs, block_k, split in itertools.product((1, 2, 3, 4) if facts.blocks else (1, 2, 3), steps, parts):
        row_bytes = (c.block_n * (2 if facts.gated else 1) + token_block(facts.T)) * facts.itemsize
        stages = fit_stages(row_bytes * block_k, shared_limit(gpu.capability) // programs - 2048, 8)
        if stages > 1:
            configs.append(replace(c, block_k=block_k, num_stages=stages, split=split, programs=programs))
    return configs


def row_maxima_tiles(product: Product) -> int:
    """How many row maxima the kernel stores for each row."""
    T, N, _ = product.shape
    return cdiv(N, FAMILY.lookup(product.weight.device, product.facts(token_block(T))).block_n)


def gemm_small(product: Product, config: GemmSmallConfig | None = None) -> None:
    """Write the output of a product of up to `MAX_TOKENS` tokens. `dispatch` checks it before."""
    x, weight, ep, T = product.x, product.weight, product.epilogue, product.x.shape[0]
    if x.dtype == torch.float8_e4m3fn:
        require_fp8(x.device)
    block_t, scale_rows = token_block(T), product.scale_rows
    facts = product.facts(block_t)
    N, K, c = facts.N, facts.K, config or FAMILY.lookup(x.device, facts)
    require_one_scale(scale_rows, c.block_k)
    tiles = cdiv(N, c.block_n)
    split, sums, counters = 1, None, None
    if product.workspace is not None and c.split > 1:
        split = c.split if facts.part else even_parts(cdiv(K, c.block_k), c.split)
        sums, counters = product.workspace.sums(tiles * split * c.block_n * block_t), product.workspace.counters(tiles)
    if ep.row_maxima is not None and (product.gated or ep.row_maxima.shape[1] != tiles):
        expected, shown = f"a plain product, {tiles} places", f"{ep.activation}, {ep.row_maxima.shape[1]} places"
        raise InputError("this product stores no row maxima", where="row_maxima", expected=expected, found=shown)
    tma = c.tma and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    operands = (x, weight)
    if tma:
        operands = (tiled(x, block_t, c.block_k), tiled(weight, c.block_n, c.block_k))
    _gemm_small_kernel[(tiles * split,)](
        *operands, weight, ep, product.out, sums, counters, T, N, product.low_rank,
        C=_Constants(
            K, scale_rows, split, c.block_n, c.block_k, block_t, tma, facts.part, LOW_RANK_BLOCK if product.low_rank else 0
        ),
        maxnreg=registers(c.num_warps, c.programs), **launch_options(c.num_warps, c.num_stages, product.pdl),
    )  # fmt: skip


FAMILY = Family(
    "gemm_small", GemmSmallConfig, (__file__,), ("T", "N", "K", "itemsize", "gated", "blocks"), rule, candidates, token_block
)
