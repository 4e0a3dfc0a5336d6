"""`Weights`: the weights of one product, which are those of one or more linears of the model."""

from typing import Any

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels.ops import traced
from minirt.modeling.formats import FP8, QuantizedToFp8
from minirt.nn.linear import pack_rows, quantize_weight

SCALE = "weight_scale"  # the buffer of an FP8 linear: as `minirt.nn.FP8Linear` and compressed-tensors name it


class Weights:
    """The weights of one product: the rows of its linears, from top to bottom.

    Nothing else holds them: each call reads the linears' parameters. Those of several linears are packed, that is, they become
    views of one storage, and the `state_dict` does not change. A call that finds one elsewhere, because it was moved or replaced,
    packs them again.

    Args:
        linears: by their names in the module that they belong to.
    """

    def __init__(self, linears: dict[str, nn.Linear], fp8: bool) -> None:
        self.names, self.linears = tuple(linears), tuple(linears.values())
        kinds = [("_parameters", "weight"), ("_parameters", "bias"), ("_buffers", SCALE)]
        self._kinds = kinds if fp8 else kinds[:2]
        self._packed: dict[str, tuple[Tensor, list[Any]]] = {}  # the packed tensor, and the places of its parts

    def tensors(self, x: Tensor) -> list[Any]:
        """Weight, bias and scale for a product with x: tensors or None, or for a packed op lists of the linears' tensors."""
        lists = [self._parts(*kind) for kind in self._kinds]
        lists += [[]] * (3 - len(lists))
        if len(self.linears) == 1:
            return [parts[0] if parts else None for parts in lists]
        if traced(x):
            return lists
        packed = [self._pack(what, parts) for what, parts in zip(("weight", "bias", SCALE), lists, strict=True)]
        return lists if any(parts and rows is None for parts, rows in zip(lists, packed, strict=True)) else packed

    def pack(self) -> None:
        """Pack parameters that are not packed yet."""
        for place, what in self._kinds if len(self.linears) > 1 else ():
            self._pack(what, self._parts(place, what))

    def _parts(self, place: str, what: str) -> list[Any]:
        parts = [getattr(linear, place).get(what) for linear in self.linears]
        if what == "bias" and all(part is None for part in parts):
            return []
        for name, part in zip(self.names, parts, strict=True):
            if part is None:
                expected = f"a tensor, as {' or '.join(self.names)} has one"
                raise InputError("is missing", where=f"{name}.{what}", expected=expected, hint=HINT)
            if type(part) not in (nn.Parameter, Tensor) and not torch.compiler.is_compiling():
                raise InputError("not a plain tensor", where=f"{name}.{what}", found=type(part).__name__, hint=HINT)
        return parts

    def _pack(self, what: str, parts: list[Any]) -> Tensor | None:
        """The tensor whose rows the parts are. None: there are none, or they cannot become its views."""
        places = [(part.data_ptr(), part.stride(), part.dtype, part.shape) for part in parts]
        packed, before = self._packed.get(what, (None, None))
        if places == before:
            return packed
        first, kind = parts[0] if parts else None, Tensor if what == SCALE else nn.Parameter
        alike = all(type(part) is kind and _form(part) == _form(first) for part in parts)
        if first is None or not alike or len({id(part) for part in parts}) < len(parts):
            return None
        with torch.inference_mode(first.is_inference()):  # the mode in which the parameters were made
            packed = pack_rows(parts)
        self._packed[what] = packed, [(part.data_ptr(), part.stride(), part.dtype, part.shape) for part in parts]
        return packed


HINT = "unpatch the model before another library changes it, then patch it again"


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape[1:], tensor.is_inference()


def quantize(linear: nn.Linear) -> Tensor:
    """Replace the weight of a linear by an FP8 weight with a buffer `weight_scale` [N]; returns the original."""
    original = linear.weight.data
    with torch.inference_mode(linear.weight.is_inference()):
        linear.weight.data, scale = quantize_weight(original, QuantizedToFp8())
        linear.register_buffer(SCALE, scale)
    return original


def restore(linear: nn.Linear, original: Tensor | None) -> None:
    """Give a linear storage of its own again, with the same values, or with those from before `quantize`."""
    with torch.inference_mode(linear.weight.is_inference()):
        if original is not None:
            linear.weight.data = original.to(linear.weight.device)
            del linear._buffers[SCALE]
        for tensor in (linear.weight, linear.bias):
            if tensor is not None and tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor.data = tensor.data.clone()


def is_changed(linear: nn.Linear | None, original: Tensor) -> bool:
    """Whether the FP8 weight of a linear is no longer what `quantize` made of the original."""
    if linear is None or SCALE not in linear._buffers:
        return True
    expected = quantize_weight(original, QuantizedToFp8())
    current = linear.weight.detach(), linear.get_buffer(SCALE)
    return not all(
        mine.dtype == theirs.dtype and torch.equal(mine.to(theirs.device).view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(current, expected, strict=True)
    )


def quantize_loaded(name: str, state_dict: dict[str, Any], device: torch.device) -> Tensor | None:
    """Quantize a weight that is about to be loaded, unless it is FP8; returns the original if it was quantized."""
    weight, scale = f"{name}.weight", f"{name}.{SCALE}"
    if weight not in state_dict or state_dict[weight].dtype == FP8 or scale in state_dict:
        return None
    original = state_dict[weight].to(device)
    state_dict[weight], state_dict[scale] = quantize_weight(original, QuantizedToFp8())
    return original
