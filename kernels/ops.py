"""`torch.ops.minirt.*`: operations of the table as PyTorch custom ops, for `torch.compile`, `torch.export` and `FakeTensorMode`.

Importing this module registers the ops whose `Operation` has a schema. Each has four implementations:

- on a GPU the public function of the operation, without programmatic dependent launch (PDL), and with a workspace that lives as
  long as the launch, so that calls on several streams share nothing;
- on a CPU the reference of `minirt.kernels.reference`;
- for fake tensors the shapes and dtypes of the results;
- for autograd a refusal: minirt has no gradients, in reverse or in forward mode.

All check their arguments in the same way and name the wrong one. No op changes an argument that its schema does not mark, and no
result shares memory with an argument. `call` runs an operation directly where PyTorch does not trace.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from minirt.errors import InputError, UnsupportedError
from minirt.kernels import reference
from minirt.kernels.attention.checks import check_attention, check_decode, check_kv_write
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences
from minirt.kernels.checks import (
    check_activations,
    check_heads,
    check_linear,
    check_mixture,
    check_norm,
    check_qk_heads,
    check_tensor,
)
from minirt.kernels.launch import Workspace, capability, cdiv, require_fp8
from minirt.kernels.operations import OPERATIONS, Operation

NAMESPACE = "minirt"
WRITES_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # see `_declare_fallback`
LEAST = 80  # compute capability of the kernels, as `launch.capability` returns it


class Scratch(Workspace):
    """A workspace for a single launch, which asks once: it allocates just what is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, num_floats: int) -> None:
        """Nothing to do: each launch allocates."""

    def sums(self, need: int) -> Tensor:
        return torch.empty(need, dtype=torch.float32, device=self._device)

    def counters(self, need: int) -> Tensor:
        return torch.zeros(need, dtype=torch.int32, device=self._device)


class _Definition(NamedTuple):
    """What an op computes. All functions take the arguments of the schema as attributes of one object.

    Attributes:
        check: raises InputError or UnsupportedError, naming the wrong argument.
        empty: results of the right shapes and dtypes, with any values.
        reference: the results, by `minirt.kernels.reference`.
        additional: further arguments of the operation's function, by name.
    """

    check: Callable[[Any], None]
    empty: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    additional: Callable[[Any], dict[str, Any]] = lambda a: {}


class Implementations(NamedTuple):
    """An op's functions on real tensors, without the dispatcher, with the arguments of the schema.

    Attributes:
        names: of the schema's arguments.
        kernel: on a GPU; in Triton's interpreter also on a CPU.
        reference: on a CPU.
    """

    names: tuple[str, ...]
    kernel: Callable[..., Any]
    reference: Callable[..., Any]


def call(name: str, x: Tensor, *rest: Any) -> Any:
    """Run an operation: directly on plain tensors, else (while PyTorch compiles, exports or traces) as an op.

    Args:
        name: of the operation.
        x, rest: the first arguments of its schema, in its order.
    Raises:
        InputError, UnsupportedError: as `torch.ops.minirt.NAME`.
    """
    if traced(x):
        return getattr(torch.ops.minirt, name)(x, *rest)
    implementations = IMPLEMENTATIONS[name]
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        _refuse_gradients(zip(implementations.names, (x, *rest), strict=False))
    kind = x.device.type
    if kind == "cuda":
        return implementations.kernel(x, *rest)
    if kind == "cpu":
        return implementations.reference(x, *rest)
    raise InputError("unsupported device", where=implementations.names[0], expected="cuda or cpu", found=x.device)


def traced(x: Tensor) -> bool:
    """Whether PyTorch must see an operation on `x` as an op: while it compiles, exports, traces or transforms functions."""
    return bool(
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)  # such as fake tensors
        or torch._C._len_torch_dispatch_stack()  # a mode that must see every op
        or torch._C._functorch.maybe_current_level()  # vmap, grad, jvp …
        or torch._C._is_tracing()
    )


