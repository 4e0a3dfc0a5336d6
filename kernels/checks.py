"""Argument checks of the public kernel functions: shapes, dtypes, devices and strides. Errors name the wrong argument."""

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.reference import FP8_BLOCK, INT4_CHUNK, INT4_GROUPS, block_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise InputError unless `tensor` is contiguous and has this shape (None: any size), dtype and device."""
    if tensor.ndim != len(shape) or any(
        want is not None and want != n for want, n in zip(shape, tensor.shape, strict=True)
    ):
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise InputError("wrong shape", where=name, expected=expected, found=list(tensor.shape))
    if tensor.dtype != dtype:
        raise InputError("wrong dtype", where=name, expected=dtype, found=tensor.dtype)
    if tensor.device != device:
        raise InputError("wrong device", where=name, expected=device, found=tensor.device)
    if not tensor.is_contiguous():
        raise InputError("not contiguous", where=name, found=f"strides {tensor.stride()}", hint="call .contiguous()")


def check_activations(name: str, tensor: Tensor, ndim: int = 2) -> None:
    """Raise InputError unless `tensor` is a contiguous bf16, fp16 or fp32 tensor of `ndim` dimensions."""
    if tensor.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=tensor.dtype)
    check_tensor(name, tensor, (None,) * ndim, tensor.dtype, tensor.device)


def check_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None,
    scale: Tensor | None = None,
) -> None:
    """Raise InputError unless x [T, K], weight [N, K], bias [N], residual [T, N] and out [T, N] fit together.

    With `activation`, the weight's N rows are gate and up, and residual and out are [T, N/2]. With `scale` fp32, [N] or
    [⌈N / g⌉, ⌈K / 128⌉], the weight must be float8_e4m3fn; without it, the weight must have x's dtype. An int16 weight and an
    int32 scale have 4 bits, see `reference.dequantize_int4`.
    """
    check_activations("x", x)
    T, K = x.shape
    if scale is not None and scale.dtype == torch.int32:
        check_tensor("weight", weight, (None, -(-K // INT4_CHUNK) * (INT4_CHUNK // 4)), torch.int16, x.device)
        check_tensor("scale", scale, (None, weight.shape[0]), torch.int32, x.device)
        groups = [-(-K // g) for g in INT4_GROUPS]
        if scale.shape[0] not in groups:
            expected = " or ".join(map(str, groups))
            raise InputError("wrong number of groups", where="scale", expected=expected, found=scale.shape[0])
    else:
        check_tensor("weight", weight, (None, K), x.dtype if scale is None else torch.float8_e4m3fn, x.device)
        if scale is not None:
            check_scale("scale", scale, weight.shape[0], K, activation is not None)
            check_tensor("scale", scale, tuple(scale.shape), torch.float32, x.device)
    N = rows = weight.shape[0]
    if activation is not None:
        if activation not in ACTIVATIONS:
            expected = " or ".join(ACTIVATIONS)
            raise InputError("unknown activation", where="activation", expected=expected, found=activation)
        if rows % 2:
            raise InputError("odd number of rows for gate and up", where="weight", found=rows)
        N = rows // 2
    if bias is not None:
        check_tensor("bias", bias, (rows,), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, (T, N), x.dtype, x.device)
    if out is not None:
        if out.dtype not in DTYPES:
            raise InputError("unsupported dtype", where="out", expected="bfloat16, float16 or float32", found=out.dtype)
        check_tensor("out", out, (T, N), out.dtype, x.device)


def check_scale(name: str, scale: Tensor, rows: int, K: int, gated: bool) -> None:
    """Raise InputError unless `scale` has one value for each row, or for each block. No block may have rows of gate and of up."""
    if scale.ndim == 2 and rows and K:
        g = block_rows(rows, scale.shape[0])
        if tuple(scale.shape) == (-(-rows // g), -(-K // FP8_BLOCK)) and not (gated and rows // 2 % g):
            return
        what = "wrong shape for blocks" + (" that hold no rows of both gate and up" if gated else "")
        expected = f"[{rows} / g rounded up, {-(-K // FP8_BLOCK)}], g a power of two up to {FP8_BLOCK}"
        raise InputError(what, where=name, expected=expected, found=list(scale.shape))
    if tuple(scale.shape) != (rows,):
        raise InputError("wrong shape", where=name, expected=f"[{rows}]", found=list(scale.shape))
