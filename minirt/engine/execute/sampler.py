"""`sample`: logits to tokens for a batch of requests, on the device and without a host sync.

Greedy rows take the argmax. The other rows draw by an exponential race: the token v with the smallest E_v / w_v wins, where w_v
is its unnormalized probability and the E_v = -log(1 - u_v) are independent exponential variables. This is Gumbel-max, the argmax
of logit / T - log(E), without the outer logarithm: the ratio keeps the relative precision of fp32, the sum of logarithms only an
absolute one. u_v is uniform, and its resolution is finest near 0 (`minirt.kernels.sampling.philox.uniform`). Winners have a small
E, hence log(1 - u), computed as log1p(-u), and not log(u).

u_v is word v mod 4 of Philox with key = the request's seed and counter = (v // 4, step, 0, 0). So a draw depends only on seed,
step and v, never on the rest of the batch. For the same reason the filters use only exact integer sums and elementwise
operations: their results do not depend on the shape of the batch.

This eager implementation runs on any device and defines the result. On a GPU the kernels of `minirt.kernels.sampling.sample`
draw the same tokens.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.errors import InputError
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.philox import philox, uniform

if TYPE_CHECKING:
    from minirt.kernels.sampling.sample import SamplingWorkspace

# Probability mass is summed in integers: each weight (at most 1) times 2⁴⁰, truncated. A sum fits in int64 for V up to 2²². With
# 2¹⁸ tokens, truncation loses at most 2⁻²² of the most probable token's mass.
_MASS_SCALE = 2.0**40


def sample(
    logits: Tensor, batch: SamplingBatch, impl: str = "auto", workspace: "SamplingWorkspace | None" = None,
    out: Tensor | None = None, row_maxima: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample one token for each row of `logits`.

    A greedy row takes its largest logit, the lowest index among equals. A row that contains NaN or +inf, or only -inf, gives -1,
    which is no token id. To raise an error here would cost a sync, so the caller, who reads the tokens anyway, turns -1 into an
    error.

    Args:
        logits: [B, V] fp32; fp16 and bf16 are computed in fp32.
        impl: "eager", "triton" or "auto" ("triton" on an NVIDIA GPU, "eager" elsewhere).
        workspace: scratch memory of the Triton kernels; None: the call allocates it.
        out: [B] int64; receives the tokens.
        row_maxima: [B, P] from the LM head (see `RowMaxima`). If all rows are greedy, the Triton kernels read only these.
    Returns:
        [B] int64.
    Raises:
        InputError: `logits` does not have one row per request, or `impl` is unknown.
    """
    rows = batch.step.shape[0]
    if logits.ndim != 2 or logits.shape[0] != rows:
        what, expected, shape = "logits must have one row per request", f"logits of shape ({rows}, V)", f"{tuple(logits.shape)}"
        raise InputError(what, where="sample", expected=expected, found=shape)
    if impl not in ("auto", "eager", "triton"):
        raise InputError("unknown implementation", where="sample", expected="auto, eager or triton", found=impl)
    if impl == "triton" or (impl == "auto" and logits.is_cuda and is_nvidia(logits.device)):
        from minirt.kernels.sampling import sample as kernels

        logits = logits.to(torch.float32).contiguous()
        return kernels.sample(logits, batch, workspace=workspace, out=out, row_maxima=row_maxima)
    token = logits.argmax(-1, keepdim=True)
    top = logits.gather(1, token)  # NaN if the row contains NaN: argmax ranks NaN highest
    if batch.temperature is not None:
        race = filtered_weights(logits, batch).div_(exponential_noise(batch.seed, batch.step, logits.shape[1]))
        token = torch.where(batch.temperature.unsqueeze(1) > 0, race.argmax(-1, keepdim=True), token)
    tokens = torch.where(top.isfinite(), token, -1).squeeze(1)
    return tokens if out is None else out.copy_(tokens)


