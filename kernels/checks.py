"""Argument checks: shapes, dtypes, devices and strides, by the declarations of `operations`. Errors name the wrong argument.

`checker` checks what the text of a declaration says. Functions that a declaration names as its `check` add what text cannot say:
they take the sizes of the axes, and the operation's arguments by name. This file imports no Triton.
"""

import functools
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.activations import check_activation
from minirt.kernels.attention.limits import ANY
from minirt.kernels.declaration import Argument, Declaration
from minirt.kernels.gated_delta.operands import HEAD_DIMS
from minirt.kernels.launch import require_fp8
from minirt.kernels.operations import OPERATIONS
from minirt.kernels.reference import FP8_BLOCK, INT4_CHUNK, INT4_GROUPS, WORDS, block_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMED_DTYPES = {"fp32": torch.float32, "fp8": torch.float8_e4m3fn, "int32": torch.int32, "int64": torch.int64}
MAX_NORM = 1 << 20  # columns of a norm: a program holds a row, and Triton's tensors have no more values
MAX_HEAD = 1024  # channels of a head that is rotated

Values = Mapping[str, Any]  # arguments by name


class Size(NamedTuple):
    """A rule for the size of an axis: what an error says, and which sizes are allowed."""

    what: str
    expected: str
    allows: Callable[[int], bool]


SIZES = {
    "norm": Size("too many columns for a norm", f"at most {MAX_NORM}", lambda n: n <= MAX_NORM),
    "gate and up": Size("odd number of rows for gate and up", "an even number", lambda n: n % 2 == 0),
    "rotated head": Size("unsupported head size", f"an even number up to {MAX_HEAD}", lambda n: 0 < n <= MAX_HEAD and n % 2 == 0),
    "state head": Size("unsupported head size", f"one of {', '.join(map(str, HEAD_DIMS))}", lambda n: n in HEAD_DIMS),
    "head": Size("unsupported head size", f"one of {', '.join(map(str, ANY.head_dims))}", lambda n: n in ANY.head_dims),
    "page": Size(
        "unsupported page size", f"a power of two from {ANY.page_size}", lambda n: n >= ANY.page_size and n & (n - 1) == 0
    ),
}  # fmt: skip


def check_arguments(operation: str, **values: Any) -> None:
    """Check arguments, and result tensors that are given, by the declaration of an operation.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: the GPU cannot compute the operation.
    """
    checker(operation)(values)


@functools.cache
def checker(operation: str) -> Callable[[Values], dict[str, int]]:
    """The check of an operation's arguments by name. It returns the sizes of the axes. Errors as in `check_arguments`."""
    declared = OPERATIONS[operation]
    check = tensor_checker(declared.declaration)
    if declared.check is None:
        return check
    rest = declared.find(declared.check)

    def checked(values: Values) -> dict[str, int]:
        sizes = check(values)
        rest(sizes, **values)
        return sizes

    return checked


def tensor_checker(declaration: Declaration) -> Callable[[Values], dict[str, int]]:
    """The check of what the text of a declaration says. It returns the sizes of the axes."""
    tensors = [_compiled(argument) for argument in declaration.tensors]
    numbers = [argument.name for argument in declaration.arguments if argument.type == "int" and not argument.optional]
    pairs = [(argument.name, argument.together) for argument in declaration.arguments if argument.together]
    has_activation = any(argument.type == "activation" for argument in declaration.arguments)
    first, makes_fp8 = declaration.first, any(result.type == "fp8" for result in declaration.results)

    def check(values: Values) -> dict[str, int]:  # eager calls of ops wait for it
        if has_activation:
            check_activation(values["activation"])
        for name, other in pairs:
            if (values.get(name) is None) != (values.get(other) is None):
                raise InputError("only one of both is given", where=f"{name}, {other}", expected="both or none")
        sizes, device = {name: values[name] for name in numbers}, values[first].device
        for tensor in tensors:
            name, optional, axes, ndim, further_axes, rules, like, dtypes, strides = tensor
            x = values.get(name)
            if x is None:
                if optional:
                    continue
                raise InputError("missing", where=name, expected="a tensor")
            shape, before = x.shape, len(sizes)
            fits = len(shape) == ndim or (further_axes and len(shape) > ndim)
            for axis, n in zip(axes, shape):  # noqa: B905  (strict takes time)
                if axis.__class__ is str:
                    fits = sizes.setdefault(axis, n) == n and fits
                elif axis is not None:
                    fits = size(axis, sizes) == n and fits
            if not fits:
                raise _wrong_shape(tensor, x, dict(list(sizes.items())[:before]))
            for axis, rule in rules:
                if not rule.allows(sizes[axis]):
                    raise InputError(rule.what, where=name, expected=rule.expected, found=sizes[axis])
            if (like is None or x.dtype != values[like].dtype) and dtypes is not None and x.dtype not in dtypes(values):
                raise _wrong_dtype(name, x, dtypes(values))
            if dtypes is not None:
                if x.device != device:
                    raise InputError("wrong device", where=name, expected=device, found=x.device)
                if strides != "any strides" and not x.is_contiguous():
                    _check_strides(name, x, strides)
        if makes_fp8:
            require_fp8(device)
        return sizes

    return check


