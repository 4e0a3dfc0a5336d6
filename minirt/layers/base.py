"""What the five layers share: the `Layer` contract and the registry of implementations.

A layer maps the residual stream to the residual stream: `layer(x, batch, kv) -> x`, x [T, H]. (`Embedding` makes the stream,
`Select` leaves the R rows of it that need logits, and `Head` turns these into logits. R may be 0.) What a layer computes is fixed
by its kind; *how* is an implementation: a factory that gets the layer, weights in place, and returns `forward(x, batch, kv)`. The
choice is made once, at load.
"""

import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from minirt.engine.kv_cache import LayerKV
from minirt.engine.step_input import Batch
from minirt.errors import UnsupportedError
from minirt.modeling.config import ModelConfig, RopeConfig
from minirt.modeling.parameters import PackedLinear, Parameter
from minirt.modeling.rope import rope_table

if TYPE_CHECKING:
    from minirt.kernels.launch import Workspace

KINDS = ("embedding", "attention", "mlp", "select", "head")
BUILT_IN = ("eager", "triton")  # the implementations that are ours
Forward = Callable[[Tensor, Batch, LayerKV | None], Tensor]
Factory = Callable[[Any], Forward]  # of the registered kind of layer


class LayerContext:
    """What the layers of one model share on its device: cos|sin tables [max_model_len, D] fp32, the kernels' workspace, and the
    dtype of the KV pages."""

    def __init__(self, max_model_len: int, device: torch.device, kv_dtype: torch.dtype = torch.float32) -> None:
        self.max_model_len, self.device, self.kv_dtype = max_model_len, device, kv_dtype
        self._ropes: dict[tuple[RopeConfig, int], Tensor] = {}

    def rope(self, rope: RopeConfig, head_dim: int) -> Tensor:
        """The table for this rotary embedding, made once."""
        key = (rope, head_dim)
        if key not in self._ropes:
            self._ropes[key] = rope_table(rope, head_dim, self.max_model_len, self.device)
        return self._ropes[key]

    @cached_property
    def pdl(self) -> bool:
        """Whether a layer's kernels start before their predecessor has ended (programmatic dependent launch, from sm_90 on)."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)

    @cached_property
    def workspace(self) -> "Workspace":
        """Scratch of the split kernels; made when the first Triton layer asks for it."""
        from minirt.kernels.launch import Workspace

        return Workspace(self.device)


class Layer:
    """One layer of the graph: its name, its weights and, once bound, its implementation."""

    kind: ClassVar[str]

    def __init__(self, config: ModelConfig, name: str) -> None:
        self.config, self.name = config, name
        self._forward: Forward | None = None
        self.implementation: str | None = None  # the name of what it runs as, once bound
        self.context = LayerContext(0, torch.device("meta"))

    def parameters(self) -> Iterator[Parameter]:
        """The layer's weight holders."""
        for value in vars(self).values():
            if isinstance(value, Parameter):
                yield value

    def linears(self) -> Iterator[PackedLinear]:
        """The weights that are multiplied, and so may be quantized."""
        for value in self.parameters():
            if isinstance(value, PackedLinear):
                yield value

    def share(self, parameter: Parameter) -> None:
        """Use `parameter` in the place of this layer's own holder of the same checkpoint tensors (a tied head)."""
        names = [name for name, _ in parameter.expected()]
        for attribute, value in list(vars(self).items()):
            if isinstance(value, Parameter) and [name for name, _ in value.expected()] == names:
                setattr(self, attribute, parameter)

    def compile_key(self) -> tuple[Any, ...]:
        """All that kernels can depend on but the values of weights: layers of one form and implementation launch the same."""
        own = {name: value for name, value in vars(self).items() if name not in ("name", "_forward")}
        facts = {name: value.compile_key() if isinstance(value, Parameter) else value for name, value in own.items()}
        return type(self), *(
            (name, value if isinstance(value, Hashable) else id(value)) for name, value in facts.items()
        )

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the output for an input x."""
        return tuple(x.shape), x.dtype

    def reserve(self, max_splits: int) -> None:
        """Make room in the workspace for steps with up to this many KV splits; before CUDA graphs are captured."""

    def bind(self, implementation: "Implementation") -> None:
        """Run so from now on. What an implementation that is not ours returns is checked at each call."""
        forward, self.implementation = implementation.factory(self), implementation.name
        self._forward = forward if implementation.name in BUILT_IN else self._checked(forward, implementation.name)

    def _checked(self, forward: Forward, name: str) -> Forward:
        """`forward`, which refuses what kernels behind it would misread, since they look at nothing but addresses."""

        def checked(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
            out = forward(x, batch, kv)
            shape, dtype = self.returns(x, batch)
            found = type(out).__name__
            if isinstance(out, Tensor):
                if tuple(out.shape) == shape and out.dtype == dtype and out.is_contiguous():
                    return out
                found = f"{out.dtype}, shape {tuple(out.shape)}, strides {out.stride()}"
            what, expected = f"implementation {name!r} returns what the next layer cannot take", f"a contiguous {dtype} tensor"
            raise UnsupportedError(what, where=self.name, expected=f"{expected} of shape {shape}", found=found)

        return checked

    def __call__(self, x: Tensor, batch: Batch, kv: LayerKV | None = None) -> Tensor:
        if self._forward is None:
            raise UnsupportedError(
                "the layer has no implementation yet", where=self.name, hint="call Model.resolve first"
            )
        return self._forward(x, batch, kv)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a layer kind. `unsupported(layer, device)` gives the reason why it cannot, or None."""

    kind: str
    name: str
    factory: Factory
    unsupported: Callable[[Layer, torch.device], str | None]


