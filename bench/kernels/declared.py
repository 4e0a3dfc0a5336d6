"""Inputs and benchmarks of operations, made of their declarations. Sizes of axes are those of a model or of a test case."""

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minirt.bench.kernels.operations import Form, Inputs, Problem, Step, dequantized, problem, wide
from minirt.kernels import checks
from minirt.kernels.operations import OPERATIONS, Operation

Sizes = dict[str, int]  # of axes, and of arguments of type int


def is_declared(operation: Operation, sizes: Sizes) -> bool:
    """Whether `inputs` can make an operation's arguments of these sizes."""
    unknown = any(argument.further_axes or argument.type == "any dtype" for argument in operation.declaration.arguments)
    return operation.no_op is None and not unknown and _axes(operation) <= set(sizes)


def _axes(operation: Operation) -> set[str]:
    """The names of axes, and of arguments of type int."""
    arguments = operation.declaration.arguments
    names = {argument.name for argument in arguments if argument.type == "int"}
    return names | {axis.partition(":")[0] for argument in arguments for axis in argument.axes or ()}


def inputs(operation: Operation, sizes: Sizes, normal: Callable[..., Tensor], eps: float = 1e-6) -> dict[str, Any]:
    """Arguments of an operation by name; optional ones are None.

    Args:
        normal: makes activations of a shape. Integers are below every size, norm weights near 1.
        eps: for arguments of type float.
    """
    values: dict[str, Any] = {}
    for argument in operation.declaration.arguments:
        if argument.optional:
            values[argument.name] = None
        elif argument.axes is not None:
            axes = [axis.partition(": ") for axis in argument.axes]
            values[argument.name] = x = normal(*(checks.size(checks.compiled_axis(axis), sizes) for axis, _, _ in axes))
            if any(rule == "norm" for _, _, rule in axes):
                values[argument.name] = 1 + 0.3 * x
            elif argument.type in ("int32", "int64"):
                dtype, below = checks.NAMED_DTYPES[argument.type], min(size for size in sizes.values() if size)
                values[argument.name] = (x.float().abs() * 1000).to(dtype) % below
        elif argument.default is not None:
            values[argument.name] = ast.literal_eval(argument.default)
        else:
            values[argument.name] = {"float": eps, "activation": "silu"}.get(argument.type, sizes.get(argument.name))
    return values


def declared(step: Step, name: str, library: Callable[..., Any] | None = None, outlier: float = 1.0) -> Problem:
    """An operation on a model's shapes, with its reference as the eager code.

    Args:
        library: PyTorch's function for it, with the same arguments.
        outlier: factor of the first value of each row.
    """
    operation, made = OPERATIONS[name], Inputs(step)
    reference, kernel, declaration = operation.eager, operation.function, operation.declaration
    config, axes = step.config, _axes(operation)
    every = {"T": step.tokens, "H": config.hidden_size, "K": config.intermediate_size, "V": config.vocab_size}
    sizes = {axis: size for axis, size in every.items() if axis in axes}
    values = inputs(operation, sizes, lambda *shape: made.normal(*shape, scale=3.0), config.rms_norm_eps)
    quantized = any(result.type == "fp8" for result in declaration.results)  # values and scales
    several = len(declaration.results) > 1
    if outlier != 1.0:
        values[declaration.first][:, 0] *= outlier
    out = reference(**values)
    outputs = [torch.empty_like(tensor) for tensor in (out if several else (out,))]
    options = {result.name: output for result, output in zip(declaration.results, outputs, strict=True)} | {"check": False}
    by_token = [argument.name for argument in declaration.arguments if argument.axes and argument.axes[0] == "T"]
    cost = operation.work(**sizes, itemsize=step.dtype.itemsize)

    def view(made: Any) -> Any:
        return dequantized(made) if quantized else torch.stack(made, 1) if several else made

    def truth(rows: Tensor) -> Tensor:
        chosen = values | {name: values[name][rows] for name in by_token}
        if cost[1]:  # else values are only copied
            chosen = dict(zip(chosen, wide(*chosen.values()), strict=True))
        exact = reference(**chosen)
        return view(exact).double()

    return problem(
        step, " ".join(f"{axis}={size}" for axis, size in sizes.items() if axis != "T"), lambda: reference(**values),
        lambda: kernel(**values, **options), truth, cost, outputs=outputs, rounded=quantized,
        library={} if library is None else {"library": Form(lambda: library(**values))},
        view=view,
    )  # fmt: skip
