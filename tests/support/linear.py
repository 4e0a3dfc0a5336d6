"""The linear kernels as functions that return their output. A `config` selects its kernel; without one, dispatch chooses."""

import torch

from minirt.kernels.linear import dispatch, gemm_sm90
from minirt.kernels.linear import gemm as tiled
from minirt.kernels.linear.gemm_small import gemm_small as launch_small
from minirt.kernels.linear.gemv import gemv as launch_gemv
from minirt.kernels.linear.product import Epilogue, Norm, Product


def norm64(x, weight, eps=1e-6):
    x = x.double()
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def linear64(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def product(
    x, weight, out, bias=None, residual=None, activation=None, scale=None, x_scale=None, *, norm=None, row_maxima=None, **rest
):  # fmt: skip
    """A `Product` from the fields of its epilogue. `norm`: (weight or None, eps)."""
    epilogue = Epilogue(scale, x_scale, bias, activation, residual)
    if row_maxima is not None:
        values, needed = row_maxima
        epilogue = epilogue._replace(row_maxima=values, row_maxima_stride=values.stride(0), logits_needed=needed)
    norm = Norm(*norm) if norm is not None and norm[0] is not None else None
    return Product(x, weight, out, norm, epilogue, **rest)


def gemm(x, weight, bias=None, residual=None, out=None, *, activation=None, scale=None, x_scale=None, config=None, **options):
    """The GEMM for many tokens: what `gemm_sm90` accepts on Hopper, else `gemm`; or the kernel of this configuration."""
    if out is None:
        columns = weight.shape[0] // (1 if activation is None else 2)
        out = torch.empty(x.shape[0], columns, dtype=torch.bfloat16 if scale is not None else x.dtype, device=x.device)
    made = product(x, weight, out, bias, residual, activation, scale, x_scale, **options)
    hopper = isinstance(config, gemm_sm90.GemmSm90Config)
    if config is None:
        hopper = dispatch.capability(x.device) == 90 and gemm_sm90.accepts(made)
    (gemm_sm90.gemm_sm90 if hopper else tiled.gemm)(made, config)
    return out


def gemm_gated(x, weight, activation, bias=None, out=None, **options):
    return gemm(x, weight, bias, None, out, activation=activation, **options)


def gemm_small(x, weight, bias, residual, out, activation=None, *, config=None, **options):
    launch_small(product(x, weight, out, bias, residual, activation, **options), config)
    return out


def gemv(x, norm_weight, eps, weight, bias, residual, out, activation=None, *, config=None, **options):
    launch_gemv(product(x, weight, out, bias, residual, activation, norm=(norm_weight, eps), **options), config)
    return out
