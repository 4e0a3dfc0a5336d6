"""`RULES`: one for each kind of module: which classes, what replaces their forward, and when it cannot.

The classes of all families differ only in their prefix: `LlamaAttention`, `Qwen3Attention`. A rule looks at a module and returns
a record, which the module keeps as `_minirt`, or the reason why the module is left alone.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minirt.device import compute_capability, is_nvidia, triton_installed
from minirt.kernels.activations import OF_CLASS
from minirt.kernels.checks import DTYPES
from minirt.modeling.formats import FP8
from minirt.patching import forwards
from minirt.patching.weights import Weights

# The folder below `transformers.models`, and the prefix of its classes.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
PARTS = ("norms", "attention", "rope", "mlp")

# transformers' own hooks read only outputs that a patched module still has.
_RECORDING = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class Options:
    """What `patch` was asked for, the ids of parameters that several modules share, and whether the module is patched already."""

    fp8: bool
    keep_original: bool
    parts: tuple[str, ...]
    shared: frozenset[int] = frozenset()
    patched: bool = False


@dataclass
class Record:
    """What a patched module's forward reads: how it was when `patch` or a later call looked at it.

    Attributes:
        how: what computes the module now, for the table.
        linears: the linears of each product, by their names; `weights` has the same for the forward.
        watched: (module, name) of each submodule that is not called as usual, because the kernels compute it.
        covers: submodules that have no row in the table.
        dtype: that of the weights; None: they are FP8.
        activation: of an MLP. `cache`: the name of the cache's argument, "cache", or until transformers 5.23 "past_key_values".
    """

    how: str
    linears: tuple[dict[str, nn.Linear], ...] = ()
    watched: tuple[tuple[nn.Module, str], ...] = ()
    covers: tuple[nn.Module, ...] = ()
    weights: tuple[Weights, ...] = ()
    dtype: torch.dtype | None = None
    activation: str = ""
    cache: str = ""


@dataclass(kw_only=True)
class AttentionRecord(Record):
    """Attributes:
    rotate: QK-norm and rotary embedding: (module, q, k, cos, sin) → q, k.
    interface: from the config to transformers' attention function.
    options: its arguments that differ between families.
    """

    rotate: Callable[..., tuple[Tensor, Tensor]]
    interface: Callable[[Any], Callable[..., Any]]
    options: Callable[[Any], dict[str, Any]]


@dataclass(kw_only=True)
class LayerRecord(Record):
    """Attributes:
    attention, mlp: whether the norm before it and the residual after it are computed with its products.
    """

    attention: bool
    mlp: bool


class Patched:
    """What a patched module keeps as `_minirt`: its record, which is made again when the module has changed.

    A copy or a pickle of the module has no record until its first call.

    Attributes:
        originals: the weights from before FP8 by the names of their linears; None: they were not kept.
    """

    def __init__(self, module: nn.Module, name: str, options: Options, originals: dict[str, Tensor | None] | None = None) -> None:
        self.module, self.name, self.options = module, name, replace(options, shared=frozenset(), patched=True)
        self.originals = {} if originals is None else originals
        self.record: Any = None
        self.watched: list[tuple[Any, ...]] = []  # `_seen` of each submodule, after its parent's dict of modules and its name
        self.forwards = {type(module): type(module).forward}  # of this class and the submodules' classes
        self._rule = rule_of(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return Patched, (self.module, self.name, self.options, self.originals)

    def is_current(self) -> bool:
        """Whether the module is as the record describes it: the same submodules, and no new hooks or forward functions."""
        for kind, forward in self.forwards.items():
            if kind.forward is not forward:
                return False
        for modules, name, part, kind, forward, hooks in self.watched:
            attributes = part.__dict__
            if modules.get(name) is not part or part.__class__ is not kind or attributes.get("forward") is not forward:
                return False
            if (hooks or attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]) and _hooks(attributes) != hooks:
                return False
        return self.record is not None

    def is_called(self) -> bool:
        """Whether the module's forward is still that of `patch`."""
        return self._rule is not None and getattr(vars(self.module).get("forward"), "func", None) is self._rule.forward

    @torch.compiler.assume_constant_result  # `torch.compile` runs it while it traces
    def renew(self) -> str | None:
        """Make the record again if the module has changed. Returns why the kernels cannot compute it any more, or None."""
        if not self.is_current():
            for kind, forward in self.forwards.items():
                if kind.forward is not forward:
                    return f"another library has replaced the forward of {kind.__name__}"
            record = self._rule.prepare(self.module, self.options) if self._rule else "its class has changed"
            if isinstance(record, str):
                return record
            self.use(record)
        if not torch.compiler.is_exporting():  # an export replaces the parameters by fake ones
            for weights in self.record.weights:
                weights.pack()
        return None

    def use(self, record: Record) -> None:
        record.weights = tuple(Weights(product, self.options.fp8) for product in record.linears)
        self.record = record
        self.watched = [(parent._modules, name, *_seen(parent._modules[name])) for parent, name in record.watched]
        self.forwards |= {kind: kind.forward for _, _, _, kind, *_ in self.watched if kind not in self.forwards}


