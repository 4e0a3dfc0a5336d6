"""Linear layers for more than 128 tokens: tiled GEMMs with bias, residual or the gated activation in the epilogue.

Tiles are computed in groups of rows, so that neighbours share weights in the L2 cache. From sm_90 on, tiles travel by
TMA through descriptors made on the host, where alignment permits; elsewhere by plain pointers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minirt.kernels.common import (
    activate,
    capability,
    check_linear,
    fit_stages,
    processors,
    shared_limit,
)

CASES = [
    {"T": 129, "N": 96, "K": 576},
    {"T": 1, "N": 131, "K": 97},
    {"T": 300, "N": 72, "K": 64},
    {"T": 150, "N": 257, "K": 264},
]


# (rows, columns, warps, stages) for devices with much shared memory and for the others; with the activation, a program
# has two such tiles, of gate and of up.
_TILES = ((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4))
_GATED_TILES = ((128, 128, 8, 3), (64, 128, 4, 4), (64, 64, 4, 4))
_SMALL_TILES = ((128, 128, 8, 4), (64, 64, 4, 4))
_SMALL_GATED_TILES = ((128, 64, 8, 4), (64, 64, 4, 4))


@dataclass(frozen=True)
class GemmConfig:
    """Tile of the output [block_t, block_n], step in K, and whether tiles travel by TMA (`tma` needs aligned rows)."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False


@triton.jit
def _gemm_kernel(
    x,
    weight,
    bias_ptr,
    residual,
    out,
    T,
    N,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_T: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """out [T, N]; x, weight: descriptors with TMA, else pointers; residual and out with TMA_OUT.

    With ACTIVATION weight has 2N rows.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_T * tiles_n)
    rest = tl.program_id(0) % (GROUP_T * tiles_n)
    group_rows = tl.minimum(tl.cdiv(T, BLOCK_T) - group * GROUP_T, GROUP_T)
    first_t = (group * GROUP_T + rest % group_rows) * BLOCK_T
    first_n = rest // group_rows * BLOCK_N
    t = first_t + tl.arange(0, BLOCK_T)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if not TMA:
        # Rows past the end repeat the last one instead of being masked; they are not stored.
        x_ptrs = x + tl.minimum(t, T - 1).to(tl.int64)[:, None] * K + k[None, :]
        w_ptrs = weight + tl.minimum(n, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = acc
    for start in range(0, K, BLOCK_K):
        if TMA:
            a = x.load([first_t, start])
            b = weight.load([first_n, start]).T
        elif K % BLOCK_K == 0:
            a = tl.load(x_ptrs + start)
            b = tl.load(w_ptrs + start)
        else:
            a = tl.load(x_ptrs + start, mask=start + k[None, :] < K, other=0.0)
            b = tl.load(w_ptrs + start, mask=start + k[:, None] < K, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if ACTIVATION is not None:
            if TMA:
                b = weight.load([N + first_n, start]).T
            elif K % BLOCK_K == 0:
                b = tl.load(w_ptrs + N.to(tl.int64) * K + start)
            else:
                b = tl.load(w_ptrs + N.to(tl.int64) * K + start, mask=start + k[:, None] < K, other=0.0)
            acc_up = tl.dot(a, b, acc_up, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION is not None:
            acc_up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        acc = activate(acc, ACTIVATION) * acc_up
    if TMA_OUT:
        if residual is not None:
            acc += residual.load([first_t, first_n]).to(tl.float32)
        out.store([first_t, first_n], acc.to(out.dtype))
    else:
        at = t.to(tl.int64)[:, None] * N + n[None, :]
        valid = (t < T)[:, None] & (n < N)[None, :]
        if residual is not None:
            acc += tl.load(residual + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=valid)


def choose_config(T: int, N: int, K: int, itemsize: int, gated: bool, cc: int, num_processors: int) -> GemmConfig:
    """The largest tile that gives every processor one, of the few that suit the device; N counts the outputs."""
    if itemsize == 4:
        return GemmConfig(64, 64, 32, 8, 1)
    large = shared_limit(cc) > 100 * 1024
    plain, two = (_TILES, _GATED_TILES) if large else (_SMALL_TILES, _SMALL_GATED_TILES)
    tiles: tuple[tuple[int, int, int, int], ...] = two if gated else plain
    block_k = 64 if large else 32
    enough = (tile for tile in tiles if triton.cdiv(T, tile[0]) * triton.cdiv(N, tile[1]) >= num_processors)
    block_t, block_n, num_warps, stages = next(enough, tiles[-1])
    stage_bytes = (block_t + block_n * (2 if gated else 1)) * block_k * itemsize
    stages = fit_stages(stage_bytes, shared_limit(cc) - 4096, stages)
    tma = cc >= 90 and K * itemsize % 16 == 0 and N * itemsize % 16 == 0
    return GemmConfig(block_t, block_n, block_k, num_warps, stages, tma)


def gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    check: bool = True,
    config: GemmConfig | None = None,
) -> Tensor:
    """x · weightᵀ + bias + residual: x [T, K], weight [N, K], bias [N] → [T, N]. `out` may be `residual`."""
    return _launch(x, weight, bias, residual, out, None, check, config)


def gemm_gated(
    x: Tensor,
    weight: Tensor,
    activation: str,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    check: bool = True,
    config: GemmConfig | None = None,
) -> Tensor:
    """act(gate) · up for x [T, K], weight [2I, K] and bias [2I], gate rows first → [T, I]."""
    return _launch(x, weight, bias, None, out, activation, check, config)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None,
    check: bool,
    config: GemmConfig | None,
) -> Tensor:
    if check:
        check_linear(x, weight, bias, residual, out, activation)
    T, K = x.shape
    N = weight.shape[0] if activation is None else weight.shape[0] // 2
    if out is None:
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    if config is None:
        config = choose_config(
            T, N, K, x.element_size(), activation is not None, capability(x.device), processors(x.device)
        )
    c = config
    tensors = (x, weight, bias, residual, out)
    tma = c.tma and all(t is None or t.data_ptr() % 16 == 0 for t in (x, weight, residual, out))
    # A wider output (fp32 logits) would not fit in shared memory beside the tiles: it is stored from registers.
    tma_out = tma and out.dtype == x.dtype
    if tma:
        x_tile, weight_tile, output = [c.block_t, c.block_k], [c.block_n, c.block_k], [c.block_t, c.block_n]
        tensors = (
            TensorDescriptor.from_tensor(x, x_tile),
            TensorDescriptor.from_tensor(weight, weight_tile),
            *tensors[2:],
        )
    if tma_out:
        residual = None if residual is None else TensorDescriptor.from_tensor(residual, output)
        tensors = (*tensors[:3], residual, TensorDescriptor.from_tensor(out, output))
    grid = (triton.cdiv(T, c.block_t) * triton.cdiv(N, c.block_n),)
    _gemm_kernel[grid](
        *tensors, T, N, K=K, ACTIVATION=activation, BLOCK_T=c.block_t, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_T=8,
        TMA=tma, TMA_OUT=tma_out, num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    return out


def cost(T: int, N: int, K: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations); N counts the weight's rows, gate and up both."""
    return (N * K + T * K + T * N) * itemsize, 2 * T * N * K