def _refuse_gradients(arguments: Iterable[tuple[str, Any]]) -> None:
    """Raise InputError if an argument needs a gradient. Forward mode computes one without the grad mode, too."""
    grad, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    parts = ((name, part) for name, argument in arguments for part in (argument if isinstance(argument, list) else (argument,)))
    for name, value in parts:
        if not isinstance(value, Tensor):
            continue
        if grad and value.requires_grad:
            hint = "minirt is for inference only: use torch.inference_mode() or torch.no_grad(), or requires_grad_(False)"
            raise InputError("needs a gradient", where=name, expected="requires_grad=False", hint=hint)
        if forward and forward_ad.unpack_dual(value).tangent is not None:
            what, hint = "needs a gradient (forward mode)", "minirt is for inference only: keep dual tensors away from it"
            raise InputError(what, where=name, expected="a tensor without a tangent", hint=hint)


# Each operation: its check, its empty results, its reference. `a`: the arguments of its schema.


def _check_embedding(a: Any) -> None:
    check_activations("table", a.table)
    check_tensor("tokens", a.tokens, (None,), torch.int64, a.table.device)


def _check_rms_norm(a: Any) -> None:
    check_activations("x", a.x)
    check_norm("weight", a.weight, a.x)


def _check_norm_residual(a: Any) -> None:
    check_activations("y", a.y)
    check_norm("weight", a.weight, a.y)
    check_tensor("residual", a.residual, tuple(a.y.shape), a.y.dtype, a.y.device)


def _check_quantize(a: Any) -> None:
    check_activations("x", a.x)
    require_fp8(a.x.device)


def _check_rms_norm_quantize(a: Any) -> None:
    _check_rms_norm(a)
    require_fp8(a.x.device)


def _empty_quantized(a: Any) -> tuple[Tensor, Tensor]:
    T, K = a.x.shape
    scale = (T, cdiv(K, reference.FP8_BLOCK)) if a.blocks else (T,)
    return a.x.new_empty((T, K), dtype=torch.float8_e4m3fn), a.x.new_empty(scale, dtype=torch.float32)


def _quantize(x: Tensor, a: Any) -> tuple[Tensor, Tensor]:
    if not x.shape[1]:  # a row without values has no largest one
        values, scale = _empty_quantized(a)
        return values, scale.fill_(1.0)
    values, scale = reference.quantize_fp8_blocks(x, x.shape[0]) if a.blocks else reference.quantize_fp8(x)
    return values.contiguous(), scale


def _check_linear(a: Any, activation: str | None = None, residual: Tensor | None = None) -> None:
    check_linear(a.x, a.weight, a.bias, residual, None, activation, a.scale)
    if a.scale is not None and a.scale.dtype == torch.float32:
        require_fp8(a.x.device)


def _check_norm_linear(a: Any, activation: str | None = None) -> None:
    _check_linear(a, activation)
    check_norm("norm_weight", a.norm_weight, a.x)


def _linear(a: Any, x: Tensor) -> Tensor:
    return reference.linear(x, a.weight, a.bias, a.scale)


def _normalized(x: Tensor, a: Any) -> Tensor:
    return x if a.norm_weight is None else reference.rms_norm(x, a.norm_weight, a.eps)


def _norm_rope(x: Tensor, a: Any, norm_weight: Tensor | None) -> Tensor:
    return torch.empty_like(x).copy_(reference.norm_rope(x, a.cos, a.sin, norm_weight, a.eps))


def _check_mixture_residual(a: Any) -> None:
    check_activations("h", a.h)
    check_tensor("logits", a.logits, (a.h.shape[0], None), a.h.dtype, a.h.device)
    check_mixture(
        a.h, a.logits.shape[1], a.gate_up, a.down, a.residual, a.top_k, a.activation, a.norm_weight, a.gate_up_scale,
        a.down_scale,
    )  # fmt: skip


def _mixture_residual(a: Any) -> Tensor:
    weights, experts = reference.route(a.logits, a.top_k, a.normalize)
    operands = a.gate_up, a.down, a.activation, a.gate_up_scale, a.down_scale
    return a.residual + reference.mixture(_normalized(a.h, a), weights, experts, *operands)


def _heads(a: Any) -> Tensor:
    return a.qkv.new_empty(a.qkv.shape[0], a.Nq, a.k_pages.shape[-1])


