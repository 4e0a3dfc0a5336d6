"""The operations of `minirt.nn` as functions: RMSNorm, linear layers with what is fused around them, rotary embedding, experts.

Tensors are of bf16, fp16 or fp32. Activations may have any leading dimensions and any strides: the linear layers and the norm
copy activations that are not contiguous. Weights must be contiguous. Sizes, dtypes and devices are checked, and an error names
the argument.

In eager code the functions call the kernels directly, without PyTorch's dispatcher. While PyTorch compiles, exports or traces
they call `torch.ops.minirt.*` (`minirt.kernels.ops`). Both give the same bits. `torch.autocast` changes nothing: the dtype of a
result is that of the activations, and weights of another dtype are an error.

Raises, in each function:
    InputError: an argument has a wrong shape, dtype or device, or needs a gradient while the grad mode is on.
    UnsupportedError: a GPU that the kernels are not for (an AMD GPU, compute capability below 8.0), FP8 weights on a GPU without
        FP8, or no Triton on a GPU.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor

from minirt.errors import InputError
from minirt.kernels.operations import OPERATIONS, Operation
from minirt.kernels.ops import call

if TYPE_CHECKING:  # the functions of declarations

    def __getattr__(name: str) -> Any: ...


Tensors = Tensor | list[Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension.

    Args:
        x: [..., H].
        weight: [H], of x's dtype.
        eps: added to the mean square, under the root.
    Returns:
        [..., H], contiguous.
    """
    return call("rms_norm", _rows("x", x), weight, eps).view(x.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias; arguments as those of `norm_linear`."""
    return norm_linear(x, None, 0.0, weight, bias, scale)


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensors, bias: Tensors | None = None, scale: Tensors | None = None
) -> Tensor:
    """rms_norm(x) · weightᵀ + bias.

    `weight`, `bias` and `scale` may be lists with the tensor of each of several linears (empty: these have none). The rows are
    copied together unless they lie one after the other in memory.

    Args:
        x: [..., K].
        norm_weight: [K], or None: x is not normalized.
        eps: that of the norm.
        weight: [N, K] of x's dtype; or with `scale` float8_e4m3fn [N, K], or int16 words of 4-bit weights
            (`minirt.kernels.reference.pack_int4`).
        bias: [N].
        scale: of FP8 weights fp32 [N], or [⌈N / g⌉, ⌈K / 128⌉] for blocks of g rows; of 4-bit weights int32 words [groups, N].
            FP8 weights quantize the activations of two or more tokens, each token with its own scale.
    Returns:
        [..., N].
    """
    op = "packed_norm_linear" if isinstance(weight, list) else "norm_linear"
    return _like(call(op, _rows("x", x), norm_weight, eps, weight, bias, scale), x.shape[:-1])


def norm_gate_up(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensors, activation: str, bias: Tensors | None = None,
    scale: Tensors | None = None,
) -> Tensor:  # fmt: skip
    """act(gate) · up of rms_norm(x) (SwiGLU: Shazeer 2020).

    Args:
        weight: [2N, K], the rows of gate, then those of up. `bias`: [2N]. The others are those of `norm_linear`.
        activation: "silu" or another name in `kernels/activations.py`.
    Returns:
        [..., N].
    """
    op = "packed_norm_gate_up" if isinstance(weight, list) else "norm_gate_up"
    return _like(call(op, _rows("x", x), norm_weight, eps, weight, activation, bias, scale), x.shape[:-1])


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """x · weightᵀ + bias + residual: residual [..., N] → [..., N]. The other arguments are those of `norm_linear`."""
    if residual.shape[:-1] != x.shape[:-1]:
        expected = f"the leading dimensions {list(x.shape[:-1])} of x"
        raise InputError("wrong shape", where="residual", expected=expected, found=list(residual.shape))
    return call("linear_residual", _rows("x", x), weight, _rows("residual", residual), bias, scale).view(residual.shape)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of q and k in one kernel, half-split as in transformers' `apply_rotary_pos_emb`.

    Args:
        q: [B, Nq, T, D] with any strides; D is even. With `unsqueeze_dim` 2: [B, T, Nq, D].
        k: [B, Nk, T, D], or [B, T, Nk, D].
        cos, sin: [B, T, D], or [1, T, D] for all sequences; of q's dtype or fp32.
        unsqueeze_dim: the dimension of the heads, 1 or 2.
    Returns:
        q and k, rotated, in new tensors of the same shapes, whose dimensions are in the order of the given ones in memory.
    """
    return qk_norm_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 1e-6, unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`apply_rotary` of q and k whose heads are normalized first, as in Qwen3: RMSNorm and rotary embedding in one kernel.

    Args:
        q_norm, k_norm: [D] of q's dtype; None: no norm. The others are those of `apply_rotary`.
        eps: that of the norms.
    """
    if unsqueeze_dim not in (1, 2):
        raise InputError("unsupported dimension of the heads", where="unsqueeze_dim", expected="1 or 2", found=unsqueeze_dim)
    if unsqueeze_dim == 1:
        return call("qk_norm_rope", q, k, cos, sin, q_norm, k_norm, eps)
    q, k = call("qk_norm_rope", _swapped("q", q), _swapped("k", k), cos, sin, q_norm, k_norm, eps)
    return q.transpose(1, 2), k.transpose(1, 2)


def fused_rmsnorm_rope(x: Tensor, norm_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm of each head, then rotary embedding: x [B, heads, T, D] → the same shape. Arguments as those of `qk_norm_rope`."""
    return call("norm_rope", x, cos, sin, norm_weight, eps)


def _declared(operation: Operation) -> Callable[..., Any]:
    """The function of an operation, from its declaration."""
    arguments, name, first = operation.declaration.arguments, operation.name, operation.declaration.first
    names = [argument.name for argument in arguments if not argument.by_name]
    needed = sum(argument.default is None for argument in arguments)
    flat = [(i, argument.name) for i, argument in enumerate(arguments) if argument.rows and arguments[0].rows]

    def function(*args: Any, **options: Any) -> Any:
        given = list(args)
        while options and len(given) < len(names) and names[len(given)] in options:
            given.append(options.pop(names[len(given)]))
        if len(given) < needed:
            raise TypeError(f"{name}() has no argument {names[len(given)]!r}")
        if not flat:
            return call(name, *given, **options)
        leading = given[0].shape[:-1]
        for i, key in flat:
            if given[i].shape[:-1] != leading:
                expected = f"the leading dimensions {list(leading)} of {first}"
                raise InputError("wrong shape", where=key, expected=expected, found=list(given[i].shape))
            given[i] = _rows(key, given[i])
        out = call(name, *given, **options)
        return tuple(_like(one, leading) for one in out) if isinstance(out, tuple) else _like(out, leading)

    function.__name__ = function.__qualname__ = name
    function.__signature__ = operation.declaration.signature  # type: ignore[attr-defined]
    leading = "\n\nActivations [T, K] may have any leading dimensions instead of T." if flat else ""
    function.__doc__ = f"{operation.what}.{leading}\n\nArguments, as `minirt.kernels.declaration` explains: {operation.arguments}"
    return function


def _rows(name: str, x: Tensor) -> Tensor:
    """x [..., K] as a contiguous [T, K], copied only if it is not contiguous."""
    if x.ndim == 0:
        raise InputError("wrong shape", where=name, expected="[..., any]", found=[])
    x = x.contiguous()
    return x if x.ndim == 2 else x.view(prod(x.shape[:-1]), x.shape[-1])  # the size of -1 is ambiguous if K is 0


def _like(out: Tensor, leading: Size) -> Tensor:
    """out [T, …] with these leading dimensions."""
    return out.view(*leading, *out.shape[1:])


def _swapped(name: str, x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise InputError("wrong shape", where=name, expected="[B, T, heads, D]", found=list(x.shape))
    return x.transpose(1, 2)


for _name, _operation in OPERATIONS.items():  # each op has a function; those above have other arguments, or are called often
    if _operation.no_op is None and _name not in globals():
        globals()[_name] = _declared(_operation)
