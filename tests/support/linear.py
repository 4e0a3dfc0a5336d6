"""The linear kernels as functions that return their output. A `config` selects its kernel; without one, dispatch chooses."""

import torch

from minirt.kernels.checks import check_operands
from minirt.kernels.linear import dispatch, gemm_sm90
from minirt.kernels.linear import gemm as tiled
from minirt.kernels.linear.gemm_small import gemm_small as launch_small
from minirt.kernels.linear.gemv import gemv as launch_gemv
from minirt.kernels.linear.product import Product


def gemm(x, weight, bias=None, residual=None, out=None, *, activation=None, scale=None, x_scale=None, config=None, **options):
    """`dispatch.gemm` or, with a `config`, the kernel of this configuration."""
    operands = (x, weight, bias, residual, out)
    if config is None:
        return dispatch.gemm(*operands, activation=activation, scale=scale, x_scale=x_scale, **options)
    check_operands(*operands, activation, scale, x_scale)
    if out is None:
        columns = weight.shape[0] // (1 if activation is None else 2)
        out = torch.empty(x.shape[0], columns, dtype=torch.bfloat16 if scale is not None else x.dtype, device=x.device)
    kernel = gemm_sm90.gemm_sm90 if isinstance(config, gemm_sm90.GemmSm90Config) else tiled.gemm
    kernel(Product(x, weight, out, bias, residual, activation, scale, x_scale, **options), config)
    return out


def gemm_gated(x, weight, activation, bias=None, out=None, **options):
    return gemm(x, weight, bias, None, out, activation=activation, **options)


def gemm_small(x, weight, bias, residual, out, activation=None, *, config=None, **options):
    launch_small(Product(x, weight, out, bias, residual, activation, **options), config)
    return out


def gemv(x, norm_weight, eps, weight, bias, residual, out, activation=None, *, config=None, **options):
    launch_gemv(Product(x, weight, out, bias, residual, activation, **options), norm_weight, eps, config)
    return out
