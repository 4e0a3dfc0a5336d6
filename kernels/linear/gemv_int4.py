"""Linear layers of one token with 4-bit weights, as in `gemv`: fp32 FMAs, the norm fused, several loads of each thread in flight.

`int4_words` has the layout; here, two neighbouring words are one of 32 bits. A nibble becomes a number by a mask alone: bits p to
p + 3, read as fp32, are the denormal number q · 2^(p − 149). x is multiplied by 2^(96 − p) before, so that all products are
q · x · 2^−53, exact and far from the ends of fp32's range. Finished sums are multiplied by 2^53. So this kernel must never be
compiled with flushing of denormals, which Triton does not do.

A thread holds 8 neighbouring words of a row, which are in one chunk of 128 columns. Rows are separate one-dimensional tensors, so
that scales are loaded by the threads that need them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minirt.kernels.compile.tuning import Family, around
from minirt.kernels.launch import Gpu, cdiv, launch_options
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows
from minirt.kernels.linear.gemv import GemvConfig
from minirt.kernels.linear.int4_words import e2m1_bits, factor, group_words, scale_words, zero_point
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK

_WARP_PAIRS = 128  # pairs of words; 4 of each thread


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP: groups have 32 · GROUP columns. BLOCK: pairs of words of a row in a tile."""

    K: int
    GROUP: int
    ROWS: int
    BLOCK: int
    TILES: int


@triton.jit
def load_words(ptrs, at, WIDTH: tl.constexpr, END: tl.constexpr):
    """A tile of pairs of words, at places `at` of rows of WIDTH pairs. It ends before END, and is masked if END is past WIDTH."""
    if END <= WIDTH:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=at < WIDTH, other=0, eviction_policy="evict_first")


