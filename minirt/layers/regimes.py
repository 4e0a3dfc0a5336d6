"""Which kernel computes a linear layer for how many tokens: what the Triton forms of the layers have in common.

Up to MAX_TOKENS the weights' bytes are the cost, and one kernel normalizes, multiplies and adds. Above, arithmetic is: the norm
runs once, and a tiled GEMM does the rest. Triton is imported when the first Triton layer runs.
"""

import torch
from torch import Tensor

from minirt.kernels import gemm
from minirt.kernels import linear as small
from minirt.kernels.common import Workspace
from minirt.kernels.norm import rms_norm
from minirt.linear import NormWeight, PackedLinear


def norm_linear(
    x: Tensor,
    norm: NormWeight,
    linear: PackedLinear,
    eps: float,
    workspace: Workspace,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """linear(rms_norm(x)): x [T, K] → [T, N], in x's dtype or `out_dtype`."""
    if x.shape[0] <= small.MAX_TOKENS:
        return small.norm_linear(
            x, norm.weight, eps, linear.weight, linear.bias, workspace=workspace, out_dtype=out_dtype, check=False
        )
    out = torch.empty(x.shape[0], linear.out_features, device=x.device, dtype=out_dtype or x.dtype)
    return gemm.gemm(rms_norm(x, norm.weight, eps, check=False), linear.weight, linear.bias, out=out, check=False)


def norm_gate_up(x: Tensor, norm: NormWeight, linear: PackedLinear, eps: float, activation: str) -> Tensor:
    """act(gate) · up of linear(rms_norm(x)): x [T, H] → [T, I]."""
    if x.shape[0] <= small.MAX_TOKENS:
        return small.norm_gate_up(x, norm.weight, eps, linear.weight, activation, bias=linear.bias, check=False)
    return gemm.gemm_gated(
        rms_norm(x, norm.weight, eps, check=False), linear.weight, activation, linear.bias, check=False
    )


def linear_residual(x: Tensor, linear: PackedLinear, residual: Tensor, workspace: Workspace) -> Tensor:
    """linear(x) + residual: x [T, K] → [T, N]."""
    if x.shape[0] <= small.MAX_TOKENS:
        return small.linear_residual(x, linear.weight, residual, linear.bias, workspace=workspace, check=False)
    return gemm.gemm(x, linear.weight, linear.bias, residual, check=False)