def _seen(part: Any) -> tuple[Any, ...]:
    return part, type(part), vars(part).get("forward"), _hooks(vars(part))


def _hooks(attributes: dict[str, Any]) -> tuple[int, ...]:
    return *attributes["_forward_hooks"], *attributes["_forward_pre_hooks"]


@dataclass(frozen=True)
class Rule:
    """Attributes:
    kind: the name of the class without the family's prefix.
    part: the part of `PARTS` that it belongs to.
    arguments: of the class's `forward`; "cache" may be called "past_key_values". In a version of transformers with others, the
        module is left alone.
    prepare: (module, options) → a record, or the reason why the module is left alone.
    forward: what replaces the module's `forward`.
    """

    kind: str
    part: str
    arguments: str
    prepare: Callable[[Any, Options], Record | str]
    forward: Callable[..., Any]

    def record(self, module: nn.Module, options: Options) -> Record | str:
        """The record of a module of this kind, or the reason why it is left alone."""
        if self.part not in options.parts:
            return f"parts has no {self.part!r}"
        if "forward" in vars(module):
            return "another library has replaced its forward"
        arguments = " ".join(_arguments(module))
        if arguments.replace("past_key_values", "cache") != self.arguments:
            version = getattr(sys.modules.get("transformers"), "__version__", "unknown")
            return f"its forward in transformers {version} has other arguments: {arguments}"
        return self.prepare(module, options)


def rule_of(module: nn.Module) -> Rule | None:
    """The rule for a module's class, or None."""
    return _CLASSES.get(f"{type(module).__module__}.{type(module).__name__}")


def family_of(module: nn.Module) -> str:
    """The folder of the module's class below `transformers.models`."""
    return type(module).__module__.split(".")[2]


def _norm(module: Any, options: Options) -> Record | str:
    return _weight_fault("weight", module.weight, options) or Record("RMSNorm kernel")


def _mlp(module: Any, options: Options) -> Record | str:
    products = _named(module, "gate_proj", "up_proj"), _named(module, "down_proj")
    if fault := _linears_fault(products, options):
        return fault
    if (activation := _activation(module)) is None:
        return f"no kernel computes its activation {type(module.act_fn).__name__}"
    how = f"gate and up packed, {activation} in the same kernel{_fp8(options)}"
    watched = _watched(module, "gate_proj", "up_proj", "down_proj", "act_fn")
    return Record(how, products, watched, activation=activation, dtype=_dtype(module.gate_proj))


