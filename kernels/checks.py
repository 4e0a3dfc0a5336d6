"""Argument checks of the public kernel functions: shapes, dtypes, devices and strides. Errors name the wrong argument."""

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.launch import require_fp8
from minirt.kernels.reference import FP8_BLOCK, INT4_CHUNK, INT4_GROUPS, block_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_NORM = 1 << 20  # columns of a norm: a program holds a row, and Triton's tensors have no more values
MAX_HEAD = 1024  # channels of a head that is rotated


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device, *,
    strided: bool = False,
) -> None:  # fmt: skip
    """Raise InputError unless `tensor` is contiguous and has this shape (None: any size), dtype and device.

    `strided`: only its last dimension must be contiguous.
    """
    if tensor.ndim != len(shape) or any(
        want is not None and want != n for want, n in zip(shape, tensor.shape, strict=True)
    ):
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise InputError("wrong shape", where=name, expected=expected, found=list(tensor.shape))
    if tensor.dtype != dtype:
        raise InputError("wrong dtype", where=name, expected=dtype, found=tensor.dtype)
    if tensor.device != device:
        raise InputError("wrong device", where=name, expected=device, found=tensor.device)
    if not tensor.is_contiguous() and not (strided and tensor.stride(-1) == 1):
        raise InputError("not contiguous", where=name, found=f"strides {tensor.stride()}", hint="call .contiguous()")


