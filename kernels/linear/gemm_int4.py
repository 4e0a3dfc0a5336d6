"""Linear layers with 4-bit weights: products of any number of tokens, and unpacking to 16 bits. `int4_words` has the layout.

`gemm_int4`: the weights are the tensor cores' left operand, as in `gemm_small`. The integers q − z are exact in 16 bits, and each
group's sum is multiplied by its scale in fp32, so the weights are never rounded. With more tokens (`Int4Config.exact`), the scale
is multiplied into the weights first, which rounds them to 16 bits. Prompts (`gemm_unpacked`): a kernel writes the weights as
16-bit numbers, and the 16-bit GEMM multiplies them.

The method of unpacking is Kim et al. 2022 ("Who says elephants can't run") and Marlin (Frantar et al. 2024): a nibble in the low
mantissa bits of a constant exponent is a floating-point number 128 + q (bf16) or 1024 + q (fp16).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.device import interpreting
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, even_parts, launch_options, registers, shared_limit, token_block
from minirt.kernels.linear.epilogue import add_parts, finish, load_residual, load_rows, touch
from minirt.kernels.linear.int4_words import (
    e2m1,
    factor,
    group_words,
    offset,
    scale_words,
    times_power,
    unpack,
    unpack_e2m1,
    unpack_symmetric,
    weights,
    zero_point,
)
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK, INT4_MAX_TOKENS, int4_group

CHUNK = INT4_CHUNK  # columns that a row's 32 words hold
MAX_TOKENS = INT4_MAX_TOKENS  # of `gemm_int4`
_MOST_PARTS = 9  # of K
_EXACT_TOKENS = 64  # tokens up to which scales multiply sums
_SPLIT_TOKENS = 128  # tokens up to which, in one order, each part of K is of another program

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Int4Config:
    """A launch configuration of `gemm_int4`.

    Args:
        block_n, block_t: rows of the weight and tokens of a tile.
        split: number of parts of K.
        programs: number of programs that should share an SM; it limits their registers.
        exact: whether scales multiply sums, in fp32, instead of weights.
    """

    block_n: int
    block_t: int
    num_warps: int = 4
    num_stages: int = 4
    split: int = 1
    programs: int = 1
    exact: bool = True


@triton.jit
def _unpack(w, words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words → the four tiles q − z (of MXFP4, values) of their nibbles, exact in DTYPE. `words`: the scale word of each row."""
    if words.dtype == tl.uint32:
        if ASM:
            return unpack_e2m1(w, DTYPE)
        else:
            return e2m1(w, 0).to(DTYPE), e2m1(w, 1).to(DTYPE), e2m1(w, 2).to(DTYPE), e2m1(w, 3).to(DTYPE)
    elif ASM and words.dtype != tl.int32:
        return unpack_symmetric(w, DTYPE)
    elif ASM:
        return unpack(w, tl.broadcast_to(offset(words, DTYPE)[:, None], w.shape))
    else:
        z = zero_point(words)[:, None]
        return (
            ((w & 15).to(tl.float32) - z).to(DTYPE), (((w >> 4) & 15).to(tl.float32) - z).to(DTYPE),
            (((w >> 8) & 15).to(tl.float32) - z).to(DTYPE), (((w >> 12) & 15).to(tl.float32) - z).to(DTYPE),
        )  # fmt: skip


