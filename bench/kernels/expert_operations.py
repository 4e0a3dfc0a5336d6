"""Mixtures of experts as operations of `minirt bench kernels`: the router's choice, and the experts that it chooses."""

from typing import Any

import torch
from torch import Tensor

from minirt.bench.kernels.operations import EXACT, FP8, Inputs, Problem, Step, operation, problem, wide
from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.modeling.config import MoEConfig


def _sizes(step: Step, name: str) -> MoEConfig:
    if step.config.moe is None:
        raise UnsupportedError("the model has no mixtures of experts", where=name, found=step.config.model_type)
    return step.config.moe


def route(step: Step) -> Problem:
    """Choose the experts of each token, and sort the tokens by expert. All choices must equal those of the eager code."""
    kernel, cost = operation("route")
    moe = _sizes(step, "experts_route")
    E, k = moe.num_experts, moe.experts_per_token
    logits = Inputs(step).normal(step.tokens, E)
    return problem(
        step, f"E={E} k={k}", lambda: reference.route(logits, k, moe.normalize)[1],
        lambda: kernel(logits, k, moe.normalize, 16, check=False).experts,
        lambda rows: reference.route(logits[rows], k, moe.normalize)[1].double(), cost(step.tokens, E, k, logits.itemsize),
        view=lambda experts: experts.double(), compiles=False, floor=EXACT,
    )  # fmt: skip


def experts(step: Step, quantization: str | None = None) -> Problem:
    """Compute the chosen experts of each token, weighted, and the residual. The bytes are those of the distinct ones chosen.

    `quantization` of the weights: None; "fp8", a scale for each row; or "fp8_blocks", a scale for each block.
    """
    from minirt.kernels.launch import capability

    kernel, cost = operation("mixture_residual")
    moe, inputs, T, H = _sizes(step, "experts"), Inputs(step), step.tokens, step.config.hidden_size
    E, k, inter, activation = moe.num_experts, moe.experts_per_token, moe.intermediate_size, step.config.hidden_act
    h, residual, logits = inputs.normal(T, H), inputs.normal(T, H), inputs.normal(T, E)
    gate_up, down = inputs.normal(E, 2 * inter, H, scale=H**-0.5), inputs.normal(E, H, inter, scale=inter**-0.5)
    scales: tuple[Any, Any] = (None, None)
    if quantization is not None:
        (gate_up, up_scale), (down, down_scale) = _quantized(gate_up, inter, quantization), _quantized(down, H, quantization)
        scales = up_scale, down_scale
    eight = quantization is not None and not reference.few_tokens(T, k, E)
    touched = int(reference.route(logits, k, moe.normalize)[1].unique().numel())

    def compute(h: Tensor, logits: Tensor, residual: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        chosen = reference.route(logits, k, moe.normalize)
        return residual + reference.mixture(h, *chosen, gate_up, down, activation, *scales, quantize=eight)

    def truth(rows: Tensor) -> Tensor:
        return compute(*wide(h[rows], logits[rows], residual[rows], gate_up, down))

    def triton() -> Tensor:
        return kernel(
            h, logits, gate_up, down, residual, k, moe.normalize, activation, gate_up_scale=scales[0], down_scale=scales[1],
            pdl=capability(step.device) >= 90, check=False,
        )  # fmt: skip

    return problem(
        step, f"E={E} k={k} H={H} I={inter}, {touched} used", lambda: compute(h, logits, residual, gate_up, down), triton, truth,
        cost(T, k, touched, H, inter, h.itemsize, gate_up.itemsize), rounded=eight, rate=FP8 if eight else step.dtype,
        compiles=False,
    )  # fmt: skip


def _quantized(weight: Tensor, part: int, format: str) -> tuple[Tensor, Tensor]:
    """Quantize expert by expert, because that takes many temporary bytes for each weight."""
    values, scales = torch.empty_like(weight, dtype=FP8), []
    for e in range(len(weight)):
        values[e], scale = reference.quantize_weight(weight[e], format, part)
        scales.append(scale)
    return values, torch.stack(scales)
