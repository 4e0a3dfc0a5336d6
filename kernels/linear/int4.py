"""Linear layers with 4-bit weights: the packed layout, products of any number of tokens, and unpacking to 16 bits.

A weight [N, K] is stored as words [N, ⌈K / 128⌉ · 32] of 16 bits and `scale` [groups, N] int32. In each chunk of 128 columns,
word s holds the columns s, 32 + s, 64 + s and 96 + s, the lowest four bits first. So two neighbouring words are one register of
the tensor cores' left operand four times over, and unpacking moves no value between threads. A scale is an fp32 number with the
group's zero point in its four lowest bits; see `reference.dequantize_int4`.

One token: `gemv_int4`. Few tokens (`gemm_int4`): the weights are the tensor cores' left operand, as in `gemm_small`. The
integers q − z are exact in 16 bits, and each group's sum is multiplied by its scale in fp32, so the weights are never rounded.
With more tokens, the scale is multiplied into the weights first, which rounds them to 16 bits. Prompts (`gemm_unpacked`): a
kernel writes the weights as 16-bit numbers, and the 16-bit GEMM multiplies them.

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
from minirt.errors import InputError
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, launch_options, next_power_of_2, shared_limit
from minirt.kernels.linear.epilogue import add_parts, finish, load_residual, load_rows, touch
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK, int4_group

CHUNK = INT4_CHUNK  # columns that a row's 32 words hold
WORDS = 32
MAX_TOKENS = 256  # of `gemm_int4`
_REGISTERS = 65536  # of an SM
_MOST_PARTS = 9  # of K
_EXACT = 64  # tokens up to which scales multiply sums

CASES = [
    {"T": T, "N": N, "K": K}
    for T, N, K in ((1, 96, 576), (1, 131, 97), (2, 17, 64), (3, 131, 577), (17, 192, 576), (77, 67, 208), (129, 40, 96))
]  # fmt: skip


@dataclass(frozen=True)
class Int4Config:
    """A launch configuration of `gemm_int4`.

    Args:
        block_n, block_t: rows of the weight and tokens of a tile.
        split: number of parts of K.
        programs: number of programs that should share an SM; it limits their registers.
        exact: whether scales multiply sums, in fp32, instead of weights.
        unroll: chunks of 128 columns in a step.
        ahead: cache lines of each row that are prefetched while the kernel before still runs.
    """

    block_n: int
    block_t: int
    num_warps: int = 4
    num_stages: int = 4
    split: int = 1
    programs: int = 1
    exact: bool = True
    unroll: int = 1
    ahead: int = 1

    @property
    def registers(self) -> int | None:
        """The most registers of a thread with which `programs` programs fit on an SM; None if that is no limit."""
        most = _REGISTERS // (self.programs * self.num_warps * 32) // 8 * 8
        return most if most < 255 else None


@triton.jit
def _unpack(w, zero, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words → the four tiles q − z of their nibbles, exact in DTYPE. `zero`: z as fp32, one for each row."""
    bf16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if ASM:
        offset = tl.broadcast_to((-(zero + (128.0 if bf16 else 1024.0))).to(DTYPE)[:, None], w.shape)
        if bf16:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 w1, w2, w3, n0, n1, n2, n3, one;
                shr.u32 w1, $4, 4;
                shr.u32 w2, $4, 8;
                shr.u32 w3, $4, 12;
                lop3.b32 n0, $4, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 n1, w1, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 n2, w2, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 n3, w3, 0x000f000f, 0x43004300, 0xea;
                mov.b32 one, 0x3f803f80;
                fma.rn.bf16x2 $0, n0, one, $5;
                fma.rn.bf16x2 $1, n1, one, $5;
                fma.rn.bf16x2 $2, n2, one, $5;
                fma.rn.bf16x2 $3, n3, one, $5;
                }""",
                "=r,=r,=r,=r,r,r", [w, offset], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 w1, w2, w3, n0, n1, n2, n3;
                shr.u32 w1, $4, 4;
                shr.u32 w2, $4, 8;
                shr.u32 w3, $4, 12;
                lop3.b32 n0, $4, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 n1, w1, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 n2, w2, 0x000f000f, 0x64006400, 0xea;
                lop3.b32 n3, w3, 0x000f000f, 0x64006400, 0xea;
                add.rn.f16x2 $0, n0, $5;
                add.rn.f16x2 $1, n1, $5;
                add.rn.f16x2 $2, n2, $5;
                add.rn.f16x2 $3, n3, $5;
                }""",
                "=r,=r,=r,=r,r,r", [w, offset], dtype=(tl.float16,) * 4, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        z = zero[:, None]
        return (
            ((w & 15).to(tl.float32) - z).to(DTYPE),
            (((w >> 4) & 15).to(tl.float32) - z).to(DTYPE),
            (((w >> 8) & 15).to(tl.float32) - z).to(DTYPE),
            (((w >> 12) & 15).to(tl.float32) - z).to(DTYPE),
        )


