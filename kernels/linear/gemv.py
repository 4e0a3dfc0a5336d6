"""Linear layers of one token (matrix times vector), limited by the time to read the weights; of few tokens, one by one.

Products are fp32 FMAs. RMSNorm of the input is fused. A program computes a few whole rows, so no sum spans several programs. To
keep enough bytes in flight for the full memory bandwidth, it holds `tiles` loads in registers and issues another whenever it has
used one; with PDL, the first of them before it waits for the kernel that computes its input.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minirt.kernels.compile.tuning import Family, around, cached_lookup
from minirt.kernels.launch import Gpu, cdiv, launch_options, require_fp8
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows
from minirt.kernels.linear.product import LOW_RANK_BLOCK, Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared

WARP = 32


@dataclass(frozen=True)
class GemvConfig:
    """A launch configuration of `gemv`, of `gemv_int4` and of `few_tokens_int4`.

    Args:
        block_n: outputs of a program; a power of two. A gated program reads two weight rows for each.
        num_warps: warps of a program, side by side along K.
        tiles: tiles in flight.
        registers: the most registers of a thread; None for no limit.
    """

    block_n: int
    num_warps: int
    tiles: int
    registers: int | None = None


@triton.jit
def load_tile(ptrs, k, i: tl.constexpr, C, EVICT: tl.constexpr):
    """Tile i of the rows whose first tile is at `ptrs`. Masked only if the tile may reach past K."""
    if (i + 1) * C.BLOCK_K <= C.K:
        return tl.load(ptrs + i * C.BLOCK_K, eviction_policy=EVICT)
    else:
        return tl.load(ptrs + i * C.BLOCK_K, mask=k + i * C.BLOCK_K < C.K, other=0.0, eviction_policy=EVICT)


@triton.jit
def chunk_products(w, x, CHUNK: tl.constexpr):
    """w [BLOCK_N, BLOCK_K] times x [BLOCK_K], summed over the CHUNK neighbouring values of one thread."""
    products = w.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, [w.shape[0], w.shape[1] // CHUNK, CHUNK]), 2)


@triton.jit
def chunk_scales(scale_ptr, first, n0, N, i: tl.constexpr, C):
    """The scale of each chunk of tile i, for BLOCK_N weight rows from first + n0 on.

    It is [1, chunks] if they lie in one block of rows, else [BLOCK_N, chunks].
    """
    k = i * C.BLOCK_K + tl.arange(0, C.BLOCK_K // C.CHUNK)[None, :] * C.CHUNK
    if C.SCALE_ROWS % C.BLOCK_N == 0:
        row = (first + n0) // C.SCALE_ROWS
    else:
        row = (first + tl.minimum(n0 + tl.arange(0, C.BLOCK_N), N - 1))[:, None] // C.SCALE_ROWS
    ptrs = scale_ptr + row * ((C.K + 127) // 128) + k // 128
    if (i + 1) * C.BLOCK_K <= C.K:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=k < C.K, other=0.0)


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        SCALE_ROWS: rows of a block with one scale; None: there are no blocks.
        CHUNK: neighbouring columns that a thread loads at once, and whose products it adds first.
        TILES: tiles in flight.
        MANY: whether there are several tokens, each with its programs.
        LOW_RANK: columns of an adapter. LOW_RANK_BLOCK: of a step of `LowRank`.
    """

    K: int
    SCALE_ROWS: int | None
    BLOCK_N: int
    BLOCK_K: int
    CHUNK: int
    TILES: int
    MANY: bool
    LOW_RANK: int = 0
    LOW_RANK_BLOCK: int = 0


