"""Matrix times vector: the linear layers of one token, where reading the weights is all the work.

Products by FMA. RMSNorm of the input is the prologue, gated activation, bias and residual are the epilogue. Where N gives too
few programs, K is split: partial sums go to the workspace and the last program to arrive adds them up in a fixed order, so
the same input gives the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.common import (
    LinearConfig,
    Workspace,
    activate,
    capability,
    choose_split,
    finish,
    launch_options,
    load_block,
    processors,
    split_parts,
)


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
    w = load_block(w_ptrs, k[None, :], K, BLOCK_K)
    if ACTIVATION is not None:
        up_ptrs = w_ptrs + N.to(tl.int64) * K
        up = load_block(up_ptrs, k[None, :], K, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inverse_rms = 1.0
    if norm_ptr is not None:
        square = tl.zeros((NORM_BLOCK,), tl.float32)
        for start in tl.static_range(0, K, NORM_BLOCK):
            i = start + tl.arange(0, NORM_BLOCK)
            wide = load_block(x_ptr + i, i, K, NORM_BLOCK).to(tl.float32)
            square += wide * wide
        inverse_rms = tl.rsqrt(tl.sum(square, 0) / K + eps)
    x = _normalized(x_ptr, norm_ptr, inverse_rms, k, K, BLOCK_K)[None, :]
    acc = w.to(tl.float32) * x
    if ACTIVATION is not None:
        acc_up = up.to(tl.float32) * x
    for start in range(BLOCK_K, last - first, BLOCK_K):
        j = k + start
        w = load_block(w_ptrs + start, j[None, :], K, BLOCK_K)
        if ACTIVATION is not None:
            up = load_block(up_ptrs + start, j[None, :], K, BLOCK_K)
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
        finish(result, n, 0, 1, N, None, None, out_ptr, sums_ptr, counters_ptr, 1)
    else:
        finish(result, n, 0, 1, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT)


@triton.jit
def _normalized(x_ptr, norm_ptr, inverse_rms, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """x at k in fp32, normalized and scaled if norm_ptr is given (rounded once between, as the reference does)."""
    x = load_block(x_ptr + k, k, K, BLOCK_K)
    if norm_ptr is not None:
        scaled = (x.to(tl.float32) * inverse_rms).to(x.dtype).to(tl.float32)
        return scaled * load_block(norm_ptr + k, k, K, BLOCK_K).to(tl.float32)
    else:
        return x.to(tl.float32)


def choose_config(N: int, K: int, itemsize: int, gated: bool, cc: int, num_processors: int) -> LinearConfig:
    """The configuration for a shape."""
    long_rows = N * K >= 2**26 and not gated
    block_n, num_warps = (8, 4) if long_rows else (4, 2) if gated else (8, 2)
    block_k = (1024 if long_rows else 512) // itemsize
    # Many small programs in flight hide the latency of memory.
    split = 1 if gated else choose_split(triton.cdiv(N, block_n), 16 * num_processors, K // block_k, 4)
    return LinearConfig(block_n, block_k, num_warps, 1, split)


def gemv(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None = None,
    *,
    workspace: Workspace | None = None,
    pdl: bool = False,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [1, K], weight [N, K] (with `activation` [2N, K]) → out [1, N], unchecked; `kernels.linear` checks."""
    K, N = x.shape[1], out.shape[1]
    if config is None:
        config = choose_config(
            N, K, x.element_size(), activation is not None, capability(x.device), processors(x.device)
        )
    tiles = triton.cdiv(N, config.block_n)
    split, sums, counters = split_parts(workspace, config, 1, N, K)
    _vector_kernel[(tiles, split)](
        x, norm_weight, weight, bias, residual, out, sums, counters, N, eps, K=K, ACTIVATION=activation, SPLIT=split,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, NORM_BLOCK=min(2048, triton.next_power_of_2(K)),
        **launch_options(config.num_warps, config.num_stages, pdl),
    )  # fmt: skip
    return out