def filtered_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """exp((logit - max) / T) of the tokens that the filters keep, 0 elsewhere: [B, V] → [B, V] fp32.

    The weights are proportional to the probabilities of the draw. The most probable token has weight 1 and is always kept.
    The filters apply in this order. top_k keeps every logit that is at least the k-th largest. top_p keeps the fewest most
    probable of the remaining tokens whose share of the remaining mass reaches p, and all ties of the last one. min_p keeps
    weights of at least min_p; weights are relative to the maximum, so renormalization changes nothing. Rows with temperature
    0, and rows that give no token, hold finite values without a meaning.
    """
    logits = logits.to(torch.float32)
    top = logits.amax(-1, keepdim=True)
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1).unsqueeze(1)
    weights = ((logits - top) / temperature).masked_fill_(logits == top, 0).exp_()  # the mask handles inf - inf
    weights.masked_fill_(top.isnan(), 1)
    if batch.top_k is not None:
        vocab = logits.shape[1]
        count = torch.where(batch.top_k > 0, batch.top_k, vocab).clamp(max=vocab).unsqueeze(1).long()
        keys = _descending_keys(logits)
        weights.masked_fill_(keys > _reach(keys, torch.ones_like(keys), count), 0)
    if batch.top_p is not None:
        top_p = batch.top_p.unsqueeze(1)
        mass = (weights * _MASS_SCALE).long()
        target = (top_p.double() * mass.sum(-1, keepdim=True)).ceil().long().clamp(min=1)
        keys = _descending_keys(weights)
        last = _reach(keys, mass, torch.where(top_p < 1, target, 1))
        weights.masked_fill_((keys > last) & (top_p < 1), 0)
    if batch.min_p is not None:
        weights.masked_fill_(weights < batch.min_p.unsqueeze(1), 0)
    return weights


def exponential_noise(seed: Tensor, step: Tensor, vocab: int) -> Tensor:
    """E = -log(1 - u) for `seed` [B] and `step` [B] → [B, vocab] fp32 in [2⁻³³, 24·log 2]. The module docstring defines u.

    Without a log1p function, with t = 1 - u in fp32: E = u if t = 1, else log(t) · u / (t - 1) (Kahan's identity).
    """
    block = torch.arange(-(-vocab // 4), device=seed.device).unsqueeze(0)
    zero = torch.zeros_like(step).unsqueeze(1)
    words = philox(seed.unsqueeze(1), block, step.unsqueeze(1), zero, zero)
    u = torch.stack([uniform(word) for word in words], dim=-1).flatten(1)[:, :vocab]
    return u.neg_().log1p_().neg_()


def _descending_keys(x: Tensor) -> Tensor:
    """fp32 → int64 keys in 0 … 2³² - 1. A larger number has a smaller key; -0 and 0 have the same key."""
    bits = (x + 0.0).view(torch.int32)
    return (2**31 - 1) - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _reach(keys: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """The smallest key t with (mass where keys <= t).sum() >= target, per row → [B, 1] int64.

    A radix select, 11 bits at a time. It needs no sort, and only integer sums, which do not depend on the order.

    Args:
        keys: [B, V] int64 in 0 … 2³² - 1.
        mass: [B, V] int64 >= 0; overwritten.
        target: [B, 1] int64, from 1 to the row's total mass.
    """
    key = torch.zeros_like(target)
    for shift in (22, 11, 0):
        digits = (keys >> shift).bitwise_and_(0x7FF)
        histogram = torch.zeros(keys.shape[0], 2**11, dtype=torch.int64, device=keys.device)
        histogram.scatter_add_(1, digits, mass)
        reached = histogram.cumsum(1)
        digit = (reached < target).sum(1, keepdim=True)
        target = target - (reached - histogram).gather(1, digit)  # minus the mass of the smaller digits
        mass.masked_fill_(digits != digit, 0)
        key = (key << 11) | digit
    return key