def _attention(module: Any, options: Options) -> Record | str:
    products = _named(module, "q_proj", "k_proj", "v_proj"), _named(module, "o_proj")
    if fault := _linears_fault(products, options):
        return fault
    fused, normed = "rope" in options.parts, family_of(module).startswith("qwen3")
    if fused and normed:
        q, k = module.q_norm, module.k_norm
        same = all(_dtype(module.q_proj) in (None, norm.weight.dtype) for norm in (q, k) if rule_of(norm) is RULES[0])
        if not same or {rule_of(q), rule_of(k)} != {RULES[0]} or _hooked(q) or _hooked(k):
            return "q_norm and k_norm are no norms of this model, have hooks, or another dtype than the weights"
    source = vars(sys.modules[type(module).__module__])
    interfaces, eager = source["ALL_ATTENTION_FUNCTIONS"], source["eager_attention_forward"]

    covers = (module.q_norm, module.k_norm) if fused and normed else ()
    rope = ", q_norm, k_norm and rope in one kernel" if covers else ", rope kernel" if fused else ""
    rotate = forwards.norm_rotate if normed else forwards.rotate
    watched = _watched(module, "q_proj", "k_proj", "v_proj", "o_proj", *(("q_norm", "k_norm") if covers else ()))
    return AttentionRecord(
        f"q, k and v packed{rope}{_fp8(options)}; the attention itself is transformers'", products, watched, covers,
        cache=_cache(module), dtype=_dtype(module.q_proj), options=_window(family_of(module)),
        interface=lambda config: interfaces.get_interface(config._attn_implementation, eager),
        rotate=rotate if fused else _rotate_as(source["apply_rotary_pos_emb"], normed),
    )  # fmt: skip


def _activation(module: Any) -> str | None:
    """What the kernels call a module's activation; None: they have none like it."""
    return None if _replaced(module.act_fn) else OF_CLASS.get(type(module.act_fn).__name__)


def _arguments(module: nn.Module) -> list[str]:
    """The names of the arguments of the class's `forward`."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _cache(module: nn.Module) -> str:
    return "cache" if "cache" in _arguments(module) else "past_key_values"


def _window(family: str) -> Callable[[Any], dict[str, Any]]:
    """How a family's attention gets its sliding window."""
    if family == "mistral":
        return lambda module: {"sliding_window": getattr(module.config, "sliding_window", None)}
    return lambda module: {} if family == "llama" else {"sliding_window": module.sliding_window}