@triton.jit
def _scaled(q, scale, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """q · scale, rounded once to DTYPE: `scale` fp32 is split into a high and a low part."""
    if ASM and DTYPE == tl.bfloat16:  # noqa: SIM300
        high = scale.to(DTYPE)
        low = (scale - high.to(tl.float32)).to(DTYPE)
        high, low = tl.broadcast_to(high[:, None], q.shape), tl.broadcast_to(low[:, None], q.shape)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 rest, zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 rest, $1, $3, zero;
            fma.rn.bf16x2 $0, $1, $2, rest;
            }""",
            "=r,r,r,r", [q, high, low], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (q.to(tl.float32) * scale[:, None]).to(DTYPE)


@triton.jit
def _factors(words):
    """(scale, zero point) of scale words, both fp32."""
    return (words & -16).to(tl.float32, bitcast=True), (words & 15).to(tl.float32)


@triton.jit
def _columns(ptrs, k, K: tl.constexpr, MASKED: tl.constexpr):
    """The 32 columns of x from k on. Masked only if they may reach past K."""
    if MASKED:
        return tl.load(ptrs + k, mask=(k + tl.arange(0, 32))[None, :] < K, other=0.0, eviction_policy="evict_last")
    else:
        return tl.load(ptrs + k, eviction_policy="evict_last")


@triton.jit
def _multiply(w, words, x0, x1, x2, x3, acc, GROUP: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """acc + the product of a chunk: w [BLOCK_N, 32] words, `words` the scale words of its groups of 32 · GROUP columns."""
    if EXACT:
        zero = tl.zeros(acc.shape, tl.float32)
        if GROUP == 4:
            scale, z = _factors(words[0])
            q0, q1, q2, q3 = _unpack(w, z, DTYPE, ASM)
            part = tl.dot(q0, x0.T, zero, input_precision="ieee")
            part = tl.dot(q1, x1.T, part, input_precision="ieee")
            part = tl.dot(q2, x2.T, part, input_precision="ieee")
            part = tl.dot(q3, x3.T, part, input_precision="ieee")
            acc += part * scale[:, None]
        elif GROUP == 2:
            scale, z = _factors(words[0])
            q0, q1, _, _ = _unpack(w, z, DTYPE, ASM)
            part = tl.dot(q0, x0.T, zero, input_precision="ieee")
            part = tl.dot(q1, x1.T, part, input_precision="ieee")
            acc += part * scale[:, None]
            scale, z = _factors(words[1])
            _, _, q2, q3 = _unpack(w, z, DTYPE, ASM)
            part = tl.dot(q2, x2.T, zero, input_precision="ieee")
            part = tl.dot(q3, x3.T, part, input_precision="ieee")
            acc += part * scale[:, None]
        else:
            x = (x0, x1, x2, x3)
            for j in tl.static_range(4):
                scale, z = _factors(words[j])
                q = _unpack(w, z, DTYPE, ASM)
                acc += tl.dot(q[j], x[j].T, zero, input_precision="ieee") * scale[:, None]
    else:
        x = (x0, x1, x2, x3)
        for j in tl.static_range(4):
            scale, z = _factors(words[j // GROUP])
            q = _unpack(w, z, DTYPE, ASM)
            acc = tl.dot(_scaled(q[j], scale, DTYPE, ASM), x[j].T, acc, input_precision="ieee")
    return acc


@triton.jit
def _group_words(ptrs, stride, chunk, groups, GROUP: tl.constexpr):
    """The scale words of a chunk's groups, a tuple. `groups`: how many there are; the last chunk may have fewer than others."""
    words = ()
    for j in tl.static_range(4 // GROUP):
        group = chunk * (4 // GROUP) + j
        words += (tl.load(ptrs + tl.minimum(group, groups - 1).to(tl.int64) * stride),)
    return words


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP: groups have 32 · GROUP columns. UNROLL, AHEAD, EXACT: as in `Int4Config`."""

    K: int
    GROUP: int
    DTYPE: tl.dtype
    SPLIT: int
    BLOCK_N: int
    BLOCK_T: int
    STAGES: int
    EXACT: bool
    UNROLL: int
    AHEAD: int
    ASM: bool


@prepared
@triton.jit(do_not_specialize=["T"])
def _gemm_int4_kernel(
    x_ptr, weight_ptr, ep, out_ptr, sums_ptr, counters_ptr, T, N, C, PDL: tl.constexpr
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_T] of out [T, N]. With an activation, the weight has 2N rows."""
    GATED: tl.constexpr = ep.activation is not None
    CHUNKS: tl.constexpr = (C.K + 128 - 1) // 128
    GROUPS: tl.constexpr = (C.K + 32 * C.GROUP - 1) // (32 * C.GROUP)
    PART: tl.constexpr = (CHUNKS + C.SPLIT * C.UNROLL - 1) // (C.SPLIT * C.UNROLL) * C.UNROLL
    MASKED: tl.constexpr = C.K % (128 * C.UNROLL) != 0
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
    rows = weight_ptr + row.to(tl.int64) * (CHUNKS * 32)
    up = tl.cast(N, tl.int64) * (CHUNKS * 32)  # an N of 1 is a constant
    all_rows = 2 * N if GATED else N
    scales = ep.scale + row
    stored = (n[:, None] < N) & (t[None, :] < T)
    at = t[None, :].to(tl.int64) * N + n[:, None]
    of_rows = load_rows(ep, n[:, None], n[:, None] < N, N, False)
    if PDL:
        # While the kernel that computes x still runs, prefetch the weights' first cache lines (and translate their addresses).
        for i in tl.static_range(C.AHEAD):
            ahead = rows + tl.minimum(first * 32 + 64 * i, CHUNKS * 32 - 1)
            touch(ahead)
            if GATED:
                touch(ahead + up)
        tl.extra.cuda.gdc_wait()
    s = tl.arange(0, 32)
    x_ptrs = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[:, None] * C.K + s[None, :]
    w_ptrs = rows[:, None] + s[None, :]
    acc = tl.zeros((C.BLOCK_N, C.BLOCK_T), tl.float32)
    acc_up = acc
    for start in tl.range(first, last, C.UNROLL, num_stages=C.STAGES):
        for i in tl.static_range(C.UNROLL):
            k = (start + i) * 128
            chunk = start + i
            if C.UNROLL > 1:
                chunk = tl.minimum(chunk, CHUNKS - 1)  # past the end, x is zero
            x0 = _columns(x_ptrs, k, C.K, MASKED)
            x1 = _columns(x_ptrs, k + 32, C.K, MASKED)
            x2 = _columns(x_ptrs, k + 64, C.K, MASKED)
            x3 = _columns(x_ptrs, k + 96, C.K, MASKED)
            w = tl.load(w_ptrs + chunk * 32, eviction_policy="evict_first")
            words = _group_words(scales, all_rows, chunk, GROUPS, C.GROUP)
            acc = _multiply(w, words, x0, x1, x2, x3, acc, C.GROUP, C.EXACT, C.DTYPE, C.ASM)
            if GATED:
                w = tl.load(w_ptrs + (chunk * 32 + up), eviction_policy="evict_first")
                words = _group_words(scales + N, all_rows, chunk, GROUPS, C.GROUP)
                acc_up = _multiply(w, words, x0, x1, x2, x3, acc_up, C.GROUP, C.EXACT, C.DTYPE, C.ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: waiting programs would take space from reading ones
    residual = load_residual(ep, at, stored)  # before the wait for the other parts
    mine = True
    if C.SPLIT > 1:
        inside = (t - t0)[None, :] * C.BLOCK_N + (n - n0)[:, None]
        sums_ptr += tile * (C.SPLIT * C.BLOCK_N * C.BLOCK_T)
        acc, mine = add_parts(acc, inside, None, sums_ptr, counters_ptr + tile, part, C.SPLIT)
    if mine:
        acc = finish(acc, acc_up, of_rows, (), residual, ep)
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@prepared
@triton.jit
def _unpack_kernel(
    words_ptr, scale_ptr, out_ptr, N, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rows of out [N, K]: 128 columns of BLOCK_N rows."""
    CHUNKS: tl.constexpr = (K + 128 - 1) // 128
    GROUPS: tl.constexpr = (K + 32 * GROUP - 1) // (32 * GROUP)
    chunk = tl.program_id(0) % CHUNKS
    n = tl.program_id(0) // CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.arange(0, 32)
    row = tl.minimum(n, N - 1).to(tl.int64)
    w = tl.load(words_ptr + row[:, None] * (CHUNKS * 32) + (chunk * 32 + s)[None, :]).to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # kernels before this one read the buffer that it writes
    for j in tl.static_range(4):
        group = tl.minimum((chunk * 4 + j) // GROUP, GROUPS - 1).to(tl.int64)
        scale, zero = _factors(tl.load(scale_ptr + group * N + row))
        k = chunk * 128 + 32 * j + s
        value = (((w >> (4 * j)) & 15).to(tl.float32) - zero[:, None]) * scale[:, None]
        tl.store(
            out_ptr + row[:, None] * K + k[None, :], value.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :]
        )


def token_block(T: int) -> int:
    """T padded to the power of two, at least 16, that the kernel computes."""
    return max(16, next_power_of_2(T))


def is_int4(weight: Tensor) -> bool:
    """Whether a weight is stored in 4 bits."""
    return weight.dtype == torch.int16


def rule(facts: ProductFacts, gpu: Gpu) -> Int4Config:
    """From sweeps over the layers of Qwen2.5-7B on an H200 (docs/decisions/int4.md). Depends on T only through `token_block`."""
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
    return Int4Config(block_n, block_t, warps, stages, split, programs, block_t <= _EXACT)


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
    if ep.scale is None:
        raise InputError("missing", where="scale", expected="scale words")
    c = config or FAMILY.lookup(x.device, product.facts(token_block(T)))
    tiles, chunks = cdiv(N, c.block_n) * cdiv(T, c.block_t), cdiv(K, CHUNK)
    split, sums, counters = 1, None, None
    if workspace is not None and c.split > 1:
        steps = cdiv(chunks, c.unroll)
        split = cdiv(steps, cdiv(steps, c.split))  # no part is empty
        sums, counters = workspace.sums(tiles * split * c.block_n * c.block_t), workspace.counters(tiles)
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[x.dtype]
    constants = _Constants(
        K, int4_group(K, ep.scale.shape[0]) // 32, dtype, split, c.block_n, c.block_t, c.num_stages, c.exact, c.unroll, c.ahead,
        ASM=x.element_size() == 2 and not interpreting(),
    )  # fmt: skip
    _gemm_int4_kernel[(tiles * split,)](
        x, product.weight, ep, product.out, sums, counters, T, N, C=constants, maxnreg=c.registers,
        **launch_options(c.num_warps, c.num_stages, product.pdl),
    )  # fmt: skip


def unpack(words: Tensor, scale: Tensor, K: int, dtype: torch.dtype, pdl: bool = False) -> Tensor:
    """Packed words [N, ⌈K / 128⌉ · 32] and scale words [groups, N] → the weight [N, K] in `dtype`."""
    N = words.shape[0]
    out = torch.empty(N, K, dtype=dtype, device=words.device)
    _unpack_kernel[(cdiv(N, 32) * cdiv(K, CHUNK),)](
        words, scale, out, N, K=K, GROUP=int4_group(K, scale.shape[0]) // 32, BLOCK_N=32, **launch_options(4, 1, pdl)
    )
    return out


def gemm_unpacked(product: Product, launch: Callable[[Product], None]) -> None:
    """Unpack the weight, and let `launch` write the output of the 16-bit product."""
    x, ep = product.x, product.epilogue
    if ep.scale is None:
        raise InputError("missing", where="scale", expected="scale words")
    wide = unpack(product.weight, ep.scale, x.shape[1], x.dtype, product.pdl)
    launch(product._replace(weight=wide, epilogue=ep._replace(scale=None)))


FAMILY = Family(
    "gemm_int4", Int4Config, (__file__,), ("T", "N", "K", "itemsize", "gated"), rule, candidates, token_block
)