@triton.jit
def _rounded(q, words, J: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The weights of nibble J in DTYPE: q · scale, rounded. `words`: the scale word of each row."""
    if words.dtype == tl.uint32:
        power = factor(words, J)[:, None]
        return times_power(q, power) if ASM else (q.to(tl.float32) * power).to(DTYPE)
    elif ASM and DTYPE == tl.bfloat16:  # noqa: SIM300
        return weights(q, words)
    else:
        return (q.to(tl.float32) * factor(words)[:, None]).to(DTYPE)


@triton.jit
def load_chunk(ptrs, k, K: tl.constexpr):
    """The columns of x from k on that a chunk's nibbles multiply: four times 32. Masked only if chunks may reach past K."""
    columns = ()
    for j in tl.static_range(4):
        if K % 128 != 0:
            inside = (k + 32 * j + tl.arange(0, 32))[None, :] < K
            columns += (tl.load(ptrs + (k + 32 * j), mask=inside, other=0.0, eviction_policy="evict_last"),)
        else:
            columns += (tl.load(ptrs + (k + 32 * j), eviction_policy="evict_last"),)
    return columns


@triton.jit
def multiply_chunk(w, words, x, acc, GROUP: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """acc + the product of a chunk: w [BLOCK_N, 32] words, `words` the scale words of its groups of 32 · GROUP columns."""
    if words[0].dtype == tl.uint32:
        q = _unpack(w, words[0], DTYPE, ASM)
        for j in tl.static_range(4):
            if EXACT:
                part = tl.dot(q[j], x[j].T, tl.zeros(acc.shape, tl.float32), input_precision="ieee")
                acc += part * factor(words[0], j)[:, None]
            else:
                acc = tl.dot(_rounded(q[j], words[0], j, DTYPE, ASM), x[j].T, acc, input_precision="ieee")
    elif EXACT:
        for g in tl.static_range(4 // GROUP):
            q, part = _unpack(w, words[g], DTYPE, ASM), tl.zeros(acc.shape, tl.float32)
            for j in tl.static_range(GROUP * g, GROUP * g + GROUP):
                part = tl.dot(q[j], x[j].T, part, input_precision="ieee")
            acc += part * factor(words[g])[:, None]
    else:
        for j in tl.static_range(4):
            q = _unpack(w, words[j // GROUP], DTYPE, ASM)
            acc = tl.dot(_rounded(q[j], words[j // GROUP], j, DTYPE, ASM), x[j].T, acc, input_precision="ieee")
    return acc


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP: groups have 32 · GROUP columns. EXACT: as in `Int4Config`. ASM: whether words
    are unpacked by inline assembly, in 16 bits and not in the interpreter. ONE_ORDER: as in `gemm_small`, in chunks."""

    K: int
    GROUP: int
    DTYPE: tl.dtype
    SPLIT: int
    BLOCK_N: int
    BLOCK_T: int
    STAGES: int
    EXACT: bool
    ASM: bool
    ONE_ORDER: int = 0


@prepared
@triton.jit(do_not_specialize=["T"])
def _gemm_int4_kernel(x_ptr, weight_ptr, ep, out_ptr, sums_ptr, counters_ptr, T, N, C, PDL: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_T] of out [T, N]."""
    GATED: tl.constexpr = ep.activation is not None
    CHUNKS: tl.constexpr = (C.K + 128 - 1) // 128
    PART: tl.constexpr = C.ONE_ORDER if C.ONE_ORDER != 0 and C.SPLIT > 1 else (CHUNKS + C.SPLIT - 1) // C.SPLIT
    SEVERAL: tl.constexpr = C.SPLIT == 1 and C.ONE_ORDER != 0 and C.ONE_ORDER < CHUNKS  # parts of a program
    columns = tl.cdiv(T, C.BLOCK_T)
    part = tl.program_id(0) % C.SPLIT
    tile = tl.program_id(0) // C.SPLIT
    n0 = tile // columns * C.BLOCK_N
    t0 = tile % columns * C.BLOCK_T
    n = n0 + tl.arange(0, C.BLOCK_N)
    t = t0 + tl.arange(0, C.BLOCK_T)
    first = part * PART
    last = tl.minimum(first + PART, CHUNKS)
    # Rows and tokens past the end repeat the last one instead of being masked; they are not stored.
    row = tl.minimum(n, N - 1)
    row_ptrs = weight_ptr + row.to(tl.int64) * (CHUNKS * 32)
    up = tl.cast(N, tl.int64) * (CHUNKS * 32)  # an N of 1 is a constant
    all_rows = 2 * N if GATED else N
    scales = ep.scale + row
    stored = (n[:, None] < N) & (t[None, :] < T)
    at = t[None, :].to(tl.int64) * N + n[:, None]
    of_rows = load_rows(ep, n[:, None], n[:, None] < N, N, False)
    if PDL:
        # While the kernel that computes x still runs, prefetch the weights' first cache lines (and translate their addresses).
        line = row_ptrs + tl.minimum(first * 32, CHUNKS * 32 - 1)
        touch(line)
        if GATED:
            touch(line + up)
        tl.extra.cuda.gdc_wait()
    s = tl.arange(0, 32)
    x_ptrs = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[:, None] * C.K + s[None, :]
    w_ptrs = row_ptrs[:, None] + s[None, :]
    acc = tl.zeros((C.BLOCK_N, C.BLOCK_T), tl.float32)
    acc_up = acc
    if SEVERAL:
        sums = acc
    for chunk in tl.range(first, last, num_stages=C.STAGES):
        if SEVERAL:  # never if gated, see `product.part_of`
            ended = chunk % C.ONE_ORDER == 0
            sums, acc = tl.where(ended, sums + acc, sums), tl.where(ended, 0.0, acc)
        x = load_chunk(x_ptrs, chunk * 128, C.K)
        w = tl.load(w_ptrs + chunk * 32, eviction_policy="evict_first")
        words = group_words(scales, all_rows, chunk, C.K, C.GROUP, WIDE=C.ASM and C.EXACT)
        acc = multiply_chunk(w, words, x, acc, C.GROUP, C.EXACT, C.DTYPE, C.ASM)
        if GATED:
            w = tl.load(w_ptrs + (chunk * 32 + up), eviction_policy="evict_first")
            words = group_words(scales + N, all_rows, chunk, C.K, C.GROUP, WIDE=C.ASM and C.EXACT)
            acc_up = multiply_chunk(w, words, x, acc_up, C.GROUP, C.EXACT, C.DTYPE, C.ASM)
    if SEVERAL:
        acc = sums + acc
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # after the last reads, see `pdl`
    residual = load_residual(ep, at, stored)  # before the wait for the other parts
    mine = True
    if C.SPLIT > 1:
        place = (t - t0)[None, :] * C.BLOCK_N + (n - n0)[:, None]
        sums_ptr += tile * (C.SPLIT * C.BLOCK_N * C.BLOCK_T)
        acc, mine = add_parts(acc, place, None, sums_ptr, counters_ptr + tile, part, C.SPLIT)
    if mine:
        acc = finish(acc, acc_up, of_rows, (), residual, ep)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@prepared
@triton.jit
def _unpack_kernel(
    words_ptr, scale_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    MULTIPLIED: tl.constexpr = False, ASM: tl.constexpr = False,
):  # fmt: skip
    """Rows of out [N, K]: 128 columns of BLOCK_N rows. MULTIPLIED: to the last bit the weights that `multiply_chunk` multiplies
    unless it is EXACT."""
    CHUNKS: tl.constexpr = (K + 128 - 1) // 128
    GROUPS: tl.constexpr = (K + 32 * GROUP - 1) // (32 * GROUP)
    chunk = tl.program_id(0) % CHUNKS
    n = tl.program_id(0) // CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.arange(0, 32)
    row = tl.minimum(n, N - 1).to(tl.int64)
    words = tl.load(words_ptr + row[:, None] * (CHUNKS * 32) + (chunk * 32 + s)[None, :])
    w = words.to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # kernels before this one read the buffer that it writes
    for j in tl.static_range(4):
        group = tl.minimum((chunk * 4 + j) // GROUP, GROUPS - 1).to(tl.int64)
        scale_words = tl.load(scale_ptr + group * N + row)
        k = chunk * 128 + 32 * j + s
        if MULTIPLIED:
            q = _unpack(words, scale_words, out_ptr.dtype.element_ty, ASM)
            value = _rounded(q[j], scale_words, j, out_ptr.dtype.element_ty, ASM)
        elif scale_words.dtype == tl.uint32:
            value = e2m1(w, j) * factor(scale_words, j)[:, None]
        else:
            value = (((w >> (4 * j)) & 15).to(tl.float32) - zero_point(scale_words)[:, None]) * factor(scale_words)[:, None]
        tl.store(
            out_ptr + row[:, None] * K + k[None, :], value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :]
        )


def is_int4(weight: Tensor) -> bool:
    """Whether a weight is stored in 4 bits."""
    return weight.dtype == torch.int16


def rule(facts: ProductFacts, gpu: Gpu) -> Int4Config:
    """From sweeps (docs/decisions/int4.md). It depends on T only through `token_block`."""
    c = _free_rule(facts, gpu)
    if not facts.part:
        return c
    # The one order is that of the 16-bit product of the unpacked weight. With more tokens, the workspace has no room for parts.
    split = cdiv(facts.K, facts.part) if facts.T <= _SPLIT_TOKENS else 1
    return replace(c, block_n=min(c.block_n, 64), split=split, exact=False)


def _free_rule(facts: ProductFacts, gpu: Gpu) -> Int4Config:
    T, N, K, itemsize, gated, (cc, num_sms) = facts.T, facts.N, facts.K, facts.itemsize, facts.gated, gpu
    block_t, chunks = token_block(T), cdiv(K, CHUNK)
    if itemsize == 4:
        return Int4Config(32, min(block_t, 32), 4, 1, 1 if gated else min(4, chunks))
    # Rows, warps, stages, programs of an SM, programs of all SMs for each of them, and the fewest chunks of a part of K.
    if block_t <= 16:
        block_n, warps, stages, programs, enough, shortest = (64, 4, 3, 4, 1.0, 1) if gated else (128, 4, 4, 2, 1.91, 5)
    elif block_t <= 32:
        block_n, warps, stages, programs, enough, shortest = 64, 4, 4, 3, 2.55, 9
    elif block_t <= 128 and not gated:
        block_n, warps, stages, programs, enough, shortest = 128, 8, 4, 1, 1.0, 4
    else:
        block_n, warps, stages, programs, enough, shortest = 64, 4, 3, (3 if block_t <= 64 else 1), 2.0, 4
    block_t = min(block_t, 128)
    tiles = cdiv(N, block_n) * cdiv(token_block(T), block_t)
    step = (block_n * 64 + 8 * block_n) * (2 if gated else 1) + block_t * 2 * CHUNK  # bytes of a stage: words, scales, tokens
    while programs > 1 and 2 * step > shared_limit(cc) // programs - 2048:
        programs -= 1
    stages = max(2, min(stages, (shared_limit(cc) // programs - 2048) // step))
    split = 1 if gated else max(1, min(int(enough * num_sms / tiles), _MOST_PARTS, chunks // shortest))
    return Int4Config(block_n, block_t, warps, stages, split, programs, block_t <= _EXACT_TOKENS)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[Int4Config]:
    """Configurations around the rule's."""
    c = rule(facts, gpu)
    parts = (1,) if facts.gated or cdiv(facts.N, c.block_n) > 8 * gpu.sms else (1, 2, 3, 4, 6, 9)
    return [
        replace(c, block_n=block_n, num_warps=warps, num_stages=stages, programs=programs, split=split)
        for block_n, warps in ((64, 4), (128, 4), (128, 8)) for stages in (3, 4) for programs in (1, 2, 3) for split in parts
        if programs * warps <= 12
    ]  # fmt: skip


def gemm_int4(product: Product, config: Int4Config | None = None) -> None:
    """Write the output of a product with 4-bit weights. `dispatch` checks it before."""
    x, ep, workspace, (T, N, K) = product.x, product.epilogue, product.workspace, product.shape
    _, group = scale_words(product)
    facts = product.facts(token_block(T))
    c = config or FAMILY.lookup(x.device, facts)
    tiles = cdiv(N, c.block_n) * cdiv(T, c.block_t)
    split, sums, counters = 1, None, None
    if workspace is not None and c.split > 1:
        split = c.split if facts.part else even_parts(cdiv(K, CHUNK), c.split)
        sums, counters = workspace.sums(tiles * split * c.block_n * c.block_t), workspace.counters(tiles)
    constants = _Constants(
        K, group // 32, DTYPES[x.dtype], split, c.block_n, c.block_t, c.num_stages, c.exact,
        ASM=_by_assembly(x.dtype), ONE_ORDER=facts.part // CHUNK if facts.part < K else 0,
    )  # fmt: skip
    _gemm_int4_kernel[(tiles * split,)](
        x, product.weight, ep, product.out, sums, counters, T, N, C=constants, maxnreg=registers(c.num_warps, c.programs),
        **launch_options(c.num_warps, c.num_stages, product.pdl),
    )  # fmt: skip


def _by_assembly(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2 and not interpreting()


def unpack_weight(
    words: Tensor, scale: Tensor, K: int, dtype: torch.dtype, pdl: bool = False, multiplied: bool = False
) -> Tensor:
    """Packed words [N, ⌈K / 128⌉ · 32] and scale words [groups, N] → the weight [N, K] in `dtype`. multiplied: as `gemm_int4`
    rounds it in an invariant step."""
    N = words.shape[0]
    out = torch.empty(N, K, dtype=dtype, device=words.device)
    _unpack_kernel[(cdiv(N, 32) * cdiv(K, CHUNK),)](
        words, scale, out, N, K=K, GROUP=int4_group(K, scale.shape[0]) // 32, BLOCK_N=32, MULTIPLIED=multiplied,
        ASM=multiplied and _by_assembly(dtype), **launch_options(4, 1, pdl),
    )  # fmt: skip
    return out


def gemm_unpacked(product: Product, launch: Callable[[Product], None]) -> None:
    """Unpack the weight, and let `launch` write the output of the 16-bit product."""
    x, ep = product.x, product.epilogue
    scale, _ = scale_words(product)
    wide = unpack_weight(product.weight, scale, x.shape[1], x.dtype, product.pdl, product.invariant)
    # Without PDL, since `gemm_sm90` fetches weights before it waits, and the kernel before writes these.
    launch(product._replace(weight=wide, epilogue=ep._replace(scale=None), pdl=False))


FAMILY = Family("gemm_int4", Int4Config, (__file__,), ("T", "N", "K", "itemsize", "gated"), rule, candidates, token_block)
