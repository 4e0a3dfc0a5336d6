"""`minirt tune` for the experts of a mixture: which cases a model has, their inputs, and what they must compute."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minirt.kernels import reference
from minirt.kernels.compile.tuning import Case, LinearShape, Prepared, register
from minirt.kernels.launch import capability
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.linear.tuning import launch_and_check, shape_facts, stored
from minirt.kernels.moe import experts_sm90, few_tokens
from minirt.kernels.moe.route import gather, route, token_regime

_ROUTINGS = 8  # launches that use different experts, so that one does not find its weights in the L2 cache


def few_tokens_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of few tokens, which have the configurations of one. A shared expert that joins is like one more of those chosen."""
    for shape, (E, k) in _of_experts(shapes) if 1 in tokens else ():
        k += shape.joins
        facts = shape_facts(shape, 1)._replace(k=k)
        case = few_tokens.FAMILY.case(facts, device, partial(_prepare_few, shape, 1, E, k, device))
        if case is not None:
            yield case


def experts_sm90_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of more tokens on Hopper, one case for each regime. The height of tiles is the rule's: both products share it."""
    if capability(device) != 90:
        return
    regimes = sorted({token_regime(T) for T in tokens if T > 1})
    for T, (shape, (E, k)) in itertools.product(regimes, _of_experts(shapes)):
        facts = shape_facts(shape, T)
        if reference.few_tokens(T, k, E) or facts.itemsize > 2 or (shape.blocks and shape.N % 64):  # its regime refuses them
            continue
        rows = experts_sm90.block_t(T, shape.K, facts.itemsize, shape.blocks)
        case = experts_sm90.FAMILY.case(facts._replace(rows=rows), device, partial(_prepare, shape, T, E, k, rows, device))
        if case is not None:
            yield case


def _of_experts(shapes: Sequence[LinearShape]) -> list[tuple[LinearShape, tuple[int, int]]]:
    """Those with 4 bits have no configurations to choose from."""
    return [(shape, shape.experts) for shape in shapes if shape.experts is not None and not shape.int4]


class _Inputs:
    """Random inputs of one product of E experts."""

    def __init__(self, shape: LinearShape, T: int, E: int, device: torch.device) -> None:
        self._random, self.shape, self.device = torch.Generator(device).manual_seed(0), shape, device
        self.weight = torch.empty(E, shape.rows, shape.K, dtype=torch.float8_e4m3fn if shape.fp8 else shape.dtype, device=device)
        scales: list[Any] = []
        for e in range(E):  # in turn, as to quantize takes many temporary bytes for each weight
            self.weight[e], scale = stored(self.normal(shape.rows, shape.K) / shape.K**0.5, shape)
            scales.append(scale)
        self.scale = torch.stack(scales) if shape.fp8 else None
        self.logits = [self.normal(T, E) for _ in range(_ROUTINGS)]

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.shape.dtype, generator=self._random)

    def expected(self, x: Tensor, expert: int, quantize: bool) -> Tensor:
        """One expert's product, with SiLU for gate and up."""
        y = reference.linear(x, self.weight[expert], scale=None if self.scale is None else self.scale[expert], quantize=quantize)
        return reference.gated(y, "silu") if self.shape.gated else y


def _prepare_few(shape: LinearShape, T: int, E: int, k: int, device: torch.device) -> Prepared:
    inputs, pdl = _Inputs(shape, T, E, device), capability(device) >= 90
    x, residual = inputs.normal(T if shape.gated else T * k, shape.K), inputs.normal(T, shape.N)
    out = torch.empty(T * k if shape.gated else T, shape.N, dtype=shape.dtype, device=device)

    def run(logits: Tensor, config: Any) -> None:
        if shape.gated:
            epilogue = Epilogue(inputs.scale, activation="silu")
            few_tokens.gate_up(Product(x, inputs.weight, out, epilogue=epilogue, pdl=pdl), logits, k, config=config)
        else:
            epilogue = Epilogue(inputs.scale, residual=residual)
            few_tokens.down(Product(x, inputs.weight, out, epilogue=epilogue, pdl=pdl), logits, k, True, config=config)

    weights, experts = reference.route(inputs.logits[0], k, True)
    rows = x.repeat_interleave(k, 0) if shape.gated else x
    each = torch.cat([inputs.expected(rows[i : i + 1], e, False) for i, e in enumerate(experts.flatten().tolist())])
    expected = each if shape.gated else residual + (weights.reshape(-1, 1) * each).view(T, k, -1).sum(1)
    return launch_and_check(inputs.logits, run, out, expected)


def _prepare(shape: LinearShape, T: int, E: int, k: int, block_t: int, device: torch.device) -> Prepared:
    inputs = _Inputs(shape, T, E, device)
    routings = {id(logits): route(logits, k, True, block_t) for logits in inputs.logits}
    tokens, first = inputs.normal(T, shape.K), routings[id(inputs.logits[0])]
    # The same rows for all routings: only the time depends on them.
    x, x_scale = gather(tokens, first, shape.fp8, blocks=shape.blocks)
    out = torch.empty(T * k, shape.N, dtype=shape.dtype, device=device)
    epilogue = Epilogue(inputs.scale, x_scale, activation="silu" if shape.gated else None)
    product = Product(x, inputs.weight, out, epilogue=epilogue, pdl=True)

    def run(logits: Tensor, config: Any) -> None:
        experts_sm90.launch(product, routings[id(logits)], config)

    expected = torch.empty_like(out)
    experts = first.experts.flatten()[first.order]
    for e in experts.unique().tolist():
        places = (experts == e).nonzero()[:, 0]
        pairs = first.order[places].long()
        y = inputs.expected(tokens[pairs // k], e, shape.fp8)
        if shape.gated:
            expected[places] = y
        else:
            expected[pairs] = y
    return launch_and_check(inputs.logits, run, out, expected)


register(few_tokens.FAMILY, few_tokens_cases)
register(experts_sm90.FAMILY, experts_sm90_cases)
