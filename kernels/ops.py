"""`torch.ops.minirt.*`: operations of the table as PyTorch custom ops, for `torch.compile`, `torch.export` and `FakeTensorMode`.

Importing this module registers an op for each operation that does not say why it has none. Each has four implementations:

- on a GPU the public function of the operation, without programmatic dependent launch (PDL), and with a workspace that lives as
  long as the launch, so that calls on several streams share nothing;
- on a CPU the reference of the declaration;
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
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.checks import Values, check_tensor, checker, compiled_axis, compiled_dtypes, size
from minirt.kernels.launch import Workspace, capability, cdiv
from minirt.kernels.operations import OPERATIONS, Operation

NAMESPACE = "minirt"
WRITES_GRAPHS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # see `_declare_fallback`
LEAST = 80  # compute capability of the kernels, as `launch.capability` returns it


class Scratch(Workspace):
    """A workspace for a single launch, which asks once: it allocates just what is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.invariant = device, False

    def reserve(self, num_floats: int) -> None:
        """Nothing to do: each launch allocates."""

    def sums(self, need: int) -> Tensor:
        return torch.empty(need, dtype=torch.float32, device=self._device)

    def counters(self, need: int) -> Tensor:
        return torch.zeros(need, dtype=torch.int32, device=self._device)


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


def call(name: str, x: Tensor, *rest: Any, **options: Any) -> Any:
    """Run an operation: directly on plain tensors, else (while PyTorch compiles, exports or traces) as an op.

    Args:
        name: of the operation.
        x, rest: the first arguments of its schema, in its order. options: others, by name.
    Raises:
        InputError, UnsupportedError: as `torch.ops.minirt.NAME`.
    """
    if traced(x):
        return getattr(torch.ops.minirt, name)(x, *rest, **options)
    implementations = IMPLEMENTATIONS[name]
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        _refuse_gradients([*zip(implementations.names, (x, *rest), strict=False), *options.items()])
    kind = x.device.type
    if kind == "cuda":
        return implementations.kernel(x, *rest, **options)
    if kind == "cpu":
        return implementations.reference(x, *rest, **options)
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


# Further arguments of operations' functions: the `launch` of their declarations.


def scratch(sizes: dict[str, int], x: Tensor, **rest: Any) -> dict[str, Any]:
    return {"workspace": Scratch(x.device)}


def zeros(sizes: dict[str, int], q: Tensor, **rest: Any) -> dict[str, Any]:
    return {"out": torch.zeros_like(q)}  # rows of padding are not written


