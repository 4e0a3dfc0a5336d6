"""The truth of a layer in fp64, and the rows of a layer that have one result."""

import copy
from functools import singledispatch

from torch import Tensor

from minirt.kernels import reference
from minirt.layers import Embedding, Forward, Layer, Select, implementation
from minirt.layers.moe import MoE
from minirt.modeling.parameters import Parameter


@singledispatch
def exact(layer: Layer) -> Forward:
    """The truth for a layer: its eager implementation with weights converted to fp64, except quantized weights.

    The returned forward needs x in fp64, and a cache in fp64 or FP8. Register a class of layers that need another truth.
    """
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Parameter):
            setattr(twin, name, to_double(value))
    return implementation(layer.kind, "eager").factory(twin)


@exact.register(Embedding)
@exact.register(Select)
def _copied(layer: Layer) -> Forward:
    """A layer that only copies values is exact in any dtype."""
    gather = implementation(layer.kind, "eager").factory(layer)
    return lambda x, batch, kv: gather(x, batch, kv).double()


def to_double(parameter: Parameter) -> Parameter:
    """A copy with its values in fp64, except quantized weights and their scales."""
    twin = copy.copy(parameter)
    for name, value in vars(parameter).items():
        quantized = parameter.format is not None and name in ("weight", "scale")
        if isinstance(value, Tensor) and value.is_floating_point() and not quantized:
            setattr(twin, name, value.double())
    return twin


@singledispatch
def settled(layer: Layer, x: Tensor) -> Tensor | None:
    """Which rows of x [T, H] have a result that depends on no near-tie: [T] bool; None: all of them.

    Register a class of layers that compare values to choose what they compute, because another rounding may choose differently.
    """
    return None


@settled.register
def _mixture(layer: MoE, x: Tensor) -> Tensor | None:
    """Rows whose last chosen expert is ahead of the first one not chosen by 3 times the rounding error of eager logits."""
    k, eps = layer.moe.experts_per_token, layer.config.rms_norm_eps
    if k == layer.moe.num_experts:
        return None
    router, norm = layer.router.weight, layer.norm_of_router.weight
    ideal = reference.linear(reference.rms_norm(x.double(), norm.double(), eps), router.double())
    rounded = reference.linear(reference.rms_norm(x, norm, eps), router)
    ordered = ideal.sort(-1, descending=True).values
    return ordered[:, k - 1] - ordered[:, k] > 3 * (rounded.double() - ideal).abs().amax(-1)
