"""What layers share: the `Layer` contract and the registry of implementations.

A layer maps the residual stream to the residual stream: `layer(x, batch, kv) -> x`, x [T, H]. (`Embedding` makes the stream,
`Select` leaves the R rows of it that need logits, and `Head` turns these into logits. R may be 0.) What a layer computes is fixed
by its kind; *how* is an implementation: a factory that gets the layer, weights in place, and returns `forward(x, batch, kv)`. The
choice is made once, at load.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minirt.device import compute_capability, interpreter_unsupported, interpreting, is_nvidia
from minirt.engine.kv_cache import LayerKV, LayerState, PagesSpec, StateSpec
from minirt.engine.step_input import Batch
from minirt.errors import InputError, UnsupportedError
from minirt.modeling.config import ModelConfig, RopeConfig
from minirt.modeling.parameters import PackedLinear, Parameter
from minirt.modeling.rope import rope_table

if TYPE_CHECKING:
    from minirt.kernels.launch import Workspace

BUILT_IN = ("eager", "triton")  # the implementations that are ours
Forward = Callable[[Tensor, Batch, Any], Tensor]  # kv: LayerKV, LayerState or None, as the layer's `cache_spec` says
Factory = Callable[[Any], Forward]  # of the registered kind of layer


class LayerContext:
    """What the layers of one model share on its device: cos|sin tables [max_model_len, D] fp32, the kernels' workspace, the dtype
    of activations and that of the KV pages."""

    def __init__(
        self,
        max_model_len: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.max_model_len, self.device, self.kv_dtype, self.dtype = max_model_len, device, kv_dtype, dtype
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
        return compute_capability(self.device) >= (9, 0)

    @cached_property
    def workspace(self) -> "Workspace":
        """Scratch of the split kernels; made when the first Triton layer asks for it."""
        from minirt.kernels.launch import Workspace

        return Workspace(self.device)


class LinearOp(NamedTuple):
    """A product of a layer with one of its weights, as kernels compute it.

    Args:
        gated: the rows of the weight are gate and up, and an activation combines both.
        residual: the residual stream is added.
        logits: the result is logits, of which the kernel also stores the largest of each tile.
    """

    linear: PackedLinear
    gated: bool = False
    residual: bool = False
    logits: bool = False


class Layer:
    """One layer of the model: its name, its weights and, once bound, its implementation.

    What the rest of minirt has to know of a kind of layer is stated here, in attributes and methods. A new kind is a subclass
    with a `kind` of its own and implementations that are registered for it.

    Attributes:
        kind: what implementations are registered for.
        cache_spec: what the layer keeps between steps, and gets as `kv`; None: nothing. Only a layer that keeps something may
            look at other tokens than a row's own: `Select` stands behind the last of them.
        residual: whether it adds to the residual stream.
        copies: whether it only copies values, and so is exact in any dtype.
    """

    kind: ClassVar[str]
    residual: ClassVar[bool] = True
    copies: ClassVar[bool] = False
    cache_spec: PagesSpec | StateSpec | None = None

    def __init__(self, config: ModelConfig, name: str) -> None:
        self.config, self.name = config, name
        self._forward: Forward | None = None
        self.implementation: str | None = None  # the name of what it runs as, once bound
        self.context = LayerContext(0, torch.device("meta"))

    def parameters(self) -> Iterator[Parameter]:
        """The layer's weights."""
        for value in vars(self).values():
            if isinstance(value, Parameter):
                yield value

    def quantizable(self) -> Iterator[Parameter]:
        """The weights that may be quantized."""
        return (value for value in self.parameters() if value.quantizable)

    def linear_ops(self) -> Sequence[LinearOp]:
        """The layer's products, for tuning and for counting operations."""
        return ()

    def decode_read_bytes(self, dtype: torch.dtype, tokens: int = 1) -> int:
        """Bytes of weights that a step of so many tokens reads."""
        return sum(parameter.nbytes(dtype) for parameter in self.parameters())

    def flops(self, rows: int) -> int:
        """Floating-point operations of the products for so many rows, attention apart."""
        return sum(2 * rows * op.linear.out_features * op.linear.in_features for op in self.linear_ops())

    def row_maxima_tiles(self, rows: int) -> int:
        """How many row maxima it stores for each of `rows` rows of logits: the width of `Batch.row_maxima`'s values; 0: none."""
        return 0

    def share(self, parameter: Parameter) -> None:
        """Use `parameter` in the place of this layer's own parameter of the same checkpoint tensors (a tied head)."""
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
        forward = implementation.factory(self)
        if not callable(forward):
            what, found = f"the factory of implementation {implementation.name!r} returns no function", type(forward).__name__
            raise UnsupportedError(what, where=self.name, expected="forward(x, batch, kv)", found=found)
        self.implementation = implementation.name
        self._forward = forward if implementation.name in BUILT_IN else self._checked(forward, implementation.name)

    def _checked(self, forward: Forward, name: str) -> Forward:
        """`forward`, which refuses what kernels behind it would misread, since they look at nothing but addresses."""

        def checked(x: Tensor, batch: Batch, kv: LayerKV | LayerState | None) -> Tensor:
            out = forward(x, batch, kv)
            shape, dtype = self.returns(x, batch)
            found = type(out).__name__
            if isinstance(out, Tensor):
                found = f"{out.dtype}, shape {tuple(out.shape)}, on {out.device}"
                if out.layout == torch.strided:
                    if (tuple(out.shape), out.dtype, out.device) == (shape, dtype, x.device) and out.is_contiguous():
                        return out
                    found += f", strides {out.stride()}"
                else:
                    found += f", {out.layout}"
            what, expected = f"implementation {name!r} returns what the next layer cannot take", f"a contiguous {dtype} tensor"
            raise UnsupportedError(what, where=self.name, expected=f"{expected} of shape {shape} on {x.device}", found=found)

        return checked

    def __call__(self, x: Tensor, batch: Batch, kv: LayerKV | LayerState | None = None) -> Tensor:
        if self._forward is None:
            raise UnsupportedError(
                "the layer has no implementation yet", where=self.name, hint="call Model.resolve first"
            )
        return self._forward(x, batch, kv)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a layer kind.

    `unsupported(layer, device)` gives the reason why it cannot, or None. `capturable`: whether a CUDA graph can hold it.
    """

    kind: str
    name: str
    factory: Factory
    unsupported: Callable[[Layer, torch.device], str | None]
    capturable: bool = False


_REGISTRY: dict[tuple[str, str], Implementation] = {}


def register(
    kind: str,
    name: str,
    *,
    unsupported: Callable[[Layer, torch.device], str | None] | None = None,
    capturable: bool = False,
) -> Callable[[Factory], Factory]:
    """Decorator: make `factory(layer) -> forward(x, batch, kv)` available by `name` to the layers of a kind, as in
    `--impl 'layers.*.mlp=<name>'` or `--impl head=<name>`. What it returns has to be contiguous, of the layer's shape and dtype,
    and on its device.

    Args:
        kind: "embedding", "attention", "mlp", "moe", "select", "head", or the kind of a layer class of your own.
        name: the implementation's name: letters, digits and any of `_ . + -`. "eager" and "triton" are taken, "auto" is reserved.
        unsupported: called with the layer and the device; returns the reason why this layer cannot run so, or None.
        capturable: a CUDA graph may hold the forward: it is called once for each size of a step, and its GPU work is replayed for
            all steps of that size. So it never waits for the GPU, and reads what differs between steps (tokens, positions,
            lengths) only from tensors on the device. While one layer of a model is not capturable, no step runs as a CUDA graph.
    Raises:
        InputError: an unusable kind, name or argument.
        UnsupportedError: the name is taken.
    """
    where = f"register({kind!r}, {name!r})"
    for what, value in (("kind of layer", kind), ("name of an implementation", name)):
        if not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", value) is None:
            raise InputError(f"unusable {what}", where=where, expected="letters, digits and any of _ . + -")
    if name == "auto" or (kind, name) in _REGISTRY:
        raise UnsupportedError("this implementation name is taken", where=where)
    if unsupported is not None and not callable(unsupported):
        raise InputError("unsupported= is not a function", where=where, found=type(unsupported).__name__)
    if not isinstance(capturable, bool):
        raise InputError("capturable= is not a bool", where=where, found=type(capturable).__name__)

    def decorate(factory: Factory) -> Factory:
        if not callable(factory):
            raise InputError("not a factory", where=where, expected="a function of the layer", found=type(factory).__name__)
        _REGISTRY[kind, name] = Implementation(kind, name, factory, unsupported or (lambda layer, device: None), capturable)
        return factory

    return decorate


def implementation(kind: str, name: str) -> Implementation:
    """The registered implementation, or an error that lists those there are."""
    try:
        return _REGISTRY[kind, name]
    except KeyError:
        known = ", ".join(sorted(n for k, n in _REGISTRY if k == kind)) or "none is registered for this kind"
        raise UnsupportedError(f"no implementation {name!r} for {kind} layers", expected=f"one of {known}") from None


def has_implementation(kind: str, name: str) -> bool:
    return (kind, name) in _REGISTRY


def triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    """Why no Triton form can run on `device`, or None. Triton's interpreter counts as a device that can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    on_gpu = device.type == "cuda"
    if interpreting():
        return interpreter_unsupported(str(layer.context.dtype).removeprefix("torch."), on_gpu)
    if not on_gpu:
        return f"Triton has no {device.type} backend"
    if not is_nvidia(device):
        return "the Triton kernels are for NVIDIA GPUs, and this is an AMD GPU"
    major, minor = compute_capability(device)
    lowest, why = (8.9, " for fp8 weights") if any(p.format for p in layer.parameters()) else (8.0, "")
    return None if major + minor / 10 >= lowest else f"compute capability {major}.{minor} is below {lowest}{why}"
