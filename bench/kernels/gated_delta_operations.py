"""Gated DeltaNet as operations of `minirt bench kernels`: one token of each of many sequences, and a prompt."""

import torch
from torch import Tensor

from minirt.bench.kernels.operations import Inputs, Problem, Step, fill_nan, operation, problem, wide
from minirt.errors import UnsupportedError
from minirt.kernels.gated_delta import reference
from minirt.kernels.gated_delta.operands import WIDTH, GatedDeltaSequences, GatedDeltaState, GatedDeltaWeights

_BEFORE = 70  # tokens that each sequence of a decode step has already


def gated_delta_net(step: Step, decode: bool) -> Problem:
    """Compute a layer after its projections: one new token of each of T sequences, or a prompt of T tokens.

    Every run changes the states, so a timed run finds those that the run before it has left.
    """
    from minirt.kernels.launch import capability

    (kernel, cost), linear = operation("gated_delta_net"), step.config.gated_delta_net
    if linear is None:
        name = "gated_delta_decode" if decode else "gated_delta_prefill"
        raise UnsupportedError("the model has no gated DeltaNet layers", where=name, found=step.config.model_type)
    inputs, T, fp32 = Inputs(step), step.tokens, torch.float32
    Hk, Hv, Dk, Dv = linear.num_k_heads, linear.num_v_heads, linear.head_k_dim, linear.head_v_dim
    channels, values, B = 2 * Hk * Dk + Hv * Dv, Hv * Dv, T if decode else 1
    both, out = inputs.normal(T, channels + values + 2 * Hv), inputs.nan(T, values)
    qkvz, ba = both[:, : channels + values], both[:, channels + values :]
    weights = GatedDeltaWeights(
        inputs.normal(channels, WIDTH, scale=0.5), inputs.normal(Hv, dtype=fp32), inputs.normal(Hv, dtype=fp32),
        inputs.norm(Dv), step.config.rms_norm_eps,
    )  # fmt: skip
    before = GatedDeltaState(inputs.normal(B, WIDTH, channels), inputs.normal(B, Hv, Dk, Dv, scale=0.1, dtype=fp32))
    state = GatedDeltaState(before.conv.clone(), before.recurrent.clone())
    counts = [1] * T if decode else [T]
    lens, slots = [_BEFORE + 1] * T if decode else [T], list(range(B))
    starts = list(range(T + 1)) if decode else [0, T]
    sequences = GatedDeltaSequences(*(torch.tensor(x, dtype=torch.int32, device=step.device) for x in (starts, lens, slots)))
    pdl = decode and capability(step.device) >= 90

    def triton() -> Tensor:
        return kernel(qkvz, ba, weights, state, sequences, max(counts), out, pdl=pdl, check=False)

    def truth(rows: Tensor) -> Tensor:
        exact = GatedDeltaWeights._make((*wide(*weights[:4]), weights.eps))
        fresh = GatedDeltaState(before.conv.double(), before.recurrent.double())
        return reference.gated_delta_net(qkvz.double(), ba.double(), exact, fresh, counts, lens, slots)[rows]

    def blank() -> None:
        fill_nan(out)
        state.conv.copy_(before.conv)
        state.recurrent.copy_(before.recurrent)

    return problem(
        step, f"heads {Hk}:{Hv} of {Dk}, {Dv}",
        lambda: reference.gated_delta_net(qkvz, ba, weights, state, counts, lens, slots), triton, truth,
        cost(T, B, Hk, Hv, Dk, Dv, qkvz.itemsize, begins=not decode), blank=blank, compiles=False,
    )  # fmt: skip