def _pages(a: Any) -> KVPages:
    return KVPages(a.k_pages, a.v_pages, a.k_scales, a.v_scales)


def _rope(a: Any) -> Rope:
    return Rope(a.cos_sin, a.q_norm, a.k_norm, a.eps)


def _check_kv_write(a: Any) -> None:
    check_kv_write(a.qkv, _rope(a), _pages(a), a.positions, a.slots, a.Nq, a.Nkv)


def _kv_write(a: Any, Nkv: int, positions: Tensor, slots: Tensor) -> Tensor:
    q, k, v = a.qkv.unflatten(1, (-1, a.k_pages.shape[-1])).split((a.Nq, Nkv, Nkv), 1)
    q = q if a.q_norm is None else reference.rms_norm(q, a.q_norm, a.eps)
    k = k if a.k_norm is None else reference.rms_norm(k, a.k_norm, a.eps)
    q, k = reference.rope(q, a.cos_sin[positions]), reference.rope(k, a.cos_sin[positions])
    stored = slots >= 0
    reference.write_kv(k[stored], a.k_pages, slots[stored], a.k_scales)
    reference.write_kv(v[stored], a.v_pages, slots[stored], a.v_scales)
    return q


def _attention_input(a: Any, heads: Tensor, out: Tensor, rope: Rope | None = None) -> AttentionInput:
    return AttentionInput(heads, _pages(a), Sequences(a.block_tables, a.seq_lens), Scores(a.scale), out, rope)


def _check_prefill(a: Any) -> None:
    check_attention(_attention_input(a, a.q, a.q))
    check_tensor("query_starts", a.query_starts, (a.seq_lens.shape[0] + 1,), torch.int32, a.q.device)


def _prefill(a: Any) -> Tensor:
    out, starts = torch.zeros_like(a.q), a.query_starts.tolist()
    if starts[-1]:
        new = [end - start for start, end in pairwise(starts)]
        rest = (a.block_tables, new, a.seq_lens.tolist(), a.scale, a.k_scales, a.v_scales)
        out[: starts[-1]] = reference.paged_attention(a.q[: starts[-1]], a.k_pages, a.v_pages, *rest)
    return out


def _decode(a: Any, q: Tensor) -> Tensor:
    out, some = torch.zeros_like(q), a.seq_lens > 0
    lens = a.seq_lens[some].tolist()
    if lens:
        rest = (a.block_tables[some], [1] * len(lens), lens, a.scale, a.k_scales, a.v_scales)
        out[some] = reference.paged_attention(q[some], a.k_pages, a.v_pages, *rest)
    return out


