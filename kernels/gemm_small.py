"""The linear layers of 2 to 128 tokens, where reading the weights is most of the work.

The weights are on the wide M side of the tensor cores' MMA, the tokens, padded to a power of two, on its N side: acc [n, t].
From sm_90 on tiles travel by TMA, where alignment permits; fp8 weights become 16 bits wide in registers. Gated activation,
scales, bias and residual are the epilogue. Where N gives too few programs, K is split: partial sums go to the workspace and
the last program to arrive adds them up in a fixed order, so the same input gives the same bits.

What it takes to read at the speed of memory: as many equal programs as run at once, so that none waits for a second round, and
tiles enough on their way in each. (Programs of unequal shares, as in stream-K, were slower at every size.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minirt.kernels.common import (
    Workspace,
    activate,
    capability,
    fit_stages,
    launch_options,
    processors,
    require_fp8,
    shared_limit,
)

MAX_TOKENS = 128
_REGISTERS = 65536  # of a processor
_MOST_PARTS = 8  # of K: the last program to arrive reads the sums of all
_LARGE = 200 * 1024  # bytes of shared memory in use on devices that have more


@dataclass(frozen=True)
class TokensConfig:
    """Tile of the weights [block_n, block_k], `split` parts of K, and how many programs are meant to share a processor."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    split: int = 1
    programs: int = 1
    tma: bool = False

    @property
    def registers(self) -> int | None:
        """The most registers a thread may use for `programs` to fit; None where that is no limit."""
        most = _REGISTERS // (self.programs * self.num_warps * 32) // 8 * 8
        return most if most < 255 else None