@triton.jit
def _columns(ptr, chunk, word, start, j: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """The columns that nibble j of the two words of each pair multiplies, in fp32. The other arguments: as for `load_x`."""
    pair = tl.max_contiguous(tl.multiple_of(chunk * 64 + 16 * j + word % 16, 4), 4)
    k = 2 * pair
    if ptr.dtype.element_ty.primitive_bitwidth == 16 and K % 8 == 0:
        # Two neighbours in one load of 32 bits.
        pairs = ptr.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(tl.multiple_of((start >> 1) + pair, 4), 4)
        both = tl.load(pairs) if WHOLE else tl.load(pairs, mask=k < K, other=0)
        if ptr.dtype.element_ty == tl.bfloat16:
            return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
        else:
            low, high = both.to(tl.int16).to(tl.float16, bitcast=True), (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            return low.to(tl.float32), high.to(tl.float32)
    else:
        ptrs = ptr + (start + k)
        low, high = tl.load(ptrs, mask=k < K, other=0.0), tl.load(ptrs + 1, mask=k + 1 < K, other=0.0)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _per_thread(x):
    """Sums over the 4 neighbouring values of one thread."""
    return tl.sum(tl.reshape(x, [x.shape[0] // 4, 4]), 1)


@triton.jit
def load_x(x_ptr, norm, chunk, word, start, squares, K: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """What `row_sum` takes of a tile of the row of x that begins at x_ptr + start, and `squares` with each thread's x² added.

    The row is normalized but for its root mean square. chunk: of the row, for each pair of words of the tile. word: number of
    the pair in the tile. WHOLE: whether K has all of the tile's columns, so that no load is masked.
    """
    low, high, totals = (), (), ()
    for g in tl.static_range(4 // GROUP):
        total = tl.zeros(word.shape, tl.float32)
        for j in tl.static_range(GROUP * g, GROUP * g + GROUP):
            first, second = _columns(x_ptr, chunk, word, start, j, K, WHOLE)
            if norm is not None:
                squares += _per_thread(first * first + second * second)
                first_norm, second_norm = _columns(norm.weight, chunk, word, 0, j, K, WHOLE)
                first *= first_norm
                second *= second_norm
            total += first + second
            low += (first * 2.0 ** (96 - 4 * j),)
            high += (second * 2.0 ** (96 - 4 * j),)
        totals += (_per_thread(total) * 2.0**-53,)
    return low, high, totals, squares


@triton.jit
def row_sum(acc, w, scales, low, high, totals, GROUP: tl.constexpr, share=1.0):
    """acc + 2^−53 · share · the products of each thread's words of a tile.

    low, high: four tiles of columns each, for the two words of a pair, times 2^(96 − 4j). totals: 2^−53 · sums of groups of x.
    """
    if scales[0].dtype == tl.uint32:
        for j in tl.static_range(4):
            bits = e2m1_bits(w, j)
            products = (bits << 16).to(tl.float32, bitcast=True) * low[j]
            products += (bits & -65536).to(tl.float32, bitcast=True) * high[j]
            acc += factor(scales[0], j) * share * (_per_thread(products) * 2.0 ** (4 * j - 23))  # 2^(126 − (96 − 4j) − 53)
    else:
        other = w >> 16
        for g in tl.static_range(4 // GROUP):
            products = tl.zeros(w.shape, tl.float32)
            for j in tl.static_range(GROUP * g, GROUP * g + GROUP):
                products += (w & (15 << 4 * j)).to(tl.float32, bitcast=True) * low[j]
                products += (other & (15 << 4 * j)).to(tl.float32, bitcast=True) * high[j]
            acc += factor(scales[g]) * share * (_per_thread(products) - zero_point(scales[g]) * totals[g])
    return acc


@triton.jit
def row_words(ptr, row, word, i: tl.constexpr, C):
    """Tile i of a row of pairs of words, from the pairs `word` of a tile: [C.BLOCK]."""
    WIDTH: tl.constexpr = (C.K + 127) // 128 * 16
    ptrs = ptr + row.to(tl.int64) * WIDTH + i * C.BLOCK + word
    return load_words(ptrs, i * C.BLOCK + word, WIDTH, (i + 1) * C.BLOCK)


@triton.jit
def _result(acc, inverse_rms):
    return tl.sum(acc, 0) * 9007199254740992.0 * inverse_rms  # 2^53


@prepared
@triton.jit
def _gemv_int4_kernel(x_ptr, norm, weight_ptr, ep, out_ptr, N, C, PDL: tl.constexpr):
    """Computes ROWS values of one token's out [N], BLOCK pairs of words of each row at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # at the start, see `pdl`
    GATED: tl.constexpr = ep.activation is not None
    COUNT: tl.constexpr = ((C.K + 127) // 128 * 16 + C.BLOCK - 1) // C.BLOCK
    BOTH: tl.constexpr = 2 * C.ROWS if GATED else C.ROWS  # rows of gate, then of up
    first = tl.program_id(0) * C.ROWS
    all_rows = 2 * N if GATED else N
    word = tl.max_contiguous(tl.arange(0, C.BLOCK), 4)
    # Rows past the end read the last row again instead of being masked. Their results are not stored.
    loaded = ()
    for i in tl.static_range(C.TILES):
        for r in tl.static_range(BOTH):
            row = tl.minimum(first + r % C.ROWS, N - 1) + (N if r >= C.ROWS else 0)
            loaded += (row_words(weight_ptr, row, word, i, C),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = ()
    for _ in tl.static_range(BOTH):
        sums += (tl.zeros((C.BLOCK // 4,), tl.float32),)
    squares = tl.zeros((C.BLOCK // 4,), tl.float32)
    for i in tl.static_range(COUNT):
        chunk = (i * C.BLOCK + word) // 16
        # The root mean square divides the finished sums, so it is not needed before the loop ends.
        low, high, totals, squares = load_x(x_ptr, norm, chunk, word, 0, squares, C.K, C.GROUP, 8 * (i + 1) * C.BLOCK <= C.K)
        chunk = (i * C.BLOCK + 4 * tl.arange(0, C.BLOCK // 4)) // 16  # of each thread
        added = ()
        for r in tl.static_range(BOTH):
            row = tl.minimum(first + r % C.ROWS, N - 1) + (N if r >= C.ROWS else 0)
            scales = group_words(ep.scale, all_rows, chunk, C.K, C.GROUP, row)
            added += (row_sum(sums[r], loaded[i * BOTH + r], scales, low, high, totals, C.GROUP),)
            if i + C.TILES < COUNT:
                loaded += (row_words(weight_ptr, row, word, i + C.TILES, C),)
        sums = added
    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / C.K + norm.eps)
    for r in tl.static_range(C.ROWS):
        n = first + r
        rows, residual = load_rows(ep, n, n < N, N, False), load_residual(ep, n, n < N)
        result = _result(sums[r], inverse_rms)
        up = _result(sums[C.ROWS + r], inverse_rms) if GATED else result
        result = finish(result, up, rows, (), residual, ep)
        tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


def rule(facts: ProductFacts, gpu: Gpu) -> GemvConfig:
    """Like that of `gemv`: a row is two to five tiles long."""
    pairs = -(-facts.K // INT4_CHUNK) * 16
    rows = 2 if facts.gated else 4
    if pairs >= 16 * _WARP_PAIRS:
        return GemvConfig(rows, 4, 2, 128)
    if facts.N * (2 if facts.gated else 1) < 64 * gpu.sms:  # few rows: more threads for each
        return GemvConfig(rows, max(1, min(2, pairs // _WARP_PAIRS)), 2, 128)
    return GemvConfig(2 * rows, 1, 2)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[GemvConfig]:
    """Configurations around the rule's."""
    c = rule(facts, gpu)
    return [
        GemvConfig(rows, warps, tiles, registers)
        for rows in around(c.block_n, 8) for warps in around(c.num_warps, 8) for tiles in around(c.tiles, 4)
        for registers in {None, 128, c.registers}
    ]  # fmt: skip


def gemv_int4(product: Product, config: GemvConfig | None = None) -> None:
    """Write the output of a product of one token with 4-bit weights."""
    ep, (_, N, K) = product.epilogue, product.shape
    _, group = scale_words(product)
    c = config or FAMILY.lookup(product.x.device, product.facts(1))
    pairs, block = product.weight.view(torch.int32), _WARP_PAIRS * c.num_warps
    constants = _Constants(K, group // 32, c.block_n, block, min(c.tiles, cdiv(pairs.shape[1], block)))
    _gemv_int4_kernel[(cdiv(N, c.block_n),)](
        product.x, product.norm, pairs, ep, product.out, N, C=constants, maxnreg=c.registers,
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip


FAMILY = Family("gemv_int4", GemvConfig, (__file__,), ("N", "K", "gated"), rule, candidates)
