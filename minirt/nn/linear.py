"""`FP8Linear` and `Int4Linear`: quantized linear layers. `pack_linears`: several linear layers as one matrix."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels.checks import DTYPES, check_tensor
from minirt.kernels.launch import require_fp8
from minirt.modeling.formats import LinearFormat, QuantizedToFp8, QuantizedToInt4
from minirt.nn import functional
from minirt.nn.norm import Device, check_linear, check_sizes, check_weight, parameter


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is quantized. Its kinds are `FP8Linear` and `Int4Linear`.

    Its parameters are `weight`, `weight_scale` and, if there is one, `bias`, also in its state dict. It also loads the state
    dict of the layer that it replaces: a `weight` [N, K] of 16 or 32 bits is quantized while it is loaded.

    Args:
        in_features, out_features: K and N. The weight begins as that of a `torch.nn.Linear`, quantized.
        bias: whether there is one. `device`: that of the parameters. `dtype`: of the bias, bf16, fp16 or fp32.
    Raises:
        UnsupportedError: FP8 on a GPU with a compute capability below 8.9.
    """

    format: ClassVar[LinearFormat]

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        self._quantize(nn.Linear(in_features, out_features, bias, device, dtype).requires_grad_(False))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantize the weight of a linear layer, which is not changed. The bias is shared.

        Raises:
            InputError: the weight is not of bf16, fp16 or fp32.
            UnsupportedError: FP8 on a GPU with a compute capability below 8.9.
        """
        quantized = cls(linear.in_features, linear.out_features, device="meta")
        quantized._quantize(linear)
        return quantized

    def _quantize(self, linear: nn.Linear) -> None:
        weight, scale = quantize_weight(linear.weight, self.format)
        if linear.bias is not None:
            check_weight("bias", linear.bias, (linear.out_features,))
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = parameter(weight)
        self.weight_scale = parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of bf16, fp16 or fp32 → [..., N]. Errors: see `minirt.nn.functional`."""
        return functional.linear(x, self.weight, self.bias, self.weight_scale)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format.name}"

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        name, scale_name = f"{prefix}weight", f"{prefix}weight_scale"
        given = state_dict.get(name)
        if isinstance(given, Tensor) and given.dtype != self.weight.dtype:  # PyTorch would only convert the values
            if scale_name in state_dict or given.dtype not in DTYPES:
                expected = f"{self.weight.dtype} with a scale, or bfloat16, float16 or float32 without"
                raise InputError("wrong dtype", where=name, expected=expected, found=given.dtype)
            check_tensor(name, given, (self.out_features, self.in_features), given.dtype, given.device)
            device = given.device if self.weight.is_meta else self.weight.device  # `assign=True` puts it in place
            values, scale = quantize_weight(given.to(device), self.format)
            state_dict = {**state_dict, name: values, scale_name: scale}
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[arg-type]


class FP8Linear(QuantizedLinear):
    """A linear layer with an e4m3 weight [N, K] and an fp32 scale [N], one for each output.

    The activations of two or more tokens are quantized to e4m3 as well, each token with its own scale. A single token keeps its
    dtype. So outputs depend slightly on the number of tokens.
    """

    format = QuantizedToFp8()


class Int4Linear(QuantizedLinear):
    """A linear layer with 4-bit weights and, for each output and 128 columns, a scale and a zero point.

    Activations are not quantized. The weight has int16 words [N, ⌈K / 128⌉ · 32], its scale int32 words [⌈K / 128⌉, N], see
    `minirt.kernels.reference.pack_int4` and `pack_int4_scale`.
    """

    format = QuantizedToInt4()


def quantize_weight(weight: Tensor, format: LinearFormat) -> tuple[Tensor, Tensor]:
    """A weight [N, K] of 16 or 32 bits quantized, some rows at a time: (weight, scale) as the format allocates them."""
    if weight.ndim != 2:
        raise InputError("wrong shape", where="weight", expected="[any, any]", found=list(weight.shape))
    if weight.dtype not in DTYPES:
        raise InputError("unsupported dtype", where="weight", expected="bfloat16, float16 or float32", found=weight.dtype)
    if isinstance(format, QuantizedToFp8):
        require_fp8(weight.device)
    rows, K = [weight.shape[0]], weight.shape[1]
    values, scale = format.allocate(rows, K, weight.device)
    if not weight.is_meta:
        with torch.no_grad():
            format.store_rows(weight, values, scale, rows, 0)
    return values, scale


def pack_linears(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of linear layers with the same input as one matrix, the first layer's rows first, and their biases.

    The parameters of the given layers become views of the result: there is no second copy, and their state dicts do not change.
    While it runs, the old tensors and the result exist side by side. Call it when the model is on its device: moving a model
    moves each parameter for itself, and the views would be separate tensors again.

    Returns:
        weight [ΣN, K], bias [ΣN] or None.
    Raises:
        InputError: the layers differ in input size, dtype or device, only some have a bias, or one is given twice. Then nothing
            has changed.
    """
    if not linears:
        raise InputError("nothing to pack", where="linears", expected="at least one layer")
    first, seen = linears[0], set[int]()
    for i, linear in enumerate(linears):
        check_linear(f"linears[{i}].", linear, first.in_features, first.weight if i else None)
        if id(linear.weight) in seen:
            raise InputError("the same parameter twice", where=f"linears[{i}].weight")
        seen.add(id(linear.weight))
        if (linear.bias is None) != (first.bias is None):
            expected = "no bias" if first.bias is None else "a bias"
            raise InputError("a bias in some layers only", where=f"linears[{i}].bias", expected=expected)
    weight = pack_rows([linear.weight for linear in linears])
    return weight, None if first.bias is None else pack_rows([linear.bias for linear in linears])


@torch.no_grad()
def pack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, …] of any dtype one below the other in new memory. Each given tensor becomes a view of its rows there.

    Nothing is checked: shapes but for N, dtypes and devices must be equal, and no tensor may be given twice.
    """
    packed = torch.cat(list(tensors))
    for tensor, view in zip(tensors, packed.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = view
    return packed