def _rotate_as(apply_rotary: Callable[..., Any], normed: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """transformers' own QK-norm and rotary embedding."""

    def rotate(module: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if normed:
            q, k = module.q_norm(q), module.k_norm(k)
        return apply_rotary(q, k, cos, sin)

    return rotate


def _mixture(module: Any, options: Options) -> Record | str:
    experts = module.experts
    if type(experts).__name__ != type(module).__name__.replace("SparseMoeBlock", "Experts") or _replaced(experts):
        return f"its experts are {type(experts).__name__}, or have hooks or another forward"
    if not type(module.gate).__name__.endswith("TopKRouter") or _replaced(module.gate):
        return f"its router is {type(module.gate).__name__}, or has hooks or another forward"
    for name in ("gate_up_proj", "down_proj"):
        if fault := _weight_fault(f"experts.{name}", getattr(experts, name), options):
            return fault
    if (activation := _activation(experts)) is None:
        return f"no kernel computes its activation {type(experts.act_fn).__name__}"
    how = "experts in fused kernels" + (", not in FP8" if options.fp8 else "")
    watched = (*_watched(module, "experts", "gate"), *_watched(experts, "act_fn"))
    return Record(how, watched=watched, covers=(experts,), activation=activation, dtype=experts.gate_up_proj.dtype)


def _layer(module: Any, options: Options) -> Record | str:
    halves = {"attention": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")}
    fused = {}
    for half, names in halves.items():
        norm, inner = (getattr(module, name) for name in names)
        fused[half] = all(_runs_kernels(part) and not _hooked(part) for part in (norm, inner))
        fused[half] = fused[half] and inner._minirt.record.dtype in (None, norm.weight.dtype)
    if not any(fused.values()) and not options.patched:
        return "neither its attention nor its MLP is replaced together with the norm before it, or they have hooks"
    watched = _watched(module, *halves["attention"], *halves["mlp"])
    covers = tuple(getattr(module, halves[half][0]) for half in halves if fused[half])
    together = " and ".join(half for half in halves if fused[half])
    how = f"with the products' kernels: norm and residual of {together}"
    return LayerRecord(how, (), watched, covers, cache=_cache(module), attention=fused["attention"], mlp=fused["mlp"])


_LAYER_ARGUMENTS = "hidden_states attention_mask position_ids cache use_cache position_embeddings kwargs"
RULES = (
    Rule("RMSNorm", "norms", "hidden_states", _norm, forwards.rms_norm),
    Rule("MLP", "mlp", "x", _mlp, forwards.mlp),
    Rule("SparseMoeBlock", "mlp", "hidden_states", _mixture, forwards.mixture),
    Rule(
        "Attention", "attention", "hidden_states position_embeddings attention_mask cache kwargs", _attention, forwards.attention,
    ),
    Rule("DecoderLayer", "norms", _LAYER_ARGUMENTS, _layer, forwards.decoder_layer),
)  # fmt: skip
_CLASSES = {
    f"transformers.models.{folder}.modeling_{folder}.{prefix}{rule.kind}": rule for folder, prefix in FAMILIES.items()
    for rule in RULES
}  # fmt: skip


def _watched(module: nn.Module, *names: str) -> tuple[tuple[nn.Module, str], ...]:
    return tuple((module, name) for name in names)


def _runs_kernels(module: nn.Module) -> bool:
    """Whether a module is patched, and its forward is still that of `patch`."""
    patched = vars(module).get("_minirt")
    return patched is not None and patched.is_called() and patched.renew() is None


def _dtype(linear: Any) -> torch.dtype | None:
    return None if linear.weight.dtype == FP8 else linear.weight.dtype


def _fp8(options: Options) -> str:
    return ", FP8 weights" if options.fp8 else ""


def _hooked(module: nn.Module) -> bool:
    """Whether hooks expect that the module is called, or its usual input and output."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(getattr(hook, "__module__", "") != _RECORDING for hooks in kinds for hook in hooks.values())


def _replaced(module: nn.Module) -> bool:
    """Whether a call of a module does something else than its class's forward."""
    return "forward" in vars(module) or _hooked(module)


def _named(module: nn.Module, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def _linears_fault(products: Sequence[dict[str, Any]], options: Options) -> str | None:
    """Why the linears of these products cannot be computed by kernels, or None."""
    first = next(iter(products[0].values()))
    for linears in products:
        for name, linear in linears.items():
            if type(linear) is not nn.Linear:
                return f"{name} is {type(linear).__name__}, not torch.nn.Linear"
            if _replaced(linear):
                return f"{name} has hooks, or another library has replaced its forward"
            for what in ("weight", "bias"):
                dtypes = (FP8,) if what == "weight" and options.fp8 and options.patched else DTYPES
                tensor = getattr(linear, what)
                if tensor is not None and (fault := _weight_fault(f"{name}.{what}", tensor, options, dtypes)):
                    return fault
            if (linear.weight.dtype, linear.weight.device) != (first.weight.dtype, first.weight.device):
                return f"{name} has another dtype or device than the other weights"
        if len({linear.bias is None for linear in linears.values()}) > 1:
            return f"only some of {', '.join(linears)} have a bias"
    return None


def _weight_fault(name: str, weight: Any, options: Options, dtypes: Sequence[torch.dtype] = DTYPES) -> str | None:
    if torch.compiler.is_exporting() and options.patched:
        return "call the model once after the change, then export it"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"{name} is {type(getattr(weight, 'data', weight)).__name__}, not a plain tensor"
    if id(weight) in options.shared:
        return f"{name} is shared by several modules"
    if weight.dtype not in dtypes:
        return f"{name} is {weight.dtype}, not {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
    return _device_fault(weight.device, options.fp8)


def _device_fault(device: torch.device, fp8: bool) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda" or not is_nvidia(device):
        return f"its weights are on {device}: the kernels are for NVIDIA GPUs, and run as PyTorch code on a CPU"
    if not triton_installed():
        return "Triton is not installed (pip install triton)"
    lowest, (major, minor) = (8, 9) if fp8 else (8, 0), compute_capability(device)
    return None if (major, minor) >= lowest else f"compute capability {major}.{minor} is below {lowest[0]}.{lowest[1]}"
