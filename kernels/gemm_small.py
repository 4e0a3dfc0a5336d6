"""The linear layers of 2 to 128 tokens, where reading the weights is most of the work.

The weights are on the wide M side of the tensor cores' MMA, the tokens, padded to a power of two, on its N side. RMSNorm of the
input is the prologue, gated activation, bias and residual are the epilogue. Where N gives too few programs, K is split: partial
sums go to the workspace and the last program to arrive adds them up in a fixed order, so the same input gives the same bits.
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
    fit_stages,
    launch_options,
    load_block,
    processors,
    shared_limit,
    split_parts,
)

MAX_TOKENS = 128


@triton.jit
def _inverse_rms(x_ptr, t, eps, K: tl.constexpr, CHUNK: tl.constexpr):
    """1 / root mean square of the rows t [BLOCK_T] of x."""
    square = tl.zeros((t.shape[0], CHUNK), tl.float32)
    for start in range(0, K, CHUNK):
        k = (start + tl.arange(0, CHUNK))[None, :]
        x = load_block(x_ptr + t[:, None] * K + k, k, K, CHUNK).to(tl.float32)
        square += x * x
    return tl.rsqrt(tl.sum(square, 1) / K + eps)


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
        w = load_block(w_ptrs + start, j[None, :], K, BLOCK_K)
        x = load_block(x_ptrs + start, j[:, None], K, BLOCK_K)
        if norm_ptr is not None:
            x = (x.to(tl.float32) * inverse_rms[None, :]).to(x.dtype) * load_block(norm_ptr + j, j, K, BLOCK_K)[:, None]
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if ACTIVATION is not None:
            up = load_block(up_ptrs + start, j[None, :], K, BLOCK_K)
            acc_up = tl.dot(up, x, acc_up, input_precision="ieee")
    n = n[:, None]
    t = t[None, :]
    if ACTIVATION is not None:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            acc_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        acc = activate(acc, ACTIVATION) * acc_up
        finish(acc, n, t, T, N, None, None, out_ptr, sums_ptr, counters_ptr, 1)
    else:
        finish(acc, n, t, T, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT)


def choose_config(T: int, N: int, K: int, itemsize: int, gated: bool, cc: int, num_processors: int) -> LinearConfig:
    """The configuration for a shape and a regime: of T only the power of two it is padded to counts."""
    block_t = token_block(T)
    block_n = 32 if itemsize == 4 or (gated and 64 * num_processors > N) else 64
    block_k = 32 if itemsize == 4 else 128 if block_t <= 32 else 64
    split = 1 if gated else choose_split(triton.cdiv(N, block_n), 3 * num_processors // 2, K // block_k, 8)
    stage_bytes = (block_n * (2 if gated else 1) + block_t) * block_k * itemsize
    budget = min(shared_limit(cc) - 16 * 1024, 112 * 1024)  # on the large machines, two programs a processor
    num_warps = 8 if block_t == 128 else 4  # for the registers
    return LinearConfig(block_n, block_k, num_warps, fit_stages(stage_bytes, budget), split)


def token_block(T: int) -> int:
    """T padded to the power of two that its kernel computes."""
    return max(16, triton.next_power_of_2(T))


def gemm_small(
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
    """x [T, K], T ≤ 128, weight [N, K] (with `activation` [2N, K]) → out [T, N], unchecked; `minirt.kernels.linear` checks."""
    (T, K), N = x.shape, out.shape[1]
    if config is None:
        config = choose_config(
            T, N, K, x.element_size(), activation is not None, capability(x.device), processors(x.device)
        )
    tiles, block_t = triton.cdiv(N, config.block_n), token_block(T)
    split, sums, counters = split_parts(workspace, config, T, N, K)
    _tokens_kernel[(tiles, split)](
        x, norm_weight, weight, bias, residual, out, sums, counters, T, N, eps, K=K, ACTIVATION=activation,
        SPLIT=split, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BLOCK_T=block_t,
        NORM_BLOCK=min(4096 // block_t, triton.next_power_of_2(K)),
        **launch_options(config.num_warps, config.num_stages, pdl),
    )  # fmt: skip
    return out
