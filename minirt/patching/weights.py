"""`Weights`: the weights of one product, which are those of one or more linears of the model."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.modeling.formats import FP8, QuantizedToFp8
from minirt.nn.linear import pack_rows, quantize_weight

SCALE = "weight_scale"  # the buffer of an FP8 linear: as `minirt.nn.FP8Linear` and compressed-tensors name it


class Weights:
    """The weights of one product: the rows of its linears, from top to bottom.

    The linears' parameters stay the same objects, and become views of the product's storage: there is no second copy, and the
    `state_dict` does not change. With `fp8` they become e4m3 views, and each linear has a buffer `weight_scale` [N]. With `fp8`
    and `keep_original` they are left alone, and the FP8 weights are held beside them.

    Args:
        linears: by their names in the module that they belong to.
    Attributes:
        weight, bias, scale: as the functions of `minirt.nn.functional` take them.
        sources: (name, linear, its parameter) of each linear, when the weights were packed.
    """

    def __init__(self, linears: dict[str, nn.Linear], fp8: bool, keep_original: bool) -> None:
        self.names, self.linears = tuple(linears), tuple(linears.values())
        self.fp8, self.keep_original = fp8, keep_original
        self.weight: Tensor = torch.empty(0)
        self.bias: Tensor | None = None
        self.scale: Tensor | None = None
        if self.lost:
            with self._mode():
                self._quantize()
                rows = [linear.out_features for linear in self.linears]
                for linear, values, scale in zip(self.linears, self.weight.split(rows), self._scales(rows), strict=True):
                    linear.weight.data = values
                    linear.register_buffer(SCALE, scale)
        self.refresh()

    def refresh(self) -> None:
        """Follow the parameters after they were moved, cast or loaded: pack or quantize them again."""
        with self._mode():
            if self.fp8 and self.keep_original:
                self._quantize()
            else:
                self.weight = _packed([linear.weight for linear in self.linears], self.weight)
                if self.fp8:
                    self.scale = _packed([linear.get_buffer(SCALE) for linear in self.linears], self.scale)
            if self.linears[0].bias is not None:
                self.bias = _packed([linear.bias for linear in self.linears], self.bias)
        for tensor in (self.weight, self.bias, self.scale):
            if tensor is not None:  # else the CUDA graphs of torch.compile copy it before each replay
                torch._dynamo.mark_static_address(tensor)
        self.sources = [(name, own, own.weight) for name, own in zip(self.names, self.linears, strict=True)]

    def restore(self) -> None:
        """Give the linears storage of their own again, with the same values."""
        with self._mode():
            for linear in self.linears:
                for tensor in (linear.weight, linear.bias):
                    if tensor is not None and tensor.untyped_storage().nbytes() != tensor.nbytes:
                        tensor.data = tensor.data.clone()

    def check_cast(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Refuse to cast FP8 weights that are the only ones. `convert`: what `Module._apply` maps tensors with."""
        if self.lost and convert(self.weight.new_empty(0)).dtype != FP8:
            hint = "cast the model before minirt.patch, or patch with keep_original=True"
            raise InputError("a model that holds only FP8 weights cannot be cast", where="model", hint=hint)

    def quantize_loaded(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Quantize what is about to be loaded into FP8 weights, unless it is FP8. `prefix`: of the linears' names."""
        for name in self.names if self.lost else ():
            weight, scale = f"{prefix}{name}.weight", f"{prefix}{name}.{SCALE}"
            if weight in state_dict and state_dict[weight].dtype != FP8 and scale not in state_dict:
                source = state_dict[weight].to(self.weight.device)
                state_dict[weight], state_dict[scale] = quantize_weight(source, QuantizedToFp8())

    @property
    def lost(self) -> bool:
        """Whether the FP8 weights are the only ones, so that the original cannot be restored."""
        return self.fp8 and not self.keep_original

    @property
    def fp8_bytes(self) -> int:
        return 0 if self.scale is None else self.weight.nbytes + self.scale.nbytes

    @property
    def original_bytes(self) -> int:
        """Bytes of the original weights that are held beside the FP8 weights."""
        return sum(linear.weight.nbytes for linear in self.linears) if self.fp8 and self.keep_original else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Weights":
        """A copy for the copied linears, whose parameters become views of its storage."""
        new = copy.copy(self)
        new.linears, new.bias = copy.deepcopy(self.linears, memo), None
        new.refresh()
        return new

    def _mode(self) -> AbstractContextManager[Any]:
        """The inference mode in which the parameters were made: what becomes their storage must be made in the same."""
        return torch.inference_mode(self.linears[0].weight.is_inference())

    def _quantize(self) -> None:
        rows, first, form = [linear.out_features for linear in self.linears], self.linears[0].weight, QuantizedToFp8()
        self.weight, self.scale = form.allocate(rows, first.shape[1], first.device)
        for linear, start in zip(self.linears, accumulate(rows, initial=0), strict=False):
            form.store_rows(linear.weight.detach(), self.weight, self.scale, rows, start)

    def _scales(self, rows: list[int]) -> Sequence[Tensor]:
        return () if self.scale is None else self.scale.split(rows)


def _packed(parts: Sequence[Tensor], packed: Tensor | None) -> Tensor:
    """The tensor whose rows the parts are: `packed` if they are its views, else a new one, of which they become views."""
    if len(parts) == 1:
        return parts[0].detach()
    rows = [part.shape[0] for part in parts]
    views = () if packed is None or packed.shape[0] != sum(rows) else packed.split(rows)
    if packed is not None and list(map(_place, parts)) == list(map(_place, views)):
        return packed
    return pack_rows(parts)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.data_ptr(), tensor.stride()