class _Compiled(NamedTuple):
    """A tensor of a declaration, as `tensor_checker` needs it.

    Attributes:
        axes: see `compiled_axis`. `ndim`: how many; `further_axes`: whether others may follow.
        rules: axes whose size is limited.
        like: an argument whose dtype is allowed. `dtypes`: see `compiled_dtypes`; None: the operation's `check` looks at the
            dtype, the device and the strides.
    """

    name: str
    optional: bool
    axes: list[str | CodeType | None]
    ndim: int
    further_axes: bool
    rules: list[tuple[str, Size]]
    like: str | None
    dtypes: Callable[[Values], tuple[torch.dtype, ...]] | None
    strides: str


def _compiled(argument: Argument) -> _Compiled:
    axes = [axis.partition(": ") for axis in argument.axes or ()]
    like = argument.type.removeprefix("of ") if argument.type.startswith("of ") else ""
    return _Compiled(
        argument.name, argument.optional, [compiled_axis(axis) for axis, _, _ in axes], len(axes), argument.further_axes,
        [(axis, SIZES[rule]) for axis, _, rule in axes if rule], None if " or fp8" in like else like.partition(" ")[0] or None,
        None if argument.type == "any dtype" else compiled_dtypes(argument.type), argument.strides,
    )  # fmt: skip


def _wrong_shape(tensor: _Compiled, x: Tensor, sizes: dict[str, int]) -> InputError:
    """`sizes`: known before this tensor."""
    known = [sizes.get(axis, "any") if isinstance(axis, str) else size(axis, sizes) for axis in tensor.axes]
    expected = ", ".join([*("any" if n is None else str(n) for n in known), *["..."][: tensor.further_axes]])
    return InputError("wrong shape", where=tensor.name, expected=f"[{expected}]", found=list(x.shape))


def compiled_axis(axis: str) -> str | CodeType | None:
    """An axis of a declaration as `size` takes it: a name, None for any size, or an expression."""
    if axis == "any":
        return None
    return axis if axis.isidentifier() else compile(axis, f"[{axis}]", "eval")


def size(axis: str | CodeType | None, sizes: dict[str, int]) -> Any:
    """The size of an axis by those of the names; None: any."""
    if axis is None:
        return None
    return sizes[axis] if isinstance(axis, str) else eval(axis, {}, sizes)


def compiled_dtypes(text: str) -> Callable[[Values], tuple[torch.dtype, ...]]:
    """The dtypes that a declaration allows, as a function of the arguments; of a result, the first."""
    if text == "activations":
        return lambda values: DTYPES
    text, _, scale = text.partition(" or fp8 with ")
    if scale:
        wide, eight = compiled_dtypes(text), (NAMED_DTYPES["fp8"],)
        return lambda values: wide(values) if values.get(scale) is None else eight
    if " or " in text:
        one, other = map(compiled_dtypes, text.split(" or "))
        return lambda values: one(values) + other(values)
    if text.startswith("of "):
        name = text.removeprefix("of ")
        return lambda values: (values[name].dtype,)
    dtypes = (NAMED_DTYPES[text],)
    return lambda values: dtypes


def _wrong_dtype(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> InputError:
    if dtypes is DTYPES:
        return InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=x.dtype)
    return InputError("wrong dtype", where=name, expected=" or ".join(map(str, dtypes)), found=x.dtype)


def _check_strides(name: str, x: Tensor, strides: str) -> None:
    """Raise InputError for an x that is not contiguous, unless only its rows lie apart and may do so."""
    if strides != "rows apart" or x.stride(-1) != 1:
        raise InputError("not contiguous", where=name, found=f"strides {x.stride()}", hint="call .contiguous()")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device, *,
    strided: bool = False,
) -> None:  # fmt: skip
    """Raise InputError unless `tensor` is contiguous and has this shape (None: any size), dtype and device.

    `strided`: only its last dimension must be contiguous.
    """
    fits = tensor.ndim == len(shape)
    for expected, n in zip(shape, tensor.shape):  # noqa: B905  (strict takes time)
        fits = fits and (expected is None or expected == n)
    if not fits:
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise InputError("wrong shape", where=name, expected=f"[{sizes}]", found=list(tensor.shape))
    if tensor.dtype != dtype:
        raise _wrong_dtype(name, tensor, (dtype,))
    if tensor.device != device:
        raise InputError("wrong device", where=name, expected=device, found=tensor.device)
    if not tensor.is_contiguous():
        _check_strides(name, tensor, "rows apart" if strided else "")


