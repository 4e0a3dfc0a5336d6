"""The `Layer` contract, and the registry of implementations.

A layer maps the residual stream to the residual stream: `layer(x, batch, kv) -> x`, x [T, H]. (`Embedding` creates the stream,
`Tap` copies it, `Select` keeps the R rows that need logits, and `Head` turns these into logits. R may be 0.) The kind of a layer
fixes *what* it computes; an implementation is *how*: a factory that takes the layer with its weights and returns
`forward(x, batch, kv)`. The choice is made once, at load.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minirt.device import compute_capability, interpreter_unsupported, interpreting, is_gpu, is_nvidia, triton_installed
from minirt.errors import ConfigError, InputError, UnsupportedError
from minirt.modeling.config import ModelConfig, RopeConfig
from minirt.modeling.parameters import PackedLinear, Parameter, Shard
from minirt.modeling.rope import query_scales, rope_table
from minirt.step.batch import Batch
from minirt.step.kv_cache import CacheSpec, LayerCache

if TYPE_CHECKING:
    from minirt.kernels.launch import Workspace
    from minirt.kernels.side_stream import SideStream

BUILT_IN = ("eager", "triton")  # the built-in implementations
Forward = Callable[[Tensor, Batch, Any], Tensor]  # kv: what the layer's `cache_spec` allocates, or None
Factory = Callable[[Any], Forward]  # takes a layer of the registered kind


class LayerContext:
    """Shared by the layers of one model, on its device: cos|sin tables [max_model_len, R] fp32 of R rotated channels, the
    kernels' workspace, and the dtypes of activations and KV pages.

    `invariant`: whether a row's result must not depend on the other rows, and is set before layers are bound.
    `reduction`: adds and gathers what the ranks of a model have computed (`minirt.parallel.reduction`); None: there is one rank.
    `undoable`: the largest number of new tokens of a sequence (1 + drafts) with which a step can be undone, to any of them. 0: no
    step can. It is set before layers' caches are allocated.
    """

    def __init__(
        self, max_model_len: int, device: torch.device, kv_dtype: torch.dtype = torch.float32, dtype: torch.dtype = torch.float32
    ) -> None:
        self.max_model_len, self.device, self.kv_dtype, self.dtype = max_model_len, device, kv_dtype, dtype
        self.undoable, self.invariant = 0, False
        self.reduction: Any = None
        self._ropes: dict[tuple[RopeConfig, int], Tensor] = {}
        self._query_scales: dict[RopeConfig, Tensor] = {}

    def rope(self, rope: RopeConfig, rotary_dim: int) -> Tensor:
        """The cos|sin table of this rotary embedding. `Model.allocate` computes those that layers state (`Layer.ropes`)."""
        key = (rope, rotary_dim)
        if key not in self._ropes:
            self._ropes[key] = rope_table(rope, rotary_dim, self.max_model_len, self.device)
        return self._ropes[key]

    def query_scales(self, rope: RopeConfig) -> Tensor | None:
        """The factors of q by position, [max_model_len] fp32; None: there are none."""
        if rope.query_scaling_beta and rope not in self._query_scales:
            self._query_scales[rope] = query_scales(rope, self.max_model_len, self.device)
        return self._query_scales.get(rope)

    @cached_property
    def pdl(self) -> bool:
        """Whether a kernel may start before the previous one has ended (programmatic dependent launch, from sm_90 on)."""
        return compute_capability(self.device) >= (9, 0)

    @cached_property
    def workspace(self) -> "Workspace":
        """Scratch memory for kernels that split their work; created at the first use by a Triton layer."""
        from minirt.kernels.launch import Workspace

        return Workspace(self.device, invariant=self.invariant)

    @cached_property
    def side_stream(self) -> "SideStream":
        """For kernels of CUDA graphs that can run beside others; created at the first use by a Triton layer."""
        from minirt.kernels.side_stream import SideStream

        return SideStream(self.device, invariant=self.invariant)


class LinearOp(NamedTuple):
    """A product of a layer with one of its weights, as kernels compute it.

    Args:
        gated: the rows of the weight are gate and up, and an activation combines both.
        residual: the residual stream is added.
        logits: the result is logits, and the kernel also stores the largest one of each tile.
        experts: (E, k) if the weight is that of E experts, of which each row uses k; None: every row uses the whole weight.
    """

    linear: PackedLinear
    gated: bool = False
    residual: bool = False
    logits: bool = False
    experts: tuple[int, int] | None = None

    @property
    def rows_of_a_token(self) -> int:
        """Rows of the weight that one row of the input is multiplied with."""
        experts, used = self.experts or (1, 1)
        return used * self.linear.out_features // experts


class Layer:
    """One layer of the model: its name, its weights and, once bound, its implementation.

    Attributes and methods state what the rest of minirt needs to know about a kind of layer. A new kind is a subclass with its
    own `kind`, and implementations registered for it.

    Attributes:
        kind: the name for which implementations are registered, and the default of the layer's own name.
        needs_cache: the error if it gets no `kv`; "": it needs none.
        cache_spec: what the layer keeps between steps, and gets as `kv`; None: nothing. Only layers with a cache spec may use
            other tokens than a row's own, so `Select` comes after the last of them.
        residual: whether it adds to the residual stream.
        reads_tokens: whether it makes the residual stream from the tokens, and ignores its input: the first layer, and no other.
        selects_rows: whether it keeps only the rows that need logits: at most one layer, after the last with a cache spec.
        needs_every_row: whether it uses the rows of all tokens though it has no cache spec, so that `Select` comes after it.
        ropes: the rotary tables that the layer takes from `context.rope`, as its arguments: the rope, and how many channels of a
            head are rotated. Layers with equal ones share a table.
        makes_logits: whether its output is logits: the last layer, and no other.
        kernel_tables: modules of `minirt.kernels` with the tables of its kernels beside those of linear layers and experts.
        inner: what the input of its last product is called, and how many channels it has; None: no name.
        hook: of that input (`minirt.hooks`); None: there is none.
        sharded: whether this is one rank's share of the layer, so that its last product is to be added to those of the others.
        adaptable: attributes with linears to which its implementations apply a step's adapters (`minirt.adapters`).
    """

    kind: ClassVar[str]
    residual: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = False
    selects_rows: ClassVar[bool] = False
    makes_logits: ClassVar[bool] = False
    needs_cache: ClassVar[str] = ""
    kernel_tables: ClassVar[tuple[str, ...]] = ()
    adaptable: ClassVar[tuple[str, ...]] = ()
    cache_spec: CacheSpec | None = None
    needs_every_row: bool = False
    ropes: Sequence[tuple[RopeConfig, int]] = ()
    inner: tuple[str, int] | None = None
    hook: Any = None
    sharded: bool = False

    def __init__(self, config: ModelConfig, name: str = "") -> None:
        self.config, self.name = config, name or self.kind
        self._forward: Forward | None = None
        self.implementation: str | None = None  # the name of the bound implementation
        self.context = LayerContext(0, torch.device("meta"))

    def parameters(self) -> Iterator[Parameter]:
        """The layer's weights."""
        return (value for value in vars(self).values() if isinstance(value, Parameter))

    def quantizable(self) -> Iterator[Parameter]:
        """The weights that may be quantized."""
        return (value for value in self.parameters() if value.quantizable)

    def linear_ops(self) -> Sequence[LinearOp]:
        """The layer's matrix products, for tuning and for counting operations."""
        return ()

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights that a step of one token reads."""
        return sum(parameter.nbytes(dtype) for parameter in self.parameters())

    @property
    def step_state_bytes(self) -> int:
        """Bytes of one sequence's state that a step of one token reads and writes: by default, all of it is read and written."""
        return 0 if self.cache_spec is None else 2 * self.cache_spec.state_bytes

    @property
    def activation_values(self) -> int:
        """Values for each token that the layer holds at once beside its input and output: an estimate, to plan memory."""
        return sum(op.rows_of_a_token // (2 if op.gated else 1) for op in self.linear_ops() if not op.logits)

    def flops(self, rows: int) -> int:
        """Floating-point operations of the matrix products for `rows` rows, without attention.

        They say how long a step takes: up to which number of prompt tokens the engine captures CUDA graphs.
        """
        return sum(2 * rows * op.rows_of_a_token * op.linear.in_features for op in self.linear_ops())

    def row_maxima_tiles(self, rows: int) -> int:
        """Number of row maxima that the layer stores per row, for `rows` rows of logits: the width of `Batch.row_maxima`."""
        return 0

    def shard(self, shard: Shard) -> None:
        """Become a rank's share of this layer. Called once, with the formats of the weights and before they are allocated.

        Raises:
            UnsupportedError: the layer cannot be divided into these shares.
        """
        expected = "attention, MLP and MoE layers, as models have them"
        what, place = f"layers of kind {self.kind!r} cannot be divided among ranks", f"--tensor-parallel {shard.ranks}"
        raise UnsupportedError(f"{self.name}: {what}", where=place, expected=expected, found=self.kind)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum of a product over all ranks; it may be the same tensor. Without ranks, as in plans, that of this one."""
        return partial if self.context.reduction is None or not self.sharded else self.context.reduction.sum(partial)

    def added(self, x: Tensor, partial: Tensor) -> Tensor:
        """x + `summed`, in the place of the product."""
        reduction = self.context.reduction if self.sharded else None
        return torch.add(x, partial, out=partial) if reduction is None else reduction.add(x, partial, pdl=self.context.pdl)

    def share(self, shared: Parameter, parameter: Parameter) -> None:
        """Replace a parameter of this layer by `shared`, which has the same checkpoint tensors (a tied head)."""
        vars(self).update({name: shared for name, value in vars(self).items() if value is parameter})

    def compile_key(self) -> tuple[Any, ...]:
        """All that kernels can depend on except the values of weights.

        Layers with one compile key and implementation launch the same kernels.
        """
        attributes = {name: value for name, value in vars(self).items() if name not in ("name", "_forward")}
        facts = {name: value.compile_key() if isinstance(value, Parameter) else value for name, value in attributes.items()}
        return type(self), *((name, value if isinstance(value, Hashable) else id(value)) for name, value in facts.items())

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the output for an input x."""
        return tuple(x.shape), x.dtype

    def reserve(self, max_splits: int) -> None:
        """Make the workspace large enough for steps with `max_splits` KV splits. Call it before CUDA graphs are captured."""

    def hooked(self, inner: Tensor, batch: Batch) -> Tensor:
        """The input of the last product, after its hook."""
        return inner if self.hook is None or batch.hooks is None else batch.hooks.at(self.hook, inner, batch)

    def bind(self, implementation: "Implementation") -> None:
        """Use this implementation from now on. Outputs of implementations that are not built in are checked at each call."""
        forward = implementation.factory(self)
        if not callable(forward):
            what = f"the factory of implementation {implementation.name!r} returns no function"
            raise UnsupportedError(what, where=self.name, expected="forward(x, batch, kv)", found=type(forward).__name__)
        self.implementation = implementation.name
        self._forward = forward if implementation.name in BUILT_IN else self._checked(forward, implementation.name)

    def _checked(self, forward: Forward, name: str) -> Forward:
        """Wrap `forward` with a check of its output: the following kernels assume its shape, its dtype and contiguous rows."""

        def checked(x: Tensor, batch: Batch, kv: LayerCache | None) -> Tensor:
            out = forward(x, batch, kv)
            shape, dtype = self.returns(x, batch)
            returned = type(out).__name__
            if isinstance(out, Tensor):
                strided = out.layout == torch.strided
                if strided and (tuple(out.shape), out.dtype, out.device) == (shape, dtype, x.device) and out.is_contiguous():
                    return out
                layout = f"strides {out.stride()}" if strided else out.layout
                returned = f"{out.dtype}, shape {tuple(out.shape)}, on {out.device}, {layout}"
            what, expected = f"the output of implementation {name!r} does not fit the next layer", f"a contiguous {dtype} tensor"
            raise UnsupportedError(what, where=self.name, expected=f"{expected} of shape {shape} on {x.device}", found=returned)

        return checked

    def __call__(self, x: Tensor, batch: Batch, kv: LayerCache | None = None) -> Tensor:
        if self._forward is None:
            raise UnsupportedError("the layer has no implementation yet", where=self.name, hint="call Model.resolve first")
        if kv is None and self.needs_cache:
            raise ConfigError(self.needs_cache, where=self.name)
        return self._forward(x, batch, kv)


@dataclass(frozen=True)
class Implementation:
    """One way to compute a layer kind.

    `unsupported(layer, device)` returns the reason why it cannot run the layer, or None. `capturable`: whether a CUDA graph can
    contain it. `batch_invariant`: see `register`.
    """

    kind: str
    name: str
    factory: Factory
    unsupported: Callable[[Layer, torch.device], str | None]
    capturable: bool = False
    batch_invariant: bool = False


_REGISTRY: dict[tuple[str, str], Implementation] = {}


def register(
    kind: str, name: str, *, unsupported: Callable[[Layer, torch.device], str | None] | None = None, capturable: bool = False,
    batch_invariant: bool = False,
) -> Callable[[Factory], Factory]:  # fmt: skip
    """Decorator: make `factory(layer) -> forward(x, batch, kv)` available by `name` to the layers of a kind, as in
    `--impl 'layers.*.mlp=<name>'` or `--impl head=<name>`. The output of `forward` must be contiguous, have the layer's shape
    and dtype, and be on its device.

    Args:
        kind: "embedding", "attention", "mlp", "moe", "mlp_and_moe", "select", "head", or the kind of a layer class of your own.
        name: the implementation's name: letters, digits and any of `_ . + -`. "eager" and "triton" are taken, "auto" is reserved.
        unsupported: called with the layer and the device; returns why the implementation cannot run this layer, or None.
        capturable: a CUDA graph may contain the forward: it is called once for each size of a step, and its GPU work is replayed
            for all steps of that size. So it must never wait for the GPU, and it must read all values that differ between steps
            (tokens, positions, lengths) from tensors on the device. If one layer of a model is not capturable, no step runs as a
            CUDA graph.
        batch_invariant: if `layer.context.invariant`, a token gets the same bits whatever the step computes besides. Else
            `--batch-invariant` refuses the layer.
    Raises:
        InputError: an unusable kind, name or argument.
        UnsupportedError: the name is taken.
    """
    call = f"register({kind!r}, {name!r})"
    for what, value in (("kind of layer", kind), ("name of an implementation", name)):
        if not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", value) is None:
            raise InputError(f"unusable {what}", where=call, expected="letters, digits and any of _ . + -")
    if name == "auto" or (kind, name) in _REGISTRY:
        raise UnsupportedError("this implementation name is taken", where=call)
    if unsupported is not None and not callable(unsupported):
        raise InputError("unsupported= is not a function", where=call, found=type(unsupported).__name__)
    for what, flag in (("capturable", capturable), ("batch_invariant", batch_invariant)):
        if not isinstance(flag, bool):
            raise InputError(f"{what}= is not a bool", where=call, found=type(flag).__name__)

    def decorate(factory: Factory) -> Factory:
        if not callable(factory):
            raise InputError("not a factory", where=call, expected="a function of the layer", found=type(factory).__name__)
        able = unsupported or (lambda layer, device: None)
        _REGISTRY[kind, name] = Implementation(kind, name, factory, able, capturable, batch_invariant)
        return factory

    return decorate


def implementation(kind: str, name: str) -> Implementation:
    """The registered implementation.

    Raises:
        UnsupportedError: there is none of this name. The error lists the known names.
    """
    try:
        return _REGISTRY[kind, name]
    except KeyError:
        known = ", ".join(sorted(n for k, n in _REGISTRY if k == kind)) or "none is registered for this kind"
        raise UnsupportedError(f"no implementation {name!r} for {kind} layers", expected=f"one of {known}") from None


def has_implementation(kind: str, name: str) -> bool:
    return (kind, name) in _REGISTRY


def checkpoint_names(prefix: str, parts: str, names: Mapping[str, str] | None = None) -> list[str]:
    """The checkpoint names of a layer's `parts`. `names`: those that differ from the parts' own."""
    return [f"{prefix}.{(names or {}).get(part, part)}" for part in parts.split()]


def triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    """The reason why no Triton implementation can run on `device`, or None. With Triton's interpreter, a CPU can."""
    absent = not isinstance(device, torch.device)  # then neither Triton nor the environment here say anything about it
    if not absent and not triton_installed():
        return "Triton is not installed (pip install triton)"
    on_gpu = is_gpu(device)
    if not absent and interpreting():
        return interpreter_unsupported(str(layer.context.dtype).removeprefix("torch."), on_gpu)
    if not on_gpu:
        return f"Triton has no {device.type} backend"
    if not is_nvidia(device):
        return "the Triton kernels are for NVIDIA GPUs, and this is an AMD GPU"
    major, minor = compute_capability(device)
    needed = {p.format.capability: f" for {p.format.name} weights" for p in layer.parameters() if p.format}
    lowest, why = max(needed.items(), default=(8.0, ""))
    if math.isinf(lowest):
        return f"there are no Triton kernels{why}"
    return None if major + minor / 10 >= lowest else f"compute capability {major}.{minor} is below {lowest}{why}"
