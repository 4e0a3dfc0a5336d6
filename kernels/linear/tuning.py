"""`minirt tune` for the linear layers: which cases a model has, their inputs, and what they must compute."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minirt.errors import NumericsError
from minirt.kernels import reference
from minirt.kernels.compile.tuning import Case, Family, LinearShape, Prepared, register
from minirt.kernels.launch import Workspace, capability, cdiv
from minirt.kernels.linear import dispatch
from minirt.kernels.linear.dispatch import REGIMES, LinearRegime
from minirt.kernels.linear.product import Epilogue, Product, ProductFacts
from minirt.kernels.quantize import quantize

_COLD = 256 << 20  # bytes of weights that launches use in turn: more than any L2 holds
_TOLERANCE = 2e-2  # relative error of bf16 outputs: larger than any order of sums causes, much smaller than a wrong tile does


def cases(family: Family[Any], shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """One case for each bucket of the products that launch this family's kernel. Experts are `moe.tuning`'s."""
    buckets = set()
    for T, shape in itertools.product(sorted(tokens), [shape for shape in shapes if shape.experts is None]):
        regime, most = _regime(shape, T, device), family.tokens(T)
        if regime.family is not family:
            continue
        case = family.case(shape_facts(shape, most), device, partial(_prepare, regime, shape, most, device))
        if case is not None and case.bucket not in buckets:
            buckets.add(case.bucket)
            yield case


def shape_facts(shape: LinearShape, tokens: int) -> ProductFacts:
    """What the configuration of a model's product may depend on, as `Product.facts`."""
    E, k = shape.experts or (1, 1)
    itemsize, out_itemsize = 1 if shape.fp8 else shape.dtype.itemsize, 4 if shape.logits else shape.dtype.itemsize
    facts = (tokens, shape.N, shape.K, itemsize, shape.gated, shape.residual, shape.blocks, out_itemsize)
    return ProductFacts(*facts, E=E, k=k)


def _regime(shape: LinearShape, T: int, device: torch.device) -> LinearRegime:
    """The regime of a shape's product of T tokens."""

    def meta(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    x = meta(T, shape.K, dtype=torch.float8_e4m3fn if shape.fp8 and T > 1 else shape.dtype)
    weight, scale = stored(meta(shape.rows, shape.K), shape)
    epilogue = Epilogue(scale, residual=meta(T, shape.N) if shape.residual else None)
    out = meta(T, shape.N, dtype=torch.float32 if shape.logits else shape.dtype)
    product = Product(x, weight, out, epilogue=epilogue)
    return dispatch.regime(product, capability(device))


def _prepare(regime: LinearRegime, shape: LinearShape, T: int, device: torch.device) -> Prepared:
    rows = shape.rows
    random = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=shape.dtype, generator=random)

    x, residual = normal(T, shape.K), normal(T, shape.N) if shape.residual else None
    itemsize = 0.5 if shape.int4 else 1 if shape.fp8 else shape.dtype.itemsize
    copies = max(2, cdiv(_COLD, int(rows * shape.K * itemsize)))
    weights = [stored(normal(rows, shape.K) / shape.K**0.5, shape) for _ in range(copies)]
    activation = "silu" if shape.gated else None
    h, x_scale = quantize(x, blocks=shape.blocks) if shape.fp8 and T > 1 else (x, None)
    out_dtype = torch.float32 if shape.logits else shape.dtype
    out, workspace = torch.empty(T, shape.N, device=device, dtype=out_dtype), Workspace(device)
    epilogue = Epilogue(x_scale=x_scale, activation=activation, residual=residual)
    base = Product(h, weights[0][0], out, workspace=workspace, pdl=capability(device) >= 90)

    def run(stored_weight: tuple[Tensor, Tensor | None], config: Any) -> None:
        weight, scale = stored_weight
        regime.launch(base._replace(weight=weight, epilogue=epilogue._replace(scale=scale)), config=config)

    expected = reference.linear(x, weights[0][0], None, weights[0][1])
    expected = expected if activation is None else reference.gated(expected, activation)
    return launch_and_check(weights, run, out, expected if residual is None else expected + residual)


def launch_and_check(inputs: Sequence[Any], run: Callable[[Any, Any], None], out: Tensor, expected: Tensor) -> Prepared:
    """(launch, check) of a case. `launch` runs the inputs in turn, `check` the first, whose result is `expected`."""
    in_turn = itertools.cycle(inputs)

    def launch(config: Any) -> None:
        run(next(in_turn), config)

    def check(config: Any) -> None:
        out.fill_(torch.nan)
        run(inputs[0], config)
        error = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
        if not error < _TOLERANCE:
            what = "a configuration computes something else"
            raise NumericsError(what, expected=f"below {_TOLERANCE}", found=f"{error:.1e}")

    return launch, check


def stored(weight: Tensor, shape: LinearShape) -> tuple[Tensor, Tensor | None]:
    """The weight of a layer, or of one of its experts, in its format, and its scales."""
    if not (shape.int4 or shape.fp8):
        return weight, None
    format = "int4" if shape.int4 else "fp8_blocks" if shape.blocks else "fp8"
    return reference.quantize_weight(weight, format, shape.N if shape.gated or shape.experts else None)


FAMILIES = tuple(regime.family for regime in REGIMES if regime.family is not None and regime.family.candidates is not None)
for _family in FAMILIES:
    register(_family, partial(cases, _family))