def splits(
    sizes: dict[str, int], block_tables: Tensor, k_pages: Tensor, seq_lens: Tensor, q: Tensor | None = None,
    qkv: Tensor | None = None, window: int | None = None, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    """Of decode kernels. They do not depend on the lengths: a table holds no more tokens than its pages."""
    heads: Any = q if qkv is None else qkv
    out = heads.new_zeros(sizes["B"], sizes["Nq"], sizes["D"])  # rows of padding may not be written
    longest = block_tables.shape[1] * k_pages.shape[1]
    most = seq_lens.shape[0] * cdiv(longest, KV_SPLIT)
    counts = (seq_lens + (KV_SPLIT - 1)) // KV_SPLIT
    if window is not None:
        counts -= (seq_lens - window).clamp(min=0) // KV_SPLIT  # `first_split` of one new token
    ends = counts.cumsum(0, dtype=torch.int32)
    return {
        "split_starts": torch.nn.functional.pad(ends, (1, 0)), "max_splits": most, "max_seq_len": longest,
        "workspace": Workspace(out.device, most * out.shape[1] * (out.shape[2] + 2), 0),  # two kernels share it
        "out": out,
    }  # fmt: skip


def _fakes(operation: Operation) -> Callable[[Values, dict[str, int]], Any]:
    """Results of the right shapes and dtypes, with any values, as the declaration says."""
    if operation.fake is not None:
        make = operation.find(operation.fake)
        return lambda values, sizes: make(**values)
    results = [
        (result.type.removeprefix("like "), None, None) if result.axes is None
        else (operation.declaration.first, [compiled_axis(axis) for axis in result.axes], compiled_dtypes(result.type))
        for result in operation.declaration.results
    ]  # fmt: skip

    def empty(values: Values, sizes: dict[str, int]) -> Any:
        made = tuple(
            torch.empty_like(values[like]) if axes is None or dtypes is None
            else values[like].new_empty([size(axis, sizes) for axis in axes], dtype=dtypes(values)[0])
            for like, axes, dtypes in results
        )  # fmt: skip
        return made if len(made) > 1 else made[0]

    return empty


def _declare_fallback(op: Any) -> None:
    """Tell Inductor that an op has no lowering. Inductor is loaded when it asks for the op's shapes.

    It would detect that, but before PyTorch 2.13 it then formats the whole graph so far, which takes minutes in a model of 28
    layers (pytorch/pytorch#185951).
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if WRITES_GRAPHS and lowering is not None and op not in lowering.lowerings:
        strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
        lowering.make_fallback(op, layout_constraint=strides, warn=False)


def _register(operation: Operation) -> dict[str, Implementations]:
    """Define the op of an operation, and that of its packed form. Return their functions on real tensors."""

    @functools.cache
    def function() -> Callable[..., Any]:
        try:
            return operation.function  # imports Triton
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise UnsupportedError("Triton is not installed", where=operation.name, hint="pip install triton") from error

    check, fakes, first = checker(operation.name), _fakes(operation), operation.declaration.first
    reference, additional = operation.eager, operation.find(operation.launch) if operation.launch else None

    def launched(values: Values, sizes: dict[str, int]) -> Any:
        if additional is not None:
            values |= additional(sizes, **values)
        return function()(**values, check=False)

    def kernel(values: Values) -> Any:
        sizes, device = check(values), values[first].device
        if capability(device) < LEAST:
            given = "an AMD GPU" if capability(device) == 0 else f"compute capability {capability(device) / 10}"
            expected = f"an NVIDIA GPU of compute capability {LEAST / 10} or later, or a CPU"
            raise UnsupportedError("no kernels for this device", where=first, expected=expected, found=given)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device
                return launched(values, sizes)
        return launched(values, sizes)

    def on_cpu(values: Values) -> Any:
        check(values)
        return reference(**values)

    def empty(values: Values) -> Any:
        return fakes(values, check(values))

    schema = operation.declaration.schema
    defined = {operation.name: _define(operation.name, schema, kernel, on_cpu, empty)}
    if operation.name in _PACKED:
        schema = re.sub(r"Tensor\?? (weight|bias|scale)(=None)?", r"Tensor[] \1", schema)
        name = f"packed_{operation.name}"
        defined[name] = _define(name, schema, kernel, on_cpu, empty)
    return defined


def _define(name: str, schema: str, *functions: Callable[[Values], Any]) -> Implementations:
    """Define an op: its functions on a GPU, on a CPU and for fake tensors, which take the arguments by name."""
    qualified = f"{NAMESPACE}::{name}"
    # The strides of the arguments are those of the traced program: the kernels take contiguous tensors, and Inductor must not
    # choose others.
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    op = getattr(torch.ops.minirt, name).default
    parameters = op._schema.arguments
    names = tuple(parameter.name for parameter in parameters)
    defaults = {parameter.name: parameter.default_value for parameter in parameters}
    written = {parameter.name for parameter in parameters if parameter.is_write}
    packed = any(isinstance(parameter.type, torch.ListType) for parameter in parameters)

    def of_schema(function: Callable[[Values], Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if packed:
                args = tuple(_rows(arg) if isinstance(arg, list) else arg for arg in args)
            values = defaults.copy()
            values.update(zip(names, args), **options)  # noqa: B905  (strict takes time)
            return function(values)

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
    name: implementation for operation in OPERATIONS.values() if operation.no_op is None
    for name, implementation in _register(operation).items()
}  # fmt: skip
