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
        self.names, self.linears, self.fp8 = tuple(linears), tuple(linears.values()), fp8
        self._packed: list[Any] | None = None  # weight, bias and scale, once they are packed
        self._places: list[tuple[Any, ...]] = []  # of their parts: (holder, name, part, and how it lies in memory)

    def tensors(self, x: Tensor) -> list[Any]:
        """Weight, bias and scale for a product with x: tensors or None, or for a packed op lists of the linears' tensors."""
        if len(self.linears) == 1:
            weight, bias = map(self.linears[0]._parameters.get, ("weight", "bias"))
            if type(weight) is nn.Parameter and (bias is None or type(bias) is nn.Parameter) and not self.fp8:
                return [weight, bias, None]
            return [parts[0] if parts else None for parts in self._parts()]
        if not traced(x) and self._pack() and self._packed is not None:
            return self._packed
        lists = self._parts()
        if torch._C._functorch.maybe_current_level() and not torch.compiler.is_compiling():  # vmap takes no lists
            return [torch.cat(parts) if parts else None for parts in lists]
        return lists

    def pack(self) -> None:
        """Pack parameters that are not packed yet."""
        if len(self.linears) > 1:
            self._pack()

    def _parts(self) -> list[Any]:
        """The linears' weights, biases and scales; without biases or scales an empty list."""
        out: list[Any] = []
        for holder, what in (("_parameters", "weight"), ("_parameters", "bias"), ("_buffers", SCALE)):
            parts = [getattr(linear, holder).get(what) for linear in self.linears]
            if (what == "bias" and all(part is None for part in parts)) or (what == SCALE and not self.fp8):
                parts = []
            for name, part in zip(self.names, parts, strict=False):
                if part is None:
                    raise InputError("is missing, but another linear of the product has one", where=f"{name}.{what}", hint=HINT)
                if type(part) is not nn.Parameter and type(part) is not Tensor and not torch.compiler.is_compiling():
                    raise InputError("not a plain tensor", where=f"{name}.{what}", found=type(part).__name__, hint=HINT)
            out.append(parts)
        return out

    def _pack(self) -> bool:
        """Make the parts views of one storage, unless they are. False: they cannot become views."""
        for holder, what, part, pointer, stride, shape, dtype in self._places:  # each call of the module runs this
            if holder.get(what) is not part:
                break
            if part is not None and (
                part.data_ptr() != pointer or part.stride() != stride or part.shape != shape or part.dtype is not dtype
            ):
                break
        else:
            if self._packed is not None:
                return True
        self._packed, self._places, lists = None, [], self._parts()
        if not all(_can_be_packed(parts) for parts in lists):
            return False
        with torch.inference_mode(lists[0][0].is_inference()):  # the mode in which the parameters were made
            self._packed = [pack_rows(parts) if parts else None for parts in lists]
        for linear in self.linears:
            for holder, what in ((linear._parameters, "weight"), (linear._parameters, "bias"), (linear._buffers, SCALE)):
                part = holder.get(what)
                place = (None,) * 4 if part is None else (part.data_ptr(), part.stride(), part.shape, part.dtype)
                self._places.append((holder, what, part, *place))
        return True


HINT = "unpatch the model before another library changes it, then patch it again"


def _can_be_packed(parts: list[Any]) -> bool:
    """Not if they are not alike, one is there twice, or they are not the module's, as in `torch.func.functional_call`."""
    forms = {(type(part), part.dtype, part.device, part.shape[1:], part.is_inference()) for part in parts}
    mine = all(type(part) is nn.Parameter or (part.dtype == torch.float32 and part.ndim == 1) for part in parts)
    return len(forms) < 2 and mine and len({id(part) for part in parts}) == len(parts)


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
