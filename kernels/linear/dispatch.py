"""Linear layers with what is fused around them, for any number of tokens: norm + linear, norm + gate/up, linear + residual.

Which kernel computes it depends on how many tokens share each weight that is read: one (`gemv`, norm included), up to 128, on
Hopper mostly 64 (`gemm_small`), or so many that arithmetic is the work (`gemm`), both with the norm as a kernel before.

Weights have the dtype of the activations, or are float8_e4m3fn with a `scale` [N] fp32 for each row (compute capability 8.9 and
later). Then two tokens or more are quantized as well, each with a scale of its own, in the norm's kernel or in one before the
product; a single token is not. (`reference.linear_fp8` states the same.)
"""

from typing import Any

import torch
from torch import Tensor

from minirt.kernels.checks import check_linear, check_tensor
from minirt.kernels.launch import Workspace
from minirt.kernels.linear.gemm import gemm, gemm_gated
from minirt.kernels.linear.gemm_sm90 import gemm_sm90, uses_gemm_sm90
from minirt.kernels.linear.gemm_small import MAX_TOKENS, gemm_small
from minirt.kernels.linear.gemv import gemv
from minirt.kernels.linear.row_maxima import RowMaxima
from minirt.kernels.norm import rms_norm, rms_norm_quantize
from minirt.kernels.quantize import quantize

CASES = [
    {"T": T, "N": N, "K": K}
    for T, N, K in (
        (1, 96, 576), (1, 131, 97), (1, 24, 1100), (2, 17, 64), (3, 131, 577),
        (16, 96, 1536), (17, 192, 576), (77, 67, 208), (128, 80, 128), (129, 40, 96),
    )
]  # fmt: skip


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    workspace: Workspace | None = None,
    out_dtype: torch.dtype | None = None,
    row_maxima: RowMaxima | None = None,
    pdl: bool = False,
    check: bool = True,
) -> Tensor:
    """rms_norm(x) · weightᵀ + bias: x [T, K], norm_weight [K] or None (no norm), weight [N, K], bias [N] → [T, N].

    The output has x's dtype unless `out` or `out_dtype` say otherwise. Without a workspace K is not split.
    `row_maxima`: where to leave each row's largest values (of the fp32 sums), for kernels that do (`gemm_small`, `gemm_sm90`).
    `pdl`: overlap with the kernel before it in the stream (sm_90 and later; of many tokens where `gemm_sm90` does it).
    """
    return _run(x, norm_weight, eps, weight, scale, bias, None, out, None, workspace, out_dtype, pdl, check, row_maxima)


def norm_gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    activation: str,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    pdl: bool = False,
    check: bool = True,
) -> Tensor:
    """act(gate) · up of rms_norm(x) [T, K]: weight [2I, K] and bias [2I], gate rows first → [T, I]."""
    return _run(x, norm_weight, eps, weight, scale, bias, None, out, activation, None, None, pdl, check)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
    check: bool = True,
) -> Tensor:
    """x · weightᵀ + bias + residual: x [T, K], weight [N, K] → [T, N]. `out` may be `residual`."""
    return _run(x, None, 0.0, weight, scale, bias, residual, out, None, workspace, None, pdl, check)


def _run(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None,
    workspace: Workspace | None,
    out_dtype: torch.dtype | None,
    pdl: bool,
    check: bool,
    row_maxima: RowMaxima | None = None,
) -> Tensor:
    T = x.shape[0]
    if check:
        check_linear(x, weight, bias, residual, out, activation, scale)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (x.shape[1],), x.dtype, x.device)
        if row_maxima is not None:
            check_tensor("row_maxima.values", row_maxima.values, (T, None), torch.int64, x.device)
            check_tensor("row_maxima.logits_needed", row_maxima.logits_needed, (1,), torch.int32, x.device)
    if row_maxima is not None:
        row_maxima.num_tiles = 0
    if out is None:
        N = weight.shape[0] if activation is None else weight.shape[0] // 2
        out = torch.empty(T, N, dtype=out_dtype or x.dtype, device=x.device)
    if T == 0:
        return out
    if T == 1:
        return gemv(x, norm_weight, eps, weight, bias, residual, out, activation, scale=scale, pdl=pdl)
    h, x_scale = _input(x, norm_weight, eps, scale is not None, pdl)
    return product(
        h, weight, bias, residual, out, activation, scale=scale, x_scale=x_scale, workspace=workspace, row_maxima=row_maxima,
        pdl=pdl,
    )  # fmt: skip


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None,
    *,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    workspace: Workspace | None = None,
    row_maxima: RowMaxima | None = None,
    pdl: bool = False,
) -> Tensor:
    """The product of two tokens or more, normalized and quantized before, by the kernel for so many; unchecked."""
    scales: dict[str, Any] = {"scale": scale, "x_scale": x_scale}
    if x.shape[0] <= MAX_TOKENS and not uses_gemm_sm90(x, weight, residual, out):
        shared: dict[str, Any] = {"workspace": workspace, "row_maxima": row_maxima, "pdl": pdl}
        return gemm_small(x, weight, bias, residual, out, activation, **shared, **scales)
    if activation is not None:
        return gemm_gated(x, weight, activation, bias, out, pdl=pdl, check=False, **scales)
    if row_maxima is not None and uses_gemm_sm90(x, weight, residual, out):
        gemm_sm90(x, weight, bias, residual, out, None, scale, x_scale, None, workspace, pdl, row_maxima)
        return out
    return gemm(x, weight, bias, residual, out, workspace=workspace, pdl=pdl, check=False, **scales)


def _input(x: Tensor, norm_weight: Tensor | None, eps: float, fp8: bool, pdl: bool) -> tuple[Tensor, Tensor | None]:
    """What the product of several tokens reads: normalized or as it is, and for fp8 weights quantized, with its scales."""
    if fp8:
        if norm_weight is None:
            return quantize(x, pdl=pdl, check=False)
        return rms_norm_quantize(x, norm_weight, eps, pdl=pdl, check=False)
    return (x if norm_weight is None else rms_norm(x, norm_weight, eps, pdl=pdl, check=False)), None


def cost(
    T: int, N: int, K: int, itemsize: int, *, weight_itemsize: int | None = None, gated: bool = False, residual: bool = False
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of x [T, K] by weight [N, K] (gated: [2N, K]) → [T, N].

    `itemsize` is that of the activations, and of the weight unless `weight_itemsize` says otherwise.
    """
    rows = 2 * N if gated else N
    weights = rows * K * (weight_itemsize or itemsize)
    return weights + T * (K + N * (2 if residual else 1)) * itemsize, 2 * T * rows * K