@triton.jit
def _load(ptrs, k, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):
    """Load `ptrs`; k, broadcastable to them, is checked against K only where K has a ragged end."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs, eviction_policy=EVICT)
    else:
        return tl.load(ptrs, mask=k < K, other=0.0, eviction_policy=EVICT)


@triton.jit
def _touch(ptrs):
    """Fetch the cache lines at `ptrs` into L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _to_bf16(w):
    """float8_e4m3fn to bf16, exactly, with a third of the instructions of a conversion through fp32.

    Sign, exponent and mantissa move to their places in 16 bits; times 2¹²⁰ makes up for the exponents' different offsets. What
    is added to that is 0, or NaN for NaN, whose low seven bits are the only ones to carry into the eighth when 1 is added.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, e;
        and.b32 e, $2, 0x7f7f7f7f;
        add.u32 e, e, 0x01010101;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 c, c, 0x07f007f0;
        and.b32 d, d, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        prmt.b32 c, e, e, 0x9988;
        prmt.b32 d, e, e, 0xbbaa;
        mov.b32 e, 0x7b807b80;
        fma.rn.bf16x2 $0, a, e, c;
        fma.rn.bf16x2 $1, b, e, d;
        }""",
        "=r,=r,r",
        [w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _widened(w, dtype: tl.constexpr):
    """Weights in the dtype of the activations."""
    if w.dtype == dtype:
        return w
    elif dtype == tl.bfloat16:
        return _to_bf16(w)
    else:
        return w.to(dtype)


@triton.jit
def _scaled(acc, scale_ptr, bias_ptr, n, valid):
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + n, mask=valid, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _add_parts(acc, n, t, inside, sums_ptr, counter_ptr, part, SPLIT: tl.constexpr):
    """Of the programs that computed a tile's parts of K, the last to arrive gets their sum, and True. n, t: in the tile."""
    TILE: tl.constexpr = acc.shape[0] * acc.shape[1]
    at = t * acc.shape[0] + n
    # Past L1 on both sides: the partial sums of the other programs come through L2.
    tl.store(sums_ptr + part * TILE + at, acc, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros_like(acc)
        for i in tl.static_range(SPLIT):
            acc += tl.load(sums_ptr + i * TILE + at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr, 0)
    return acc, last


@triton.jit(do_not_specialize=["T"])
def _tokens_kernel(
    x,
    weight,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    T,
    N,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] of T ≤ BLOCK_T tokens: acc [BLOCK_N, BLOCK_T] += weight [BLOCK_N, BLOCK_K] · xᵀ [BLOCK_K, BLOCK_T].

    x and weight are descriptors with TMA, else pointers; with ACTIVATION the weight has 2N rows.
    """
    PART: tl.constexpr = ((K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)) * BLOCK_K
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    n0 = tile * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    first = part * PART
    last = tl.minimum(first + PART, K)
    # Rows and tokens past the end repeat the last one instead of being masked; they are not stored.
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
    up = N.to(tl.int64) * K
    if PDL:
        # The weights' first lines, and what it takes to find them, while the kernel that computes x still runs.
        _touch(rows + first)
        if ACTIVATION is not None:
            _touch(rows + first + up)
        tl.extra.cuda.gdc_wait()
    if not TMA:
        x_ptrs = x + tl.minimum(t, T - 1)[:, None] * K + k[None, :]
        w_ptrs = rows[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    acc_up = acc
    for start in range(first, last, BLOCK_K):
        j = (start + k)[None, :]
        if TMA:
            a = x.load([0, start])
            w = weight.load([n0, start])
        else:
            a = _load(x_ptrs + start, j, K, BLOCK_K, "evict_last")
            w = _load(w_ptrs + start, j, K, BLOCK_K, "evict_first")
        acc = tl.dot(_widened(w, a.dtype), a.T, acc, input_precision="ieee")
        if ACTIVATION is not None:
            w = weight.load([N + n0, start]) if TMA else _load(w_ptrs + up + start, j, K, BLOCK_K, "evict_first")
            acc_up = tl.dot(_widened(w, a.dtype), a.T, acc_up, input_precision="ieee")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not before: programs that wait would take the room of those that read
    n, t = n[:, None], t[None, :]
    at = t * N + n
    inside = (n < N) & (t < T)
    if ACTIVATION is not None:
        acc = _scaled(acc, scale_ptr, bias_ptr, n, n < N)
        acc_up = _scaled(acc_up, scale_ptr, bias_ptr, n + N, n < N)
        acc = activate(acc, ACTIVATION) * acc_up
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        acc = _scaled(acc, scale_ptr, None, n, n < N)
        added = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)  # loaded here, ahead of the wait for the other parts
        if bias_ptr is not None:
            added += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            added += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if SPLIT == 1:
            tl.store(out_ptr + at, (acc + added).to(out_ptr.dtype.element_ty), mask=inside)
        else:
            sums_ptr += tile * (SPLIT * BLOCK_N * BLOCK_T)
            acc, mine = _add_parts(acc, n - n0, t, inside, sums_ptr, counters_ptr + tile, part, SPLIT)
            if mine:
                tl.store(out_ptr + at, (acc + added).to(out_ptr.dtype.element_ty), mask=inside)


def token_block(T: int) -> int:
    """T padded to the power of two that its kernel computes."""
    return max(16, triton.next_power_of_2(T))


def _tile(block_t: int, tiles: int, gated: bool, num_processors: int) -> tuple[int, int, int]:
    """(rows, steps in K, programs a processor) on a device with much shared memory, for `tiles` tiles of 64 rows.

    The more tokens, the more arithmetic and the larger the sums that parts of K cost: then fewer programs, with more tiles
    on their way in each. From an H200, all of it (bench/LOG.md).
    """
    wide = tiles > 2 * num_processors and not gated  # many programs: larger tiles read x less often
    if block_t <= 32:
        return 64, 128, 3
    if block_t == 64 and (gated or wide):
        return (128 if wide else 64), 64, 3
    if block_t == 64:
        once = num_processors // tiles * tiles  # programs, where each processor has one
        return 64, 128, 1 if once >= 0.8 * num_processors else 2
    return (128 if wide else 64), 64, 1


def choose_config(
    T: int, N: int, K: int, itemsize: int, gated: bool, cc: int, num_processors: int, weight_itemsize: int | None = None
) -> TokensConfig:
    """The configuration for a shape and a regime: of T only the power of two it is padded to counts."""
    weight_itemsize = weight_itemsize or itemsize
    block_t, tiles, large = token_block(T), triton.cdiv(N, 64), shared_limit(cc) > _LARGE
    if itemsize == 4:
        block_n, block_k, programs = 32, 32, 2
    elif large:
        block_n, block_k, programs = _tile(block_t, tiles, gated, num_processors)
    else:
        block_n, block_k, programs = 64, 64, 2
    if gated and block_t <= 32 and 4 * tiles < 3 * num_processors:
        block_n = 32
    if weight_itemsize == 1:
        block_k *= 2  # rows of as many bytes
    budget = min(shared_limit(cc) // programs - 2048, _LARGE)
    row_bytes = block_n * (2 if gated else 1) * weight_itemsize + block_t * itemsize
    if 2 * row_bytes * block_k > budget:
        block_k //= 2
    # Where three programs fit, parts for two and a half: a few more bytes on their way are worth less than a part less.
    enough = min(2.5, programs) * num_processors
    split = 1 if gated else max(1, min(int(enough / triton.cdiv(N, block_n)), _MOST_PARTS, K // block_k // 2))
    num_warps = 8 if block_t == 128 and not large else 4  # for the registers
    tma = cc >= 90 and itemsize == 2 and K * weight_itemsize % 16 == 0
    stages = fit_stages(row_bytes * block_k, budget, 8)
    return TokensConfig(block_n, block_k, num_warps, stages, split, programs, tma)


def gemm_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None = None,
    *,
    scale: Tensor | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
    config: TokensConfig | None = None,
) -> Tensor:
    """x [T, K], T ≤ 128, weight [N, K] (with `activation` [2N, K]) → out [T, N], unchecked; `minirt.kernels.linear` checks.

    The weight has x's dtype, or is float8_e4m3fn with a `scale` fp32 for each row (compute capability 8.9 and later).
    """
    (T, K), N = x.shape, out.shape[1]
    if weight.dtype == torch.float8_e4m3fn:
        require_fp8(x.device)
    if config is None:
        cc, gated = capability(x.device), activation is not None
        config = choose_config(
            T, N, K, x.element_size(), gated, cc, processors(x.device), weight.element_size()
        )  # fmt: skip
    c, block_t = config, token_block(T)
    tiles, blocks = triton.cdiv(N, c.block_n), triton.cdiv(K, c.block_k)
    split, sums, counters = 1, None, None
    if workspace is not None and c.split > 1:
        split = triton.cdiv(blocks, triton.cdiv(blocks, c.split))  # parts that are not empty
        sums, counters = workspace.sums(tiles * split * c.block_n * block_t), workspace.counters(tiles)
    tma = c.tma and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    operands = (x, weight)
    if tma:
        tiles_of = ([block_t, c.block_k], [c.block_n, c.block_k])
        operands = tuple(TensorDescriptor.from_tensor(a, tile) for a, tile in zip(operands, tiles_of, strict=True))
    _tokens_kernel[(tiles * split,)](
        *operands, weight, scale, bias, residual, out, sums, counters, T, N, K=K, ACTIVATION=activation,
        SPLIT=split, BLOCK_N=c.block_n, BLOCK_K=c.block_k, BLOCK_T=block_t, TMA=tma, maxnreg=c.registers,
        **launch_options(c.num_warps, c.num_stages, pdl),
    )  # fmt: skip
    return out