def check_activations(name: str, tensor: Tensor, ndim: int = 2, *, strided: bool = False) -> None:
    """Raise InputError unless `tensor` is a bf16, fp16 or fp32 tensor of `ndim` dimensions, contiguous as in `check_tensor`."""
    if tensor.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=tensor.dtype)
    check_tensor(name, tensor, (None,) * ndim, tensor.dtype, tensor.device, strided=strided)


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None, activation: str | None,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise InputError unless x [T, K], weight [N, K], bias [N], residual [T, N] and out [T, N] fit together.

    With `activation`, the weight's N rows are gate and up, and residual and out are [T, N/2]. With `scale` fp32, [N] or
    [⌈N / g⌉, ⌈K / 128⌉], the weight must be float8_e4m3fn; without it, the weight must have x's dtype. An int16 weight and an
    int32 scale have 4 bits, see `reference.dequantize_int4`.
    """
    check_activations("x", x)
    T, K = x.shape
    if scale is not None and scale.dtype == torch.int32:
        check_int4("weight", weight, "scale", scale, (None,), K, x.device)
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


def check_int4(
    name: str, weight: Tensor, scale_name: str, scale: Tensor, rows: tuple[int | None, ...], K: int, device: torch.device
) -> None:
    """Raise InputError unless a weight of 4 bits [rows, K], or [E, rows, K] of experts, and its scale words fit together."""
    check_tensor(name, weight, (*rows, -(-K // INT4_CHUNK) * (INT4_CHUNK // 4)), torch.int16, device)
    shape = *rows[:-1], None, weight.shape[-2]
    check_tensor(scale_name, scale, shape, torch.int32, device, strided=len(rows) > 1)
    groups = [-(-K // g) for g in INT4_GROUPS]
    if scale.shape[-2] not in groups:
        expected = " or ".join(map(str, groups))
        raise InputError("wrong number of groups", where=scale_name, expected=expected, found=scale.shape[-2])


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


def check_norm(name: str, weight: Tensor | None, x: Tensor) -> None:
    """Raise InputError unless `weight`, if given, has a value for each column of x, and x has at most `MAX_NORM` columns."""
    if weight is not None:
        check_tensor(name, weight, (x.shape[-1],), x.dtype, x.device)
        if x.shape[-1] > MAX_NORM:
            raise InputError("too many columns for a norm", where="x", expected=f"at most {MAX_NORM}", found=x.shape[-1])


def check_heads(name: str, x: Tensor, cos: Tensor, sin: Tensor, norm_name: str, norm: Tensor | None) -> None:
    """Raise InputError unless heads x [B, N, T, D] with any strides, cos and sin [B or 1, T, D] and a norm [D] fit together."""
    if x.ndim != 4:
        raise InputError("wrong shape", where=name, expected="[B, heads, T, D]", found=list(x.shape))
    if x.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=x.dtype)
    B, _, T, D = x.shape
    if not 0 < D <= MAX_HEAD or D % 2:
        raise InputError("unsupported head size", where=name, expected=f"an even number up to {MAX_HEAD}", found=D)
    for table_name, table in (("cos", cos), ("sin", sin)):
        dtype = torch.float32 if table.dtype == torch.float32 else x.dtype
        check_tensor(table_name, table, (1 if cos.ndim == 3 and cos.shape[0] == 1 else B, T, D), dtype, x.device)
    if cos.dtype != sin.dtype:
        raise InputError("wrong dtype", where="sin", expected=cos.dtype, found=sin.dtype)
    if norm is not None:
        check_tensor(norm_name, norm, (D,), x.dtype, x.device)


def check_qk_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
) -> None:
    """Raise InputError unless q and k fit together, and each with the others, see `check_heads`."""
    if (q_norm is None) != (k_norm is None):
        raise InputError("a norm of one of q and k only", where="q_norm, k_norm", expected="both or none")
    check_heads("q", q, cos, sin, "q_norm", q_norm)
    B, _, T, D = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (B, T, D):
        raise InputError("wrong shape", where="k", expected=f"[{B}, heads, {T}, {D}]", found=list(k.shape))
    if k.dtype != q.dtype:
        raise InputError("wrong dtype", where="k", expected=q.dtype, found=k.dtype)
    if k.device != q.device:
        raise InputError("wrong device", where="k", expected=q.device, found=k.device)
    if k_norm is not None:
        check_tensor("k_norm", k_norm, (D,), q.dtype, q.device)


def check_mixture(
    h: Tensor, E: int, gate_up: Tensor, down: Tensor, residual: Tensor, top_k: int, activation: str,
    norm_weight: Tensor | None, gate_up_scale: Tensor | None, down_scale: Tensor | None,
) -> None:  # fmt: skip
    """Raise InputError unless the operands of a mixture of E experts fit together. The logits are not looked at."""
    (_, H), dtype, device = h.shape, h.dtype, h.device
    if not 1 <= top_k <= E:
        raise InputError("wrong number", where="top_k", expected=f"from 1 to {E}", found=top_k)
    if activation not in ACTIVATIONS:
        raise InputError("unknown activation", where="activation", expected=" or ".join(ACTIVATIONS), found=activation)
    check_norm("norm_weight", norm_weight, h)
    if (gate_up_scale is None) != (down_scale is None):
        raise InputError("both scales are needed, or neither", where="gate_up_scale, down_scale", found="one of them")
    if gate_up.dtype == torch.int16 and gate_up_scale is not None and down_scale is not None:
        inter = gate_up.shape[1] // 2
        check_tensor("residual", residual, tuple(h.shape), dtype, device)
        check_int4("gate_up", gate_up, "gate_up_scale", gate_up_scale, (E, 2 * inter), H, device)
        check_int4("down", down, "down_scale", down_scale, (E, H), inter, device)
        return
    stored = dtype if gate_up_scale is None else torch.float8_e4m3fn
    check_tensor("down", down, (E, H, None), stored, device)
    inter = down.shape[2]
    check_tensor("gate_up", gate_up, (E, 2 * inter, H), stored, device)
    check_tensor("residual", residual, tuple(h.shape), dtype, device)
    if gate_up_scale is not None and down_scale is not None:
        require_fp8(device)
        if gate_up_scale.ndim != down_scale.ndim:
            found = f"{list(gate_up_scale.shape)}, {list(down_scale.shape)}"
            raise InputError("both scales are of rows or of blocks", where="gate_up_scale, down_scale", found=found)
        for name, scale, rows, K in (("gate_up_scale", gate_up_scale, 2 * inter, H), ("down_scale", down_scale, H, inter)):
            rest = (None,) * (scale.ndim - 1)
            check_tensor(name, scale, (E, *rest), torch.float32, device)
            check_scale(f"{name}[0]", scale[0], rows, K, name == "gate_up_scale")
