"""The eager form of the sampler, which runs on any device and defines the results: `process`, `sample`, `token_logprobs`.

`sample`: greedy rows take the argmax. The other rows draw by an exponential race: the token v with the smallest E_v / w_v wins,
where w_v is its unnormalized probability and the E_v = -log(1 - u_v) are independent exponential variables. This is Gumbel-max,
the argmax of logit / T - log(E), without the outer logarithm: the ratio keeps the relative precision of fp32, the sum of
logarithms only an absolute one. u_v is uniform, and its resolution is finest near 0 (`minirt.kernels.sampling.philox.uniform`).
Winners have a small E, hence log(1 - u), computed as log1p(-u), and not log(u).

u_v is word v mod 4 of Philox with key = the request's seed and counter = (v // 4, step, 0, 0). So a draw depends only on seed,
step and v, never on the rest of the batch. For the same reason the filters use only exact integer sums and elementwise
operations: their results do not depend on the shape of the batch.
"""

import torch
from torch import Tensor

from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.limits import MAX_TOP, MOST_ENTRIES
from minirt.kernels.sampling.philox import philox, uniform
from minirt.kernels.sampling.slots import ALLOWED, HISTORY, PENALTIES, Drafts, Slots

# Probability mass is summed in integers: each weight (at most 1) times 2⁴⁰, truncated. A sum fits in int64 for V up to 2²². With
# 2¹⁸ tokens, truncation loses at most 2⁻²² of the most probable token's mass.
_MASS_SCALE = 2.0**40


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The tokens [B] int64 of `dispatch.sample`."""
    token = logits.argmax(-1, keepdim=True)
    top = logits.gather(1, token)  # NaN if the row contains NaN: argmax ranks NaN highest
    if batch.temperature is not None:
        race = filtered_weights(logits, batch).div_(exponential_noise(batch.seed, batch.step, logits.shape[1]))
        token = torch.where(batch.temperature.unsqueeze(1) > 0, race.argmax(-1, keepdim=True), token)
    return torch.where(top.isfinite(), token, -1).squeeze(1)


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


def process(
    logits: Tensor, rows: Tensor, step: Tensor, slots: Slots, mask: Tensor | None = None, drafts: Drafts | None = None
) -> Tensor:
    """The processed logits [B, V] fp32 of `LogitsProcessors.process`. Waits for the device."""
    x = logits.to(torch.float32, copy=True)
    at, ruled = rows.clamp(min=0).long(), (rows >= 0).unsqueeze(1)
    meta = torch.where(ruled, slots.meta[at], 0)
    flags, biases = meta[:, :1], int(meta[:, 1].max()) if len(meta) else 0
    if mask is not None:
        x.masked_fill_(~unpacked(mask, x.shape[1]), -torch.inf)
    if (flags & ALLOWED).any():
        x.masked_fill_((flags & ALLOWED > 0) & ~unpacked(slots.allowed[at], x.shape[1]), -torch.inf)
    if biases:
        inside = torch.arange(biases, device=x.device) < meta[:, 1:2]
        ids, values = slots.bias_ids[:, :biases][at], slots.biases[:, :biases][at]
        x.scatter_add_(1, torch.where(inside, ids, 0).long(), torch.where(inside, values, 0.0))
    if meta[:, 2].any():
        x.masked_fill_(_banned(at, meta[:, 2:3], step.unsqueeze(1), slots, x.shape[1], drafts), -torch.inf)
    if (flags & PENALTIES).any():
        presence, frequency, repetition, _ = slots.penalties[at].unsqueeze(-1).unbind(1)
        counts = slots.counts[at, : x.shape[1]].int()
        if slots.counts.dtype == torch.int16:
            counts &= 0xFFFF
        if drafts is not None:
            before = torch.arange(drafts.tokens.shape[1], device=x.device) < drafts.counts.unsqueeze(1)
            counts.scatter_add_(1, torch.where(before, drafts.tokens[at], 0).long(), 2 * before.int())
        generated = counts >> 1
        y = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        y = y - frequency * generated - torch.where(generated > 0, presence, 0.0)
        x = torch.where(flags & PENALTIES > 0, y, x)
    return x


def _banned(at: Tensor, count: Tensor, step: Tensor, slots: Slots, vocab: int, drafts: Drafts | None) -> Tensor:
    """[B, V] bool: the tokens that are forbidden at this step."""
    token, until, first, length = slots.bans[:, : int(count.max())][at].long().unbind(-1)
    banned = (torch.arange(token.shape[1], device=at.device) < count) & (step < until) & (length <= step)
    for j in range(int(torch.where(banned, length, 0).max())):
        wanted = slots.prefixes[at.unsqueeze(1), (first + j).clamp(max=MOST_ENTRIES - 1)]
        place = step - length + j
        generated = slots.history[at.unsqueeze(1), place % MOST_ENTRIES]
        if drafts is not None:  # they are not in the history
            after = place - (step - drafts.counts.unsqueeze(1))
            proposed = drafts.tokens[at].gather(1, after.clamp(0, drafts.tokens.shape[1] - 1))
            generated = torch.where(after < 0, generated, proposed)
        banned &= (j >= length) | (wanted == generated)
    ids = torch.where(banned, token, 0)
    return torch.zeros(len(at), vocab, dtype=torch.int32, device=at.device).scatter_add_(1, ids, banned.int()) > 0


def unpacked(mask: Tensor, vocab: int) -> Tensor:
    """[B, ceil(V / 32)] int32 → [B, V] bool."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab]


def record(tokens: Tensor, rows: Tensor, step: Tensor, slots: Slots) -> None:
    """Count the tokens that were drawn from processed rows, as `LogitsProcessors.record`."""
    at = rows.clamp(min=0).long()
    # Before step 0: a sequence whose first draw was unusable computes a token of its prompt again, until the host knows.
    flags = torch.where((rows >= 0) & (tokens >= 0) & (step >= 0), slots.meta[at, 0], 0)
    counted = (flags & PENALTIES > 0).to(slots.counts.dtype) * 2
    slots.counts.view(-1).index_add_(0, at * slots.counts.shape[1] + tokens.clamp(min=0), counted)
    history, places = slots.history.view(-1), at * MOST_ENTRIES + step % MOST_ENTRIES
    history.index_add_(0, places, torch.where(flags & HISTORY > 0, tokens.int() - history[places], 0))


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int, out: Tensor) -> Tensor:
    """The result of `dispatch.token_logprobs`, of rows that all want `num_top` tokens, in `out`."""
    room, token = max(num_top, MAX_TOP), tokens.clamp(min=0).unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    out[:, :1] = logprobs.gather(1, token).view(torch.int32)
    out[:, 1] = 1 + (logits > logits.gather(1, token)).sum(-1)
    ids = _keys(logits).topk(num_top).indices
    out[:, 2 : 2 + num_top] = ids
    out[:, 2 + room : 2 + room + num_top] = logprobs.gather(1, ids).view(torch.int32)
    return out


def _keys(logits: Tensor) -> Tensor:
    """int64 keys in the order of the logits, all different: among equal logits the lower index has the larger key."""
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) | (0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device))
