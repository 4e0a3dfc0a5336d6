"""`torch.ops.minirt.*`: operations of the table as PyTorch custom ops, for `torch.compile`, `torch.export` and `FakeTensorMode`.

Importing this module registers the ops whose `Operation` has a schema. Each has four implementations:

- on a GPU the public function of the operation, that is the Triton kernels, without programmatic dependent launch (PDL), and with
  a workspace that lives as long as the launch, so that calls on several streams share nothing;
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
    """What an op computes. All functions take the arguments of the schema.

    Attributes:
        check: raises InputError or UnsupportedError, naming the wrong argument.
        empty: results of the right shapes and dtypes, with any values.
        reference: the results, by `minirt.kernels.reference`.
        more: what the operation's function takes besides, by name.
    """

    check: Callable[..., None]
    empty: Callable[..., Any]
    reference: Callable[..., Any]
    more: Callable[..., dict[str, Any]] = lambda *args, **options: {}


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
    own = IMPLEMENTATIONS[name]
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        _refuse_gradients(zip(own.names, (x, *rest), strict=False))
    kind = x.device.type
    if kind == "cuda":
        return own.kernel(x, *rest)
    if kind == "cpu":
        return own.reference(x, *rest)
    raise InputError("unsupported device", where=own.names[0], expected="cuda or cpu", found=x.device)


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
    for name, value in ((name, own) for name, given in arguments for own in (given if isinstance(given, list) else (given,))):
        if not isinstance(value, Tensor):
            continue
        if grad and value.requires_grad:
            hint = "minirt is for inference only: use torch.inference_mode() or torch.no_grad(), or requires_grad_(False)"
            raise InputError("needs a gradient", where=name, expected="requires_grad=False", hint=hint)
        if forward and forward_ad.unpack_dual(value).tangent is not None:
            what, hint = "needs a gradient (forward mode)", "minirt is for inference only: keep dual tensors away from it"
            raise InputError(what, where=name, expected="a tensor without a tangent", hint=hint)


# Each operation: its check, its empty results, its reference.


def _check_embedding(tokens: Tensor, table: Tensor) -> None:
    check_activations("table", table)
    check_tensor("tokens", tokens, (None,), torch.int64, table.device)


def _empty_embedding(tokens: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(tokens.shape[0], table.shape[1])


def _check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    check_activations("x", x)
    check_norm("weight", weight, x)


def _empty_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _check_norm_residual(y: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
    check_activations("y", y)
    check_norm("weight", weight, y)
    check_tensor("residual", residual, tuple(y.shape), y.dtype, y.device)


def _empty_quantized(x: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    T, K = x.shape
    scale = (T, cdiv(K, reference.FP8_BLOCK)) if blocks else (T,)
    return x.new_empty((T, K), dtype=torch.float8_e4m3fn), x.new_empty(scale, dtype=torch.float32)


def _check_quantize(x: Tensor, *, blocks: bool = False) -> None:
    check_activations("x", x)
    require_fp8(x.device)


def _quantize(x: Tensor, *, blocks: bool = False) -> tuple[Tensor, Tensor]:
    if not x.shape[1]:  # a row without values has no largest one
        values, scale = _empty_quantized(x, blocks)
        return values, scale.fill_(1.0)
    values, scale = reference.quantize_fp8_blocks(x, x.shape[0]) if blocks else reference.quantize_fp8(x)
    return values.contiguous(), scale


def _check_rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, *, blocks: bool = False) -> None:
    _check_rms_norm(x, weight, eps)
    require_fp8(x.device)


def _rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, *, blocks: bool = False) -> tuple[Tensor, Tensor]:
    return _quantize(reference.rms_norm(x, weight, eps), blocks=blocks)


def _check_norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> None:
    check_linear(x, weight, bias, None, None, None, scale)
    check_norm("norm_weight", norm_weight, x)
    _check_fp8(scale, x)


def _check_fp8(scale: Tensor | None, x: Tensor) -> None:
    if scale is not None and scale.dtype == torch.float32:
        require_fp8(x.device)


def _empty_norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    h = x if norm_weight is None else reference.rms_norm(x, norm_weight, eps)
    return reference.linear(h, weight, bias, scale)


def _check_norm_gate_up(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, activation: str, bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    check_linear(x, weight, bias, None, None, activation, scale)
    check_norm("norm_weight", norm_weight, x)
    _check_fp8(scale, x)


def _empty_norm_gate_up(x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


def _norm_gate_up(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, activation: str, bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return reference.gated(_norm_linear(x, norm_weight, eps, weight, bias, scale), activation)


def _check_linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> None:
    check_linear(x, weight, bias, residual, None, None, scale)
    _check_fp8(scale, x)


def _empty_linear_residual(x: Tensor, weight: Tensor, residual: Tensor, *rest: Any) -> Tensor:
    return residual.new_empty(residual.shape)


def _linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    return residual + reference.linear(x, weight, bias, scale)


def _check_norm_rope(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> None:
    check_heads("x", x, cos, sin, "norm_weight", norm_weight)


def _empty_norm_rope(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _norm_rope(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return torch.empty_like(x).copy_(reference.norm_rope(x, cos, sin, norm_weight, eps))


def _check_qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:  # fmt: skip
    check_qk_heads(q, k, cos, sin, q_norm, k_norm)


def _empty_qk_norm_rope(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _norm_rope(q, cos, sin, q_norm, eps), _norm_rope(k, cos, sin, k_norm, eps)


def _check_mixture_residual(
    h: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor, top_k: int, normalize: bool, activation: str,
    norm_weight: Tensor | None = None, eps: float = 0.0, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> None:  # fmt: skip
    check_activations("h", h)
    check_tensor("logits", logits, (h.shape[0], None), h.dtype, h.device)
    E = logits.shape[1]
    check_mixture(h, E, gate_up, down, residual, top_k, activation, norm_weight, gate_up_scale, down_scale)


def _empty_mixture_residual(
    h: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor, *rest: Any
) -> Tensor:
    return residual.new_empty(residual.shape)


def _mixture_residual(
    h: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor, top_k: int, normalize: bool, activation: str,
    norm_weight: Tensor | None = None, eps: float = 0.0, gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    h = h if norm_weight is None else reference.rms_norm(h, norm_weight, eps)
    weights, experts = reference.route(logits, top_k, normalize)
    return residual + reference.mixture(h, weights, experts, gate_up, down, activation, gate_up_scale, down_scale)


def _heads_of(qkv: Tensor, Nq: int, D: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], Nq, D)


def _check_kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, Nq: int, Nkv: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    pages = KVPages(k_pages, v_pages, k_scales, v_scales)
    check_kv_write(qkv, Rope(cos_sin, q_norm, k_norm, eps), pages, positions, slots, Nq, Nkv)


def _empty_kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, Nq: int,
    *rest: Any, **_: Any,
) -> Tensor:  # fmt: skip
    return _heads_of(qkv, Nq, k_pages.shape[-1])


def _kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, Nq: int, Nkv: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = qkv.unflatten(1, (-1, k_pages.shape[-1])).split((Nq, Nkv, Nkv), 1)
    q = q if q_norm is None else reference.rms_norm(q, q_norm, eps)
    k = k if k_norm is None else reference.rms_norm(k, k_norm, eps)
    q, k = reference.rope(q, cos_sin[positions]), reference.rope(k, cos_sin[positions])
    kept = slots >= 0
    reference.write_kv(k[kept], k_pages, slots[kept], k_scales)
    reference.write_kv(v[kept], v_pages, slots[kept], v_scales)
    return q


def _check_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    pages, sequences = KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens)
    check_attention(AttentionInput(q, pages, sequences, Scores(scale), q))
    check_tensor("query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32, q.device)


def _empty_q(q: Tensor, *rest: Any, **_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out, starts = torch.zeros_like(q), query_starts.tolist()
    if starts[-1]:
        new = [end - start for start, end in pairwise(starts)]
        rest = (block_tables, new, seq_lens.tolist(), scale, k_scales, v_scales)
        out[: starts[-1]] = reference.paged_attention(q[: starts[-1]], k_pages, v_pages, *rest)
    return out


def _check_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    pages, sequences = KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens)
    check_decode(AttentionInput(q, pages, sequences, Scores(scale), q))


def _decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out, some = torch.zeros_like(q), seq_lens > 0
    lens = seq_lens[some].tolist()
    if lens:
        rest = (block_tables[some], [1] * len(lens), lens, scale, k_scales, v_scales)
        out[some] = reference.paged_attention(q[some], k_pages, v_pages, *rest)
    return out


def _splits(out: Tensor, k_pages: Tensor, block_tables: Tensor, seq_lens: Tensor) -> dict[str, Any]:
    """What decode kernels take besides, without a look at the lengths: a table holds no more tokens than its pages."""
    longest = block_tables.shape[1] * k_pages.shape[1]
    most = seq_lens.shape[0] * cdiv(longest, KV_SPLIT)
    ends = ((seq_lens + (KV_SPLIT - 1)) // KV_SPLIT).cumsum(0, dtype=torch.int32)
    return {
        "split_starts": torch.nn.functional.pad(ends, (1, 0)),
        "max_splits": most,
        "max_seq_len": longest,
        "workspace": Workspace(out.device, most * out.shape[1] * (out.shape[2] + 2), 0),  # two kernels share it
        "out": out.zero_(),  # rows of padding may not be written
    }


def _check_rope_decode(
    qkv: Tensor, cos_sin: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    Nq: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    pages, sequences = KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens)
    out, rope = _heads_of(qkv, Nq, k_pages.shape[-1]), Rope(cos_sin, q_norm, k_norm, eps)
    check_decode(AttentionInput(qkv, pages, sequences, Scores(scale), out, rope), Nq)


def _empty_rope_decode(
    qkv: Tensor, cos_sin: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    Nq: int, *rest: Any, **_: Any,
) -> Tensor:  # fmt: skip
    return _heads_of(qkv, Nq, k_pages.shape[-1])


def _rope_decode(
    qkv: Tensor, cos_sin: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float,
    Nq: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    scales, page_size, Nkv = {"k_scales": k_scales, "v_scales": v_scales}, k_pages.shape[1], k_pages.shape[2]
    at = (seq_lens.long() - 1).clamp(min=0)
    slots = block_tables.gather(1, at[:, None] // page_size).squeeze(1).long() * page_size + at % page_size
    slots = torch.where(seq_lens > 0, slots, -1)
    q = _kv_write(qkv, cos_sin, at, slots, k_pages, v_pages, Nq, Nkv, q_norm, k_norm, eps, **scales)
    return _decode(q, k_pages, v_pages, block_tables, seq_lens, scale, **scales)


def _scratch(x: Tensor, *rest: Any, **_: Any) -> dict[str, Any]:
    return {"workspace": Scratch(x.device)}


_DEFINITIONS = {
    "embedding": _Definition(_check_embedding, _empty_embedding, reference.embedding),
    "rms_norm": _Definition(_check_rms_norm, _empty_rms_norm, reference.rms_norm),
    "norm_residual": _Definition(
        _check_norm_residual, lambda y, weight, eps, residual: torch.empty_like(y), reference.norm_residual
    ),
    "rms_norm_quantize": _Definition(
        _check_rms_norm_quantize, lambda x, weight, eps, *, blocks=False: _empty_quantized(x, blocks), _rms_norm_quantize
    ),
    "quantize": _Definition(_check_quantize, lambda x, *, blocks=False: _empty_quantized(x, blocks), _quantize),
    "norm_linear": _Definition(_check_norm_linear, _empty_norm_linear, _norm_linear, _scratch),
    "norm_gate_up": _Definition(_check_norm_gate_up, _empty_norm_gate_up, _norm_gate_up, _scratch),
    "linear_residual": _Definition(_check_linear_residual, _empty_linear_residual, _linear_residual, _scratch),
    "norm_rope": _Definition(_check_norm_rope, _empty_norm_rope, _norm_rope),
    "qk_norm_rope": _Definition(_check_qk_norm_rope, _empty_qk_norm_rope, _qk_norm_rope),
    "qk_norm_rope_kv_write": _Definition(_check_kv_write, _empty_kv_write, _kv_write),
    "paged_attention_prefill": _Definition(
        _check_prefill, _empty_q, _prefill, lambda q, *rest, **_: {"out": torch.zeros_like(q)}
    ),
    "paged_attention_decode": _Definition(
        _check_decode, _empty_q, _decode, lambda q, k, v, tables, lens, *_, **__: _splits(_empty_q(q), k, tables, lens)
    ),
    "rope_paged_attention_decode": _Definition(
        _check_rope_decode, _empty_rope_decode, _rope_decode,
        lambda *args, **__: _splits(_empty_rope_decode(*args), args[2], args[4], args[5]),
    ),
    "mixture_residual": _Definition(_check_mixture_residual, _empty_mixture_residual, _mixture_residual),
}


def _declare_fallback(op: Any) -> None:
    """Tell Inductor that an op has no lowering. Inductor is loaded when it asks for the op's shapes.

    It finds that out by itself. But before PyTorch 2.13 it then writes the whole graph so far, as text that nobody reads: many
    minutes for the norm after the last of 28 layers (pytorch/pytorch#185951).
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if WRITES_GRAPHS and lowering is not None and op not in lowering.lowerings:
        strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
        lowering.make_fallback(op, layout_constraint=strides, warn=False)


def _register(operation: Operation, own: _Definition) -> dict[str, Implementations]:
    """Define the op of an operation, and that of its packed form. Return their functions on real tensors."""

    @functools.cache
    def function() -> Callable[..., Any]:
        try:
            return operation.function  # imports Triton
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise UnsupportedError("Triton is not installed", where=operation.name, hint="pip install triton") from error

    def kernel(*args: Any, **options: Any) -> Any:
        own.check(*args, **options)
        device, first = args[0].device, defined[operation.name].names[0]
        if capability(device) < LEAST:
            found = "an AMD GPU" if capability(device) == 0 else f"compute capability {capability(device) / 10}"
            expected = f"an NVIDIA GPU of compute capability {LEAST / 10} or later, or a CPU"
            raise UnsupportedError("no kernels for this device", where=first, expected=expected, found=found)
        given = dict(zip(defined[operation.name].names, args, strict=False)) | options | own.more(*args, **options)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device
                return function()(**given, check=False)
        return function()(**given, check=False)

    def on_cpu(*args: Any, **options: Any) -> Any:
        own.check(*args, **options)
        return own.reference(*args, **options)

    def empty(*args: Any, **options: Any) -> Any:
        own.check(*args, **options)
        return own.empty(*args, **options)

    defined = {operation.name: _define(operation.name, str(operation.schema), kernel, on_cpu, empty)}
    if operation.name in _PACKED:
        schema = re.sub(r"Tensor\?? (weight|bias|scale)(=None)?", r"Tensor[] \1", str(operation.schema))
        name = f"packed_{operation.name}"
        defined[name] = _define(name, schema, _of_parts(kernel), _of_parts(on_cpu), _of_parts(empty))
    return defined


def _define(
    name: str, schema: str, kernel: Callable[..., Any], on_cpu: Callable[..., Any], empty: Callable[..., Any]
) -> Implementations:
    """Define an op: its functions on a GPU, on a CPU and for fake tensors."""
    qualified = f"{NAMESPACE}::{name}"
    # The strides of the arguments are those of the traced program: the kernels take contiguous tensors, and Inductor must not
    # choose others.
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    op = getattr(torch.ops.minirt, name).default
    names = tuple(argument.name for argument in op._schema.arguments)
    written = {argument.name for argument in op._schema.arguments if argument.is_write}

    def fake(*args: Any, **options: Any) -> Any:
        _declare_fallback(op)
        return empty(*args, **options)

    def autograd(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        _refuse_gradients(given.items())
        for name in written:
            if given.get(name) is not None:  # else a backward pass would take the new values for those that it needs
                torch.autograd.graph.increment_version(given[name])
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


def _of_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    def joined(*args: Any) -> Any:
        return function(*(_rows(own) if isinstance(own, list) else own for own in args))

    return joined


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
    for operation, own in _DEFINITIONS.items()
    for name, implementation in _register(OPERATIONS[operation], own).items()
}