def check_activations(name: str, tensor: Tensor, ndim: int = 2) -> None:
    """Raise InputError unless `tensor` is a contiguous bf16, fp16 or fp32 tensor of `ndim` dimensions."""
    if tensor.dtype not in DTYPES:
        raise _wrong_dtype(name, tensor, DTYPES)
    check_tensor(name, tensor, (None,) * ndim, tensor.dtype, tensor.device)


# What text cannot say: the `check` of operations. `sizes` are those of the axes in their declarations.


def check_rotary(sizes: dict[str, int], cos: Tensor, **rest: Any) -> None:
    """cos and sin [C, T, D] are of each of B sequences, or of all."""
    if sizes["C"] not in (1, sizes["B"]):
        expected = f"[{sizes['B']} or 1, {sizes['T']}, {sizes['D']}]"
        raise InputError("wrong shape", where="cos", expected=expected, found=list(cos.shape))


def check_linear(
    sizes: dict[str, int], x: Tensor, weight: Tensor, scale: Tensor | None = None, activation: str | None = None, **rest: Any
) -> None:
    """The weight is in a format, and its scale fits. With an activation, its rows are gate and up."""
    _check_weight("weight", weight, "scale", scale, (None,), x, sizes["K"], activation is not None)


def check_mixture(
    sizes: dict[str, int], h: Tensor, gate_up: Tensor, down: Tensor, top_k: int, gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None, gate_up_bias: Tensor | None = None, **rest: Any,
) -> None:  # fmt: skip
    """The weights of the experts are in one format, and their scales and biases fit."""
    E, H = sizes["E"], sizes["H"]
    if not 1 <= top_k <= E:
        raise InputError("wrong number", where="top_k", expected=f"from 1 to {E}", found=top_k)
    inter = gate_up.shape[1] // 2 if gate_up.dtype == torch.int16 else down.shape[2]
    _check_weight("down", down, "down_scale", down_scale, (E, H), h, inter)
    _check_weight("gate_up", gate_up, "gate_up_scale", gate_up_scale, (E, 2 * inter), h, H, True)
    if gate_up_bias is not None:
        check_tensor("gate_up_bias", gate_up_bias, (E, 2 * inter), h.dtype, h.device)
    if gate_up_scale is not None and down_scale is not None and gate_up_scale.ndim != down_scale.ndim:
        shapes = f"{list(gate_up_scale.shape)}, {list(down_scale.shape)}"
        raise InputError("both scales are of rows or of blocks", where="gate_up_scale, down_scale", found=shapes)


def _check_weight(
    name: str, weight: Tensor, scale_name: str, scale: Tensor | None, rows: tuple[int | None, ...], x: Tensor, K: int,
    gated: bool = False,
) -> None:  # fmt: skip
    """Raise InputError unless a weight [rows, K], or of experts [E, rows, K], is in a format, and its scale fits.

    It has x's dtype; or float8_e4m3fn, with an fp32 scale for each row or for each block; or 4 bits in int16 words, with scale
    words of one of the dtypes `WORDS`.

    Args:
        rows: the sizes before K; None: any.
        gated: the rows are gate and up.
    """
    experts, device = rows[:-1], x.device
    if scale is not None and scale.dtype in WORDS and weight.dtype != torch.float8_e4m3fn:
        check_tensor(name, weight, (*rows, -(-K // INT4_CHUNK) * (INT4_CHUNK // 4)), torch.int16, device)
        check_tensor(scale_name, scale, (*experts, None, weight.shape[-2]), scale.dtype, device, strided=bool(experts))
        sizes = (INT4_CHUNK,) if scale.dtype == torch.uint32 else INT4_GROUPS
        if scale.shape[-2] not in (groups := [-(-K // g) for g in sizes]):
            expected = " or ".join(map(str, groups))
            raise InputError("wrong number of groups", where=scale_name, expected=expected, found=scale.shape[-2])
        return
    check_tensor(name, weight, (*rows, K), x.dtype if scale is None else torch.float8_e4m3fn, device)
    if scale is not None:
        require_fp8(device)
        check_tensor(scale_name, scale, (*experts, *scale.shape[len(experts) :]), torch.float32, device)
        if experts:
            scale_name, scale = f"{scale_name}[0]", scale[0]
        _check_scale(scale_name, scale, weight.shape[-2], K, gated)


def _check_scale(name: str, scale: Tensor, rows: int, K: int, gated: bool) -> None:
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
