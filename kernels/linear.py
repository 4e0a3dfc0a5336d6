"""Linear layers for up to 128 tokens, where reading the weights is all the work.

One token: a matrix-vector product by FMA. 2 … 128 tokens: the weights on the wide M side of the tensor cores' MMA, the
tokens, padded to a power of two, on its N side. RMSNorm of the input, gated activation, bias and residual are fused.
Where N gives too few programs, K is split: partial sums go to the workspace and the last program to arrive adds them up
in a fixed order, so the same input gives the same bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.common import (
    Workspace,
    activate,
    capability,
    check_linear,
    check_tensor,
    fit_stages,
    launch_options,
    processors,
    shared_limit,
)

MAX_TOKENS = 128

CASES = [
    {"T": T, "N": N, "K": K}
    for T, N, K in (
        (1, 96, 576), (1, 131, 97), (1, 24, 1100), (2, 17, 64), (3, 131, 577),
        (16, 96, 1536), (17, 192, 576), (77, 67, 208), (128, 80, 128),
    )
]  # fmt: skip


@dataclass(frozen=True)
class LinearConfig:
    """How to cut one linear layer: tile of the weights [block_n, block_k], `split` parts of K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    split: int = 1


@triton.jit
def _add_and_store(acc, n, at, valid, bias_ptr, residual_ptr, out_ptr):
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _finish(acc, n, t, T, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT: tl.constexpr):
    """Add up the parts of K, add bias and residual and store; n and t broadcast to acc's shape, T · N < 2³¹."""
    at = t * N + n
    valid = (n < N) & (t < T)
    n = n + t * 0
    if SPLIT == 1:
        _add_and_store(acc, n, at, valid, bias_ptr, residual_ptr, out_ptr)
    else:
        # Past L1 on both sides: the partial sums of the other programs come through L2.
        tl.store(sums_ptr + tl.program_id(1) * T * N + at, acc, mask=valid, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        counter_ptr = counters_ptr + tl.program_id(0)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros_like(acc)
            for part in tl.static_range(SPLIT):
                total += tl.load(sums_ptr + part * T * N + at, mask=valid, other=0.0, cache_modifier=".cg")
            _add_and_store(total, n, at, valid, bias_ptr, residual_ptr, out_ptr)
            tl.store(counter_ptr, 0)


@triton.jit
def _load(ptrs, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load `ptrs`; k [.., BLOCK_K] or broadcastable is checked against K only where K has a ragged end."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=k < K, other=0.0)


@triton.jit
def _inverse_rms(x_ptr, t, eps, K: tl.constexpr, CHUNK: tl.constexpr):
    """1 / root mean square of the rows t [BLOCK_T] of x."""
    square = tl.zeros((t.shape[0], CHUNK), tl.float32)
    for start in range(0, K, CHUNK):
        k = (start + tl.arange(0, CHUNK))[None, :]
        x = _load(x_ptr + t[:, None] * K + k, k, K, CHUNK).to(tl.float32)
        square += x * x
    return tl.rsqrt(tl.sum(square, 1) / K + eps)


@triton.jit
def _vector_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    N,
    eps,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [N] of one token; with ACTIVATION the weight has 2N rows, gate and up."""
    PART: tl.constexpr = ((K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)) * BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * PART
    last = tl.minimum(first + PART, K)
    k = first + tl.arange(0, BLOCK_K)
    # Rows past the end read the last row again instead of being masked; they are not stored.
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    w_ptrs = weight_ptr + row + k[None, :]
    # The first tile is peeled: its load is issued before the wait for the kernel that computes x, and it is used after,
    # so that neither the compiler nor the hardware can drop or delay it.
    w = _load(w_ptrs, k[None, :], K, BLOCK_K)
    if ACTIVATION is not None:
        up_ptrs = w_ptrs + N.to(tl.int64) * K
        up = _load(up_ptrs, k[None, :], K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inverse_rms = 1.0
    if norm_ptr is not None:
        square = tl.zeros((NORM_BLOCK,), tl.float32)
        for start in tl.static_range(0, K, NORM_BLOCK):
            i = start + tl.arange(0, NORM_BLOCK)
            wide = _load(x_ptr + i, i, K, NORM_BLOCK).to(tl.float32)
            square += wide * wide
        inverse_rms = tl.rsqrt(tl.sum(square, 0) / K + eps)
    x = _normalized(x_ptr, norm_ptr, inverse_rms, k, K, BLOCK_K)[None, :]
    acc = w.to(tl.float32) * x
    if ACTIVATION is not None:
        acc_up = up.to(tl.float32) * x
    for start in range(BLOCK_K, last - first, BLOCK_K):
        j = k + start
        w = _load(w_ptrs + start, j[None, :], K, BLOCK_K)
        if ACTIVATION is not None:
            up = _load(up_ptrs + start, j[None, :], K, BLOCK_K)
        x = _normalized(x_ptr, norm_ptr, inverse_rms, j, K, BLOCK_K)[None, :]
        acc += w.to(tl.float32) * x
        if ACTIVATION is not None:
            acc_up += up.to(tl.float32) * x
    result = tl.sum(acc, 1)
    if ACTIVATION is not None:
        result_up = tl.sum(acc_up, 1)
        if bias_ptr is not None:
            result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            result_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        result = activate(result, ACTIVATION) * result_up
        _finish(result, n, 0, 1, N, None, None, out_ptr, sums_ptr, counters_ptr, 1)
    else:
        _finish(result, n, 0, 1, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT)


@triton.jit
def _normalized(x_ptr, norm_ptr, inverse_rms, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """x at k in fp32, normalized and scaled if norm_ptr is given (rounded once between, as the reference does)."""
    x = _load(x_ptr + k, k, K, BLOCK_K)
    if norm_ptr is not None:
        scaled = (x.to(tl.float32) * inverse_rms).to(x.dtype).to(tl.float32)
        return scaled * _load(norm_ptr + k, k, K, BLOCK_K).to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def _tokens_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    T,
    N,
    eps,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] of T ≤ BLOCK_T tokens: acc [BLOCK_N, BLOCK_T] += weight [BLOCK_N, BLOCK_K] · xᵀ [BLOCK_K, BLOCK_T]."""
    PART: tl.constexpr = ((K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)) * BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # before the loop: loads of a pipelined loop may be hoisted above a wait inside
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * PART
    last = tl.minimum(first + PART, K)
    k = tl.arange(0, BLOCK_K)
    # Rows and tokens past the end repeat the last one instead of being masked; they are not stored.
    token = tl.minimum(t, T - 1)
    w_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + token[None, :] * K + k[:, None]
    if ACTIVATION is not None:
        up_ptrs = w_ptrs + N.to(tl.int64) * K
        acc_up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    if norm_ptr is not None:
        inverse_rms = _inverse_rms(x_ptr, token, eps, K, NORM_BLOCK)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(first, last, BLOCK_K):
        j = start + k
        w = _load(w_ptrs + start, j[None, :], K, BLOCK_K)
        x = _load(x_ptrs + start, j[:, None], K, BLOCK_K)
        if norm_ptr is not None:
            x = (x.to(tl.float32) * inverse_rms[None, :]).to(x.dtype) * _load(norm_ptr + j, j, K, BLOCK_K)[:, None]
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if ACTIVATION is not None:
            up = _load(up_ptrs + start, j[None, :], K, BLOCK_K)
            acc_up = tl.dot(up, x, acc_up, input_precision="ieee")
    n = n[:, None]
    t = t[None, :]
    if ACTIVATION is not None:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            acc_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        acc = activate(acc, ACTIVATION) * acc_up
        _finish(acc, n, t, T, N, None, None, out_ptr, sums_ptr, counters_ptr, 1)
    else:
        _finish(acc, n, t, T, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT)


def choose_config(T: int, N: int, K: int, itemsize: int, gated: bool, cc: int, num_processors: int) -> LinearConfig:
    """The configuration for a regime and a shape. T counts by regime (1, then powers of two from 16) only."""
    if T == 1:
        long_rows = N * K >= 2**26 and not gated
        block_n, num_warps = (8, 4) if long_rows else (4, 2) if gated else (8, 2)
        block_k = (1024 if long_rows else 512) // itemsize
        # Many small programs in flight hide the latency of memory.
        split = 1 if gated else _choose_split(triton.cdiv(N, block_n), 16 * num_processors, K // block_k, 4)
        return LinearConfig(block_n, block_k, num_warps, 1, split)
    block_t = token_block(T)
    block_n = 32 if itemsize == 4 or (gated and 64 * num_processors > N) else 64
    block_k = 32 if itemsize == 4 else 128 if block_t <= 32 else 64
    split = 1 if gated else _choose_split(triton.cdiv(N, block_n), 3 * num_processors // 2, K // block_k, 8)
    stage_bytes = (block_n * (2 if gated else 1) + block_t) * block_k * itemsize
    budget = min(shared_limit(cc) - 16 * 1024, 112 * 1024)  # on the large machines, two programs a processor
    num_warps = 8 if block_t == 128 else 4  # for the registers
    return LinearConfig(block_n, block_k, num_warps, fit_stages(stage_bytes, budget), split)


def _choose_split(tiles: int, enough: int, blocks: int, most: int) -> int:
    """Parts of K that make `enough` programs of `tiles`: a power of two up to `most`, with two blocks or more each."""
    split = 1
    while split < most and tiles * split < enough and blocks >= 4 * split:
        split *= 2
    return split


def token_block(T: int) -> int:
    """T padded to the power of two that its kernel computes."""
    return max(16, triton.next_power_of_2(T))


def workspace_floats(T: int, N: int, K: int, itemsize: int, device: torch.device) -> int:
    """fp32 values that a layer, not gated, keeps in the workspace for T tokens. Not monotonic in T between regimes."""
    split = choose_config(T, N, K, itemsize, False, capability(device), processors(device)).split
    return split * T * N if split > 1 else 0


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
    check: bool = True,
    config: LinearConfig | None = None,
) -> Tensor:
    """rms_norm(x) · weightᵀ + bias: x [T, K], T ≤ 128, norm_weight [K] or None, weight [N, K], bias [N] → [T, N].

    The output has x's dtype unless `out` or `out_dtype` say otherwise. Without a workspace K is not split.
    `pdl`: overlap with the kernel before it in the stream (sm_90 and later).
    """
    return _launch(x, norm_weight, eps, weight, bias, None, out, None, workspace, out_dtype, pdl, check, config)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    activation: str,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    pdl: bool = False,
    check: bool = True,
    config: LinearConfig | None = None,
) -> Tensor:
    """act(gate) · up of rms_norm(x) [T, K], T ≤ 128: weight [2I, K] and bias [2I], gate rows first → [T, I]."""
    return _launch(x, norm_weight, eps, weight, bias, None, out, activation, None, None, pdl, check, config)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    workspace: Workspace | None = None,
    pdl: bool = False,
    check: bool = True,
    config: LinearConfig | None = None,
) -> Tensor:
    """x · weightᵀ + bias + residual: x [T, K], T ≤ 128, weight [N, K] → [T, N]. `out` may be `residual`."""
    return _launch(x, None, 0.0, weight, bias, residual, out, None, workspace, None, pdl, check, config)


def _launch(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None,
    workspace: Workspace | None,
    out_dtype: torch.dtype | None,
    pdl: bool,
    check: bool,
    config: LinearConfig | None,
) -> Tensor:
    if check:
        if x.shape[0] > MAX_TOKENS:
            what = f"at most {MAX_TOKENS}"
            raise InputError("too many tokens", where="x", expected=what, found=x.shape[0], hint="use kernels.gemm")
        check_linear(x, weight, bias, residual, out, activation)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype, x.device)
    T, K = x.shape
    N = weight.shape[0] if activation is None else weight.shape[0] // 2
    if out is None:
        out = torch.empty(T, N, dtype=out_dtype or x.dtype, device=x.device)
    if T == 0:
        return out
    if config is None:
        config = choose_config(
            T, N, K, x.element_size(), activation is not None, capability(x.device), processors(x.device)
        )
    split = 1 if workspace is None else _used_parts(K, config.block_k, config.split)
    tiles = triton.cdiv(N, config.block_n)
    sums = counters = None
    if split > 1 and workspace is not None:
        sums, counters = workspace.sums(split * T * N), workspace.counters(tiles)
    tensors = (x, norm_weight, weight, bias, residual, out, sums, counters)
    options = launch_options(config.num_warps, config.num_stages, pdl)
    options |= {"K": K, "ACTIVATION": activation, "SPLIT": split, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    if T == 1:
        block = min(2048, triton.next_power_of_2(K))
        _vector_kernel[(tiles, split)](*tensors, N, eps, NORM_BLOCK=block, **options)
    else:
        block_t = token_block(T)
        block = min(4096 // block_t, triton.next_power_of_2(K))
        _tokens_kernel[(tiles, split)](*tensors, T, N, eps, BLOCK_T=block_t, NORM_BLOCK=block, **options)
    return out


def _used_parts(K: int, block_k: int, split: int) -> int:
    """`split` less the parts that would find nothing left of K, each part being a whole number of blocks."""
    blocks = triton.cdiv(K, block_k)
    return triton.cdiv(blocks, triton.cdiv(blocks, split))


def cost(T: int, N: int, K: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations); N counts the weight's rows, gate and up both."""
    return (N * K + T * K + T * N) * itemsize, 2 * T * N * K