@triton.jit
def _low_rank_tiles(added, n, k, N, GATED: tl.constexpr, C):
    """Tiles of rows of b (each of gate and of up, if gated); columns that the token's adapter has, and the first of them in y."""
    place = tl.load(added.adapters)
    first = tl.multiple_of(tl.maximum(place, 0) * C.LOW_RANK, 16)
    b_ptrs = added.b + tl.minimum(n, N - 1).to(tl.int64)[:, None] * added.b_stride + first + k[None, :]
    tiles, width = (), tl.where(place >= 0, C.LOW_RANK, 0)
    for i in tl.static_range((C.LOW_RANK + C.BLOCK_K - 1) // C.BLOCK_K):
        inside = (i * C.BLOCK_K + k < width)[None, :]
        tiles += (tl.load(b_ptrs + i * C.BLOCK_K, mask=inside, other=0.0),)
        if GATED:
            tiles += (tl.load(b_ptrs + tl.cast(N, tl.int64) * added.b_stride + i * C.BLOCK_K, mask=inside, other=0.0),)
    return tiles, width, first - tl.load(added.steps + 1) * C.LOW_RANK_BLOCK


@prepared
@triton.jit
def _gemv_kernel(x_ptr, norm, weight_ptr, ep, out_ptr, N, added, C, PDL: tl.constexpr):
    """Computes BLOCK_N values of out [N] of token program_id(1). Scales of blocks multiply the sum of each chunk of products."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at the start, see `pdl`
    GATED: tl.constexpr = ep.activation is not None
    BLOCKS: tl.constexpr = C.SCALE_ROWS is not None
    COUNT: tl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    n0 = tl.program_id(0) * C.BLOCK_N
    n = n0 + tl.arange(0, C.BLOCK_N)
    valid = n < N
    at = n
    if C.MANY:
        at += tl.program_id(1) * N
        x_ptr += tl.program_id(1) * C.K
    # One warp reads neighbouring chunks of one row. x is loaded in the same order, so no value moves between threads.
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    # Rows past the end read the last row again instead of being masked. Their results are not stored.
    gate_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * C.K + k[None, :]
    up_ptrs = gate_ptrs + tl.cast(N, tl.int64) * C.K
    gate, up = (), ()
    for i in tl.static_range(C.TILES):
        gate += (load_tile(gate_ptrs, k[None, :], i, C, "evict_first"),)
        if GATED:
            up += (load_tile(up_ptrs, k[None, :], i, C, "evict_first"),)
    gate_scales, up_scales = (), ()
    if BLOCKS:
        for i in tl.static_range(C.TILES):
            gate_scales += (chunk_scales(ep.scale, 0, n0, N, i, C),)
            if GATED:
                up_scales += (chunk_scales(ep.scale, N, n0, N, i, C),)
    rows = load_rows(ep, n, valid, N, not BLOCKS)
    if added is not None:
        b_tiles, width, y_start = _low_rank_tiles(added, n, k, N, GATED, C)
    if PDL and added is None:  # else x is complete, see `low_rank`
        tl.extra.cuda.gdc_wait()
    residual = load_residual(ep, at, valid)
    squares = tl.zeros((C.BLOCK_K,), tl.float32)
    gate_sums = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)
    up_sums = gate_sums
    for i in tl.static_range(COUNT):
        x = load_tile(x_ptr + k, k, i, C, "").to(tl.float32)
        if norm is not None:
            # The root mean square divides the finished sums, so it is not needed before the loop ends.
            squares += x * x
            x *= load_tile(norm.weight + k, k, i, C, "").to(tl.float32)
        products = chunk_products(gate[i], x, C.CHUNK)
        gate_sums += products * gate_scales[i] if BLOCKS else products
        if i + C.TILES < COUNT:
            gate += (load_tile(gate_ptrs, k[None, :], i + C.TILES, C, "evict_first"),)
            if BLOCKS:
                gate_scales += (chunk_scales(ep.scale, 0, n0, N, i + C.TILES, C),)
        if GATED:
            products = chunk_products(up[i], x, C.CHUNK)
            up_sums += products * up_scales[i] if BLOCKS else products
            if i + C.TILES < COUNT:
                up += (load_tile(up_ptrs, k[None, :], i + C.TILES, C, "evict_first"),)
                if BLOCKS:
                    up_scales += (chunk_scales(ep.scale, N, n0, N, i + C.TILES, C),)
    if added is not None:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for i in tl.static_range((C.LOW_RANK + C.BLOCK_K - 1) // C.BLOCK_K):
            y = tl.load(added.y + y_start + i * C.BLOCK_K + k, mask=i * C.BLOCK_K + k < width, other=0.0).to(tl.float32)
            if GATED:
                gate_sums += chunk_products(b_tiles[2 * i], y, C.CHUNK)
                up_sums += chunk_products(b_tiles[2 * i + 1], y, C.CHUNK)
            else:
                gate_sums += chunk_products(b_tiles[i], y, C.CHUNK)
    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / C.K + norm.eps)
    result = tl.sum(gate_sums, 1) * inverse_rms
    result_up = tl.sum(up_sums, 1) * inverse_rms
    result = finish(result, result_up, rows, (), residual, ep)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=valid)


def rule(facts: ProductFacts, gpu: Gpu) -> GemvConfig:
    """From sweeps (docs/decisions/linear-decode.md).

    A row is about four tiles long, of fp8 five or six. With a few rows, a program has 8 to 16 loads in flight, of fp8 up to 32:
    half of each row, or all of it.
    """
    N, K, itemsize, gated, num_sms = facts.N, facts.K, facts.itemsize, facts.gated, gpu.sms
    fp8 = itemsize == 1
    chunks = cdiv(K, WARP * chunk_size(itemsize))
    at_once = not gated and 64 * num_sms >= N  # all programs run at the same time
    long = fp8 and (at_once or not facts.blocks)
    most = 4 if long and gated else 8
    num_warps = min(most, 1 << max(0, round(math.log2(chunks / (5.5 if long else 4)))))  # the nearest power of two
    count = cdiv(chunks, num_warps)
    if num_warps == 8:
        # Long rows: four programs run on an SM. With more rows in a program, x is read less often. This matters more for fp8,
        # where x costs more instructions than the weights. But the last round of programs should be nearly full.
        rows = 2 if gated or (fp8 and count > 8) else 4
        fewest = 2 if fp8 else 1
        full = 0.8 if fp8 else 0.9
        while rows > fewest and (rounds := cdiv(N, rows) / (4 * num_sms)) < full * math.ceil(rounds):
            rows //= 2
        loads = 4 if fp8 else 10 // (2 * rows if gated else rows)  # that fit in 64 registers
        return GemvConfig(rows, 8, tiles=min(cdiv(count, 2), loads), registers=64)
    if at_once:
        if facts.blocks:
            return GemvConfig(2, num_warps, tiles=4)
        few = fp8 or 24 * num_sms > N
        return GemvConfig(4, num_warps, tiles=4) if few else GemvConfig(8, num_warps, tiles=2)
    if facts.blocks:
        return GemvConfig(4 if gated else 8, num_warps, tiles=4)
    if fp8:
        return GemvConfig(2 if gated else 4, num_warps, tiles=8)
    return GemvConfig(2 if gated else 4, num_warps, tiles=cdiv(count, 2))


def candidates(facts: ProductFacts, gpu: Gpu) -> list[GemvConfig]:
    """Configurations around the rule's."""
    c = rule(facts, gpu)
    return [
        GemvConfig(n, warps, tiles, registers)
        for n in around(c.block_n, 8) for warps in around(c.num_warps, 8) for tiles in around(c.tiles, 16)
        for registers in {None, c.registers}
    ]  # fmt: skip


def chunk_size(itemsize: int) -> int:
    """Number of weights in one load of a thread: 16 bytes of them, but only 8 of fp8, to match a 16-byte load of x."""
    return min(8, 16 // itemsize)


class _Plan(NamedTuple):
    """What the launches of products of one shape have in common: their programs, constants and options."""

    programs: int
    constants: _Constants
    options: dict[str, Any]


def _plan(c: GemvConfig, facts: ProductFacts, scale_rows: int | None, aligned: bool, many: bool, pdl: bool) -> _Plan:
    chunk = chunk_size(facts.itemsize)
    block_k = chunk * WARP * c.num_warps
    if facts.K % chunk or not aligned:
        chunk = 1  # unaligned rows: each thread loads and sums single values
    constants = _Constants(facts.K, scale_rows, c.block_n, block_k, chunk, min(c.tiles, cdiv(facts.K, block_k)), many)
    return _Plan(cdiv(facts.N, c.block_n), constants, {"maxnreg": c.registers, **launch_options(c.num_warps, 1, pdl)})


@cached_lookup
def _lookup_plan(
    device: torch.device, facts: ProductFacts, scale_rows: int | None, aligned: bool, many: bool, pdl: bool
) -> _Plan:
    return _plan(FAMILY.lookup(device, facts), facts, scale_rows, aligned, many, pdl)


def gemv(product: Product, config: GemvConfig | None = None) -> None:
    """Write the output of a product of one token, or of few that read the weight once each. Unchecked, see `dispatch`.

    A token's values do not depend on the number of tokens. x is not quantized.
    """
    x, weight, facts, T = product.x, product.weight, product.facts(1), product.x.shape[0]
    if facts.itemsize == 1:
        require_fp8(x.device)
    of = facts, product.scale_rows if facts.blocks else None, weight.data_ptr() % 16 == 0, T > 1, product.pdl
    programs, constants, options = _lookup_plan(x.device, *of) if config is None else _plan(config, *of)
    if product.low_rank is not None:
        constants = constants._replace(LOW_RANK=product.low_rank.width, LOW_RANK_BLOCK=LOW_RANK_BLOCK)
    _gemv_kernel[(programs, T)](
        x, product.norm, weight, product.epilogue, product.out, facts.N, product.low_rank, C=constants, **options
    )


FAMILY = Family("gemv", GemvConfig, (__file__,), ("N", "K", "itemsize", "gated", "blocks"), rule, candidates)