def _rope_decode(a: Any) -> Tensor:
    page_size, Nkv = a.k_pages.shape[1:3]
    at = (a.seq_lens.long() - 1).clamp(min=0)
    slots = a.block_tables.gather(1, at[:, None] // page_size).squeeze(1).long() * page_size + at % page_size
    return _decode(a, _kv_write(a, Nkv, at, torch.where(a.seq_lens > 0, slots, -1)))


def _splits(a: Any, out: Tensor) -> dict[str, Any]:
    """Further arguments of decode kernels. They do not depend on the lengths: a table holds no more tokens than its pages."""
    longest = a.block_tables.shape[1] * a.k_pages.shape[1]
    most = a.seq_lens.shape[0] * cdiv(longest, KV_SPLIT)
    ends = ((a.seq_lens + (KV_SPLIT - 1)) // KV_SPLIT).cumsum(0, dtype=torch.int32)
    return {
        "split_starts": torch.nn.functional.pad(ends, (1, 0)), "max_splits": most, "max_seq_len": longest,
        "workspace": Workspace(out.device, most * out.shape[1] * (out.shape[2] + 2), 0),  # two kernels share it
        "out": out.zero_(),  # rows of padding may not be written
    }  # fmt: skip


def _scratch(a: Any) -> dict[str, Any]:
    return {"workspace": Scratch(a.x.device)}


_DEFINITIONS = {
    "embedding": _Definition(
        _check_embedding, lambda a: a.table.new_empty(a.tokens.shape[0], a.table.shape[1]),
        lambda a: reference.embedding(a.tokens, a.table),
    ),
    "rms_norm": _Definition(
        _check_rms_norm, lambda a: a.x.new_empty(a.x.shape), lambda a: reference.rms_norm(a.x, a.weight, a.eps)
    ),
    "norm_residual": _Definition(
        _check_norm_residual, lambda a: torch.empty_like(a.y),
        lambda a: reference.norm_residual(a.y, a.weight, a.eps, a.residual),
    ),
    "rms_norm_quantize": _Definition(
        _check_rms_norm_quantize, _empty_quantized, lambda a: _quantize(reference.rms_norm(a.x, a.weight, a.eps), a)
    ),
    "quantize": _Definition(_check_quantize, _empty_quantized, lambda a: _quantize(a.x, a)),
    "norm_linear": _Definition(
        _check_norm_linear, lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[0]),
        lambda a: _linear(a, _normalized(a.x, a)), _scratch,
    ),
    "norm_gate_up": _Definition(
        lambda a: _check_norm_linear(a, a.activation), lambda a: a.x.new_empty(a.x.shape[0], a.weight.shape[0] // 2),
        lambda a: reference.gated(_linear(a, _normalized(a.x, a)), a.activation), _scratch,
    ),
    "linear_residual": _Definition(
        lambda a: _check_linear(a, residual=a.residual), lambda a: a.residual.new_empty(a.residual.shape),
        lambda a: a.residual + _linear(a, a.x), _scratch,
    ),
    "norm_rope": _Definition(
        lambda a: check_heads("x", a.x, a.cos, a.sin, "norm_weight", a.norm_weight), lambda a: torch.empty_like(a.x),
        lambda a: _norm_rope(a.x, a, a.norm_weight),
    ),
    "qk_norm_rope": _Definition(
        lambda a: check_qk_heads(a.q, a.k, a.cos, a.sin, a.q_norm, a.k_norm),
        lambda a: (torch.empty_like(a.q), torch.empty_like(a.k)),
        lambda a: (_norm_rope(a.q, a, a.q_norm), _norm_rope(a.k, a, a.k_norm)),
    ),
    "qk_norm_rope_kv_write": _Definition(_check_kv_write, _heads, lambda a: _kv_write(a, a.Nkv, a.positions, a.slots)),
    "paged_attention_prefill": _Definition(
        _check_prefill, lambda a: a.q.new_empty(a.q.shape), _prefill, lambda a: {"out": torch.zeros_like(a.q)}
    ),
    "paged_attention_decode": _Definition(
        lambda a: check_decode(_attention_input(a, a.q, a.q)), lambda a: a.q.new_empty(a.q.shape),
        lambda a: _decode(a, a.q), lambda a: _splits(a, torch.empty_like(a.q)),
    ),
    "rope_paged_attention_decode": _Definition(
        lambda a: check_decode(_attention_input(a, a.qkv, _heads(a), _rope(a)), a.Nq), _heads, _rope_decode,
        lambda a: _splits(a, _heads(a)),
    ),
    "mixture_residual": _Definition(
        _check_mixture_residual, lambda a: a.residual.new_empty(a.residual.shape), _mixture_residual
    ),
}  # fmt: skip


def _declare_fallback(op: Any) -> None:
    """Tell Inductor that an op has no lowering. Inductor is loaded when it asks for the op's shapes.

    It would detect that, but before PyTorch 2.13 it then formats the whole graph so far, which takes minutes in a model of 28
    layers (pytorch/pytorch#185951).
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if WRITES_GRAPHS and lowering is not None and op not in lowering.lowerings:
        strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
        lowering.make_fallback(op, layout_constraint=strides, warn=False)


def _register(operation: Operation, definition: _Definition) -> dict[str, Implementations]:
    """Define the op of an operation, and that of its packed form. Return their functions on real tensors."""

    @functools.cache
    def function() -> Callable[..., Any]:
        try:
            return operation.function  # imports Triton
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise UnsupportedError("Triton is not installed", where=operation.name, hint="pip install triton") from error

    check, additional = definition.check, definition.additional

    def kernel(a: Any) -> Any:
        check(a)
        values = vars(a)
        first = next(iter(values))
        device = values[first].device
        if capability(device) < LEAST:
            found = "an AMD GPU" if capability(device) == 0 else f"compute capability {capability(device) / 10}"
            expected = f"an NVIDIA GPU of compute capability {LEAST / 10} or later, or a CPU"
            raise UnsupportedError("no kernels for this device", where=first, expected=expected, found=found)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device
                return function()(**values, **additional(a), check=False)
        return function()(**values, **additional(a), check=False)

    def on_cpu(a: Any) -> Any:
        check(a)
        return definition.reference(a)

    def empty(a: Any) -> Any:
        check(a)
        return definition.empty(a)

    defined = {operation.name: _define(operation.name, str(operation.schema), kernel, on_cpu, empty)}
    if operation.name in _PACKED:
        schema = re.sub(r"Tensor\?? (weight|bias|scale)(=None)?", r"Tensor[] \1", str(operation.schema))
        name = f"packed_{operation.name}"
        defined[name] = _define(name, schema, kernel, on_cpu, empty)
    return defined


def _define(name: str, schema: str, *functions: Callable[[Any], Any]) -> Implementations:
    """Define an op: its functions on a GPU, on a CPU and for fake tensors, which take the arguments as one object."""
    qualified = f"{NAMESPACE}::{name}"
    # The strides of the arguments are those of the traced program: the kernels take contiguous tensors, and Inductor must not
    # choose others.
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    op = getattr(torch.ops.minirt, name).default
    parameters = op._schema.arguments
    names = tuple(parameter.name for parameter in parameters)
    arguments = type("Arguments", (), {parameter.name: parameter.default_value for parameter in parameters})
    written = {parameter.name for parameter in parameters if parameter.is_write}
    packed = any(isinstance(parameter.type, torch.ListType) for parameter in parameters)

    def of_schema(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if packed:
                args = tuple(_rows(arg) if isinstance(arg, list) else arg for arg in args)
            a = arguments()
            a.__dict__.update(zip(names, args), **options)  # noqa: B905  (strict takes time)
            return function(a)

        return run

    kernel, on_cpu, empty = map(of_schema, functions)

    def fake(*args: Any, **options: Any) -> Any:
        _declare_fallback(op)
        return empty(*args, **options)

    def autograd(*args: Any, **options: Any) -> Any:
        values = dict(zip(names, args, strict=False)) | options
        _refuse_gradients(values.items())
        for name in written:
            if values.get(name) is not None:  # else a backward pass would take the new values for those that it needs
                torch.autograd.graph.increment_version(values[name])
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **options)

    torch.library.impl(qualified, "cuda", kernel)
    torch.library.impl(qualified, "cpu", on_cpu)
    torch.library.register_fake(qualified, fake)
    torch.library.impl(qualified, "Autograd", autograd)
    return Implementations(names, kernel, on_cpu)


# Operations that have an op `packed_NAME` as well: its `weight`, `bias` and `scale` are those of several linears, whose rows are
# multiplied together. A graph with it always computes what the parameters hold, wherever they lie.
_PACKED = ("norm_linear", "norm_gate_up")


def _rows(parts: list[Tensor]) -> Tensor | None:
    """All rows of the parts: without a copy if they lie one after the other in one storage. None: there are no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    first = parts[0]
    for part in parts[1:]:
        check_tensor("weight", part.contiguous(), (None, *first.shape[1:]), first.dtype, first.device)
    if type(first) in (Tensor, torch.nn.Parameter) and all(
        second.data_ptr() == part.data_ptr() + part.nbytes and part.is_contiguous() for part, second in pairwise(parts)
    ):
        size = (sum(part.shape[0] for part in parts), *first.shape[1:])
        end = first.data_ptr() - first.untyped_storage().data_ptr() + sum(part.nbytes for part in parts)
        if parts[-1].is_contiguous() and end <= first.untyped_storage().nbytes():
            return first.as_strided(size, first.stride())
    return torch.cat(parts)


IMPLEMENTATIONS = {
    name: implementation
    for operation, definition in _DEFINITIONS.items()
    for name, implementation in _register(OPERATIONS[operation], definition).items()
}
