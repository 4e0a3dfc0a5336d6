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

from minirt.kernels.arrival import MOST_POLLS
from minirt.kernels.compile.tuning import Family, around, cached_lookup
from minirt.kernels.launch import Gpu, cdiv, launch_options, next_power_of_2, require_fp8
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows
from minirt.kernels.linear.product import Product, ProductFacts
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
        ADAPTER: modules, most ranks of an adapter, and these as a power of two; None: there is none.
    """

    K: int
    SCALE_ROWS: int | None
    BLOCK_N: int
    BLOCK_K: int
    CHUNK: int
    TILES: int
    MANY: bool
    ADAPTER: tuple[int, int, int] | None = None


_MISSING = tl.constexpr(-1)  # bits of an fp32 NaN that no computation gives
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _store_y(adapter, n, y, valid):
    bits = y.to(tl.int32, bitcast=True)
    tl.store(adapter.y + n, tl.where(bits == _MISSING, _NAN, bits), mask=valid, cache_modifier=".cg")


@triton.jit
def _load_expansion(adapter, place, module, n, valid, rows, C):
    """B, scaling and y, as far as it is there, for `n` of the weight's rows."""
    r, at = tl.arange(0, C.ADAPTER[2]), tl.maximum(place, 0)
    inside = valid[:, None] & (r < C.ADAPTER[1])[None, :]
    b = tl.load(adapter.b + (at.to(tl.int64) * rows + n[:, None]) * C.ADAPTER[1] + r[None, :], mask=inside, other=0.0)
    scales = tl.load(adapter.scales + at * adapter.stride + module, mask=valid, other=0.0)
    y_ptrs = adapter.y + module[:, None] * C.ADAPTER[1] + r[None, :]
    return b, tl.where(place >= 0, scales, 0.0), y_ptrs, inside, tl.load(y_ptrs, mask=inside, other=0, volatile=True)


@triton.jit
def _expand(loaded):
    """scaling · B · y, when all of y is there."""
    b, scales, y_ptrs, inside, y = loaded
    polls = 0
    while (tl.max(tl.max((y == _MISSING).to(tl.int32), 1), 0) > 0) & (polls < MOST_POLLS):
        y, polls = tl.load(y_ptrs, mask=inside, other=0, volatile=True), polls + 1
    # Plus 0, which the compiler does not know: all lanes add rounded products to those of others.
    products = b.to(tl.float32) * y.to(tl.float32, bitcast=True) + tl.minimum(scales, 0.0)[:, None] * 0.0
    return tl.sum(products, 1) * scales


@prepared
@triton.jit
def _gemv_kernel(x_ptr, norm, weight_ptr, ep, out_ptr, N, adapter, C, PDL: tl.constexpr):
    """Computes BLOCK_N values of out [N] of token program_id(1). Scales of blocks multiply the sum of each chunk of products.

    With an adapter, the first programs compute y = A · norm(x) in the same way, whose rows are taken for rows of the weight. The
    others wait for it when they have their sums.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at the start, see `pdl`
    GATED: tl.constexpr = ep.activation is not None
    BLOCKS: tl.constexpr = C.SCALE_ROWS is not None
    COUNT: tl.constexpr = (C.K + C.BLOCK_K - 1) // C.BLOCK_K
    program = tl.program_id(0)
    if adapter is not None:
        A_ROWS: tl.constexpr = C.ADAPTER[0] * C.ADAPTER[1] // (2 if GATED else 1)
        A_PROGRAMS: tl.constexpr = (A_ROWS + C.BLOCK_N - 1) // C.BLOCK_N
        place, added, added_up = tl.load(adapter.tiles), (), ()
        shrinks = program < A_PROGRAMS
        if shrinks:
            weight_ptr = adapter.a + tl.maximum(place, 0).to(tl.int64) * (C.ADAPTER[0] * C.ADAPTER[1] * C.K)
            N = tl.full((), A_ROWS, tl.int32)
        else:
            program -= A_PROGRAMS
    n0 = program * C.BLOCK_N
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
    expands = valid
    if adapter is not None:
        expands = n < tl.where(shrinks, 0, N)
        module = tl.load(adapter.modules + n, mask=expands, other=0)
        module_up = tl.load(adapter.modules + N + n, mask=expands, other=0) if GATED else module
    rows = load_rows(ep, n, expands, N, not BLOCKS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = load_residual(ep, at, expands)
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
        if adapter is not None and i == 0:  # now `place` is there, and nothing waits for it
            added = _load_expansion(adapter, place, module, n, expands, 2 * N if GATED else N, C)
            if GATED:
                added_up = _load_expansion(adapter, place, module_up, N + n, expands, 2 * N, C)
    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / C.K + norm.eps)
    result = tl.sum(gate_sums, 1) * inverse_rms
    result_up = tl.sum(up_sums, 1) * inverse_rms
    if adapter is not None:
        if shrinks:
            _store_y(adapter, n, result, valid)
            if GATED:
                _store_y(adapter, N + n, result_up, valid)
        else:
            result += _expand(added)
            if GATED:
                result_up += _expand(added_up)
    result = finish(result, result_up, rows, (), residual, ep)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=expands)


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
    if (adapter := product.adapter) is not None:
        _, modules, ranks, _ = adapter.a.shape
        constants = constants._replace(ADAPTER=(modules, ranks, next_power_of_2(ranks)))
        programs += cdiv(modules * ranks // (2 if facts.gated else 1), constants.BLOCK_N)
    _gemv_kernel[(programs, T)](
        x, product.norm, weight, product.epilogue, product.out, facts.N, adapter, C=constants, **options
    )


FAMILY = Family("gemv", GemvConfig, (__file__,), ("N", "K", "itemsize", "gated", "blocks"), rule, candidates)