_REGISTRY: dict[tuple[str, str], Implementation] = {}


def register(
    kind: str, name: str, *, unsupported: Callable[[Layer, torch.device], str | None] | None = None
) -> Callable[[Factory], Factory]:
    """Decorator: make `factory(layer) -> forward(x, batch, kv)` available by `name` to the layers of a kind, as in
    `--impl 'layers.*.mlp=<name>'` or `--impl head=<name>`. What it returns has to be contiguous, of the layer's shape and dtype.

    Args:
        kind: "embedding", "attention", "mlp", "select" or "head".
        name: the implementation's name; "eager" and "triton" are taken, "auto" is reserved.
        unsupported: called with the layer and the device; returns the reason why this layer cannot run so, or None.
    """
    if kind not in KINDS:
        raise UnsupportedError("unknown layer kind", where="register", expected=f"one of {', '.join(KINDS)}", found=kind)
    if name == "auto" or (kind, name) in _REGISTRY:
        raise UnsupportedError("this implementation name is taken", where=f"register({kind!r}, {name!r})")

    def decorate(factory: Factory) -> Factory:
        _REGISTRY[kind, name] = Implementation(kind, name, factory, unsupported or (lambda layer, device: None))
        return factory

    return decorate


def implementation(kind: str, name: str) -> Implementation:
    """The registered implementation, or an error that lists those there are."""
    try:
        return _REGISTRY[kind, name]
    except KeyError:
        known = ", ".join(sorted(n for k, n in _REGISTRY if k == kind))
        raise UnsupportedError(f"no implementation {name!r} for {kind} layers", expected=f"one of {known}") from None


def has_implementation(kind: str, name: str) -> bool:
    return (kind, name) in _REGISTRY


def triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    """Why no Triton form can run on `device`, or None. Triton's interpreter counts as a device that can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        lowest, why = (8.9, " for fp8 weights") if any(p.format for p in layer.linears()) else (8.0, "")
        return None if major + minor / 10 >= lowest else f"compute capability {major}.{minor} is below {lowest}{why}"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else f"Triton has no {device.type} backend"
