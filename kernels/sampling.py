"""From logits to tokens without sorting the vocabulary: the same draws as `minirt.sampler.sample`, which defines them.

The vocabulary of each row is split over programs, and every launch is one pass over it. Partial results are integers:
maxima of (value, index) packed into one, sums of counts and of probability masses in fixed point. They come out the same
in any order, so the same input gives the same token whatever the batch and however the programs are scheduled.

A filter is a selection: the smallest key (the larger the weight, the smaller its key) up to which the mass (for top-k:
the count) reaches a target. Two passes of 16 bins each find a short range of keys that holds it, a third collects the
tokens in that range, and one program a row bisects those. The bins follow powers of two, since what matters of weights
and of distances to the largest logit is their ratio; ill-chosen bins cost time only, never the result.

Weights are exp2 with a compensated exponent: within about 2 units in the last place of PyTorch's exp, though not bit for
bit. So the kept set can differ from the eager sampler's where a sum of masses comes within that rounding of top_p, or a
weight that close to min_p, and a draw where two tokens come that close in the race. All else is equal to the last bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.common import check_tensor

CASES = [{"B": B, "V": V} for B, V in ((1, 17), (3, 1), (5, 1031), (2, 4099), (7, 2048))]

MAX_VOCAB = 2**22  # of which a sum of masses, 2⁴⁰ at most each, fits in an int64
_BLOCK = 2048
_BINS = tl.constexpr(16)
_NUM_SUMS = tl.constexpr(64)  # of a row: 2 filters × (16 bins, then 15 bins and the number of candidates)
_MASS_SCALE = tl.constexpr(2.0**40)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0 and of infinity
_INFINITY = tl.constexpr(0x7F800000)
_MAX_INT = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-(2**63))


class SamplingWorkspace:
    """Scratch of `sample` for up to `max_batch` rows of up to `vocab` logits: 4 bytes per logit and a little more.

    Allocated once, before any CUDA graph is captured, and used by one stream at a time. What it holds between calls does
    not matter. `greedy_only` leaves out all that sampled rows need.
    """

    def __init__(self, max_batch: int, vocab: int, device: torch.device | str, *, greedy_only: bool = False) -> None:
        self.max_batch, self.vocab, self.greedy_only = max_batch, vocab, greedy_only
        splits, rows = triton.cdiv(vocab, _BLOCK), 0 if greedy_only else max_batch
        self.peaks = torch.empty(max_batch, splits, dtype=torch.int64, device=device)
        self.races = torch.empty(rows, splits, dtype=torch.int64, device=device)
        self.sums = torch.empty(rows, _NUM_SUMS.value, dtype=torch.int64, device=device)
        self.limits = torch.empty(rows, 2, dtype=torch.int32, device=device)  # last key kept by top-k, top-p
        self.candidates = torch.empty(rows, vocab, dtype=torch.int32, device=device)


@triton.jit
def _sortable(x):
    """fp32 → int32 in the same order; -0 and 0 become one, NaN comes after everything."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(x == x, bits ^ ((bits >> 31) & _MAX_INT), _MAX_INT))


@triton.jit
def _logit(packed):
    """The fp32 value in the upper half of a packed maximum."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & _MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def _pack(key, v):
    """Ordered by key, then lowest index first."""
    return (key.to(tl.int64) << 32) | (v ^ _MAX_INT).to(tl.int64)


@triton.jit
def _peaks(peaks_ptr, SPLITS, BLOCK_S: tl.constexpr):
    """A row's largest logit, and its distance from the smallest finite one among the largest of each split."""
    s = tl.arange(0, BLOCK_S)
    packed = tl.load(peaks_ptr + tl.program_id(1) * SPLITS + s, mask=s < SPLITS, other=_LOWEST)
    top = _logit(tl.max(packed, 0))
    peaks = _logit(packed)
    lowest = tl.min(tl.where((s < SPLITS) & (tl.abs(peaks) < float("inf")), peaks, float("inf")), 0)
    return top, top - tl.minimum(lowest, top)


@triton.jit
def _weights(x, top, temperature):
    """exp((x - top) / temperature), 1 where x is top, in fp32: the eager sampler's quotient, bit for bit, and its exp."""
    d = tl.where(x == top, 0.0, tl.maximum(tl.div_rn(x - top, temperature), -105.0))  # exp(-105) is 0
    high = d * 1.4426950216293335  # log₂ e is this and 1.925963e-08
    low = tl.fma(d, 1.4426950216293335, -high) + d * 1.925963033500e-08
    return tl.minimum(tl.exp2(high) * tl.fma(low, 0.6931471805599453, 1.0), 1.0)


@triton.jit
def _block(logits_ptr, b, V, BLOCK: tl.constexpr):
    """This program's part of row b: indices, whether they are tokens, logits (-inf if not)."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return v, v < V, tl.load(logits_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))


@triton.jit
def _after_top_k(weights, x, b, V, top_k_ptr, limits_ptr):
    k = tl.load(top_k_ptr + b)
    if (k > 0) & (k < V):
        weights = tl.where(~_sortable(x) <= tl.load(limits_ptr + 2 * b), weights, 0.0)
    return weights


@triton.jit
def _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, BY_MASS: tl.constexpr):
    k = tl.load(top_k_ptr + b)
    asked = tl.load(top_p_ptr + b) < 1 if BY_MASS else (k > 0) & (k < V)
    return asked & (tl.load(temperature_ptr + b) > 0) & (top > float("-inf"))


@triton.jit
def _keyed(
    logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """x, key and mass of this program's tokens: by weight, or by distance from the top and 1 each. Mass 0 if no token.

    Equal logits are at equal distances and larger ones no farther, which is all that the bins need.
    """
    _, valid, x = _block(logits_ptr, b, V, BLOCK)
    if BY_MASS:
        weights = _weights(x, top, tl.load(temperature_ptr + b))
        if ANY_TOP_K:
            weights = _after_top_k(weights, x, b, V, top_k_ptr, limits_ptr)
        return x, -weights.to(tl.int32, bitcast=True), (weights * _MASS_SCALE).to(tl.int64)
    else:
        distance = tl.where(x == top, 0.0, top - x)
        return x, distance.to(tl.int32, bitcast=True), valid.to(tl.int32)


@triton.jit
def _edge(i, spread, BY_MASS: tl.constexpr):
    """Where bin i of the first level begins: weights a factor of 4 apart, distances a factor of 2, around `spread`."""
    if BY_MASS:
        edge, end = (i << 24) - _ONE, 1
    else:
        anchor = tl.where(spread > 0, spread, 1.0).to(tl.int32, bitcast=True)
        edge = tl.where(i == 0, 0, tl.minimum(anchor, 0x7A000000) + ((i - 6) << 23))
        end = _INFINITY + 1
    return tl.where(i == _BINS, end, edge)


@triton.jit
def _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, LEVELS: tl.constexpr, BY_MASS: tl.constexpr):
    """The range lo ≤ key < hi that LEVELS levels of sums have found, and the mass to reach within."""
    i = tl.arange(0, _BINS)
    if LEVELS == 0:
        return _edge(0, spread, BY_MASS), _edge(_BINS, spread, BY_MASS), 0
    else:
        sums = tl.load(sums_ptr + i)
        if BY_MASS:
            total = tl.load(sums_ptr + _BINS - 1)
            target = tl.ceil(tl.load(top_p_ptr + b).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            target = tl.maximum(target, 1)
        else:
            target = tl.load(top_k_ptr + b).to(tl.int64)
        found = tl.sum((sums < target).to(tl.int32), 0)
        target -= tl.max(tl.where(sums < target, sums, 0), 0)
        lo, hi = _edge(found, spread, BY_MASS), _edge(found + 1, spread, BY_MASS)
        if LEVELS == 2:
            step = (hi - lo + _BINS - 1) // _BINS
            sums = tl.load(sums_ptr + _BINS + i, mask=i < _BINS - 1, other=-_LOWEST - 1)
            found = tl.sum((sums < target).to(tl.int32), 0)
            target -= tl.max(tl.where(sums < target, sums, 0), 0)
            lo, hi = lo + found * step, lo + (found + 1) * step
        return lo, hi, target


@triton.jit
def _peak_kernel(logits_ptr, peaks_ptr, sums_ptr, V, CLEAR: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of each part of each row; and zero sums for the kernels that follow."""
    b, split = tl.program_id(1), tl.program_id(0)
    v, _, x = _block(logits_ptr, b, V, BLOCK)
    tl.store(peaks_ptr + b * tl.num_programs(0) + split, tl.max(_pack(_sortable(x), v), 0))
    if CLEAR and split == 0:
        tl.store(sums_ptr + b * _NUM_SUMS + tl.arange(0, _NUM_SUMS), tl.zeros((_NUM_SUMS,), tl.int64))


@triton.jit
def _sum_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, sums_ptr, limits_ptr, V, LEVEL: tl.constexpr,
    ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Adds to a row's sums [bin] the mass of this part that lies before the end of each of 16 bins."""
    b = tl.program_id(1)
    top, spread = _peaks(peaks_ptr, tl.num_programs(0), BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, BY_MASS):
        return
    sums_ptr += b * _NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    lo, hi, _ = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, LEVEL, BY_MASS)
    _, key, mass = _keyed(logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K, BY_MASS, BLOCK)
    mass = tl.where((key >= lo) & (key < hi), mass, 0)
    total = tl.sum(mass, 0)
    if total > 0:
        least = tl.min(tl.where(mass > 0, key, _MAX_INT), 0)
        most = tl.max(tl.where(mass > 0, key, -_MAX_INT), 0)
        for i in range(1, _BINS):
            end = _edge(i, spread, BY_MASS) if LEVEL == 0 else lo + i * ((hi - lo + _BINS - 1) // _BINS)
            if end > least:
                part = total
                if end <= most:  # else the whole part lies before it
                    part = tl.sum(tl.where(key < end, mass, 0), 0)
                tl.atomic_add(sums_ptr + LEVEL * _BINS + i - 1, part.to(tl.int64), sem="relaxed")
        if LEVEL == 0:
            tl.atomic_add(sums_ptr + _BINS - 1, total.to(tl.int64), sem="relaxed")


@triton.jit
def _collect_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, sums_ptr, limits_ptr, candidates_ptr, V,
    ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Appends to a row's candidates, in any order, the keys of this part in the range found (for top-k of its logits)."""
    b = tl.program_id(1)
    top, spread = _peaks(peaks_ptr, tl.num_programs(0), BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, BY_MASS):
        return
    sums_ptr += b * _NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    lo, hi, _ = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, 2, BY_MASS)
    x, key, mass = _keyed(logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K, BY_MASS, BLOCK)
    inside = (key >= lo) & (key < hi) & (mass > 0)
    if not BY_MASS:
        key = ~_sortable(x)
    number = tl.sum(inside.to(tl.int32), 0)
    if number > 0:
        begin = tl.atomic_add(sums_ptr + 2 * _BINS - 1, number.to(tl.int64), sem="relaxed")
        at = begin + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + b.to(tl.int64) * V + at, key, mask=inside)


@triton.jit
def _mass(key, counted, BY_MASS: tl.constexpr):
    return tl.where(counted, ((-key).to(tl.float32, bitcast=True) * _MASS_SCALE).to(tl.int64) if BY_MASS else 1, 0)


@triton.jit
def _select_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, sums_ptr, limits_ptr, candidates_ptr, V, SPLITS,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """The smallest key of a row's candidates up to which their mass reaches the target, by bisection."""
    b = tl.program_id(1)
    top, spread = _peaks(peaks_ptr, SPLITS, BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, BY_MASS):
        return
    sums_ptr += b * _NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    _, _, target = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, 2, BY_MASS)
    count = tl.load(sums_ptr + 2 * _BINS - 1).to(tl.int32)
    candidates_ptr += b.to(tl.int64) * V
    i = tl.arange(0, BLOCK)
    # The first block, as a rule the only one, stays in registers.
    first = tl.load(candidates_ptr + i, mask=i < count, other=0)
    mass = _mass(first, i < count, BY_MASS)
    least = tl.where(i < count, first, _MAX_INT)
    most = tl.where(i < count, first, -_MAX_INT - 1)
    for begin in range(BLOCK, count, BLOCK):
        more = i < count - begin
        key = tl.load(candidates_ptr + begin + i, mask=more, other=0)
        least = tl.minimum(least, tl.where(more, key, _MAX_INT))
        most = tl.maximum(most, tl.where(more, key, -_MAX_INT - 1))
    lo, hi = tl.min(least, 0).to(tl.int64), tl.max(most, 0).to(tl.int64)
    while lo < hi:
        middle = (lo + hi) >> 1
        last = middle.to(tl.int32)
        reached = tl.sum(tl.where(first <= last, mass, 0), 0).to(tl.int64)
        for begin in range(BLOCK, count, BLOCK):
            more = i < count - begin
            key = tl.load(candidates_ptr + begin + i, mask=more, other=0)
            reached += tl.sum(_mass(key, more & (key <= last), BY_MASS), 0)
        if reached >= target:
            hi = middle
        else:
            lo = middle + 1
    tl.store(limits_ptr + 2 * b + BY_MASS, hi.to(tl.int32))


@triton.jit
def _race_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, step_ptr, peaks_ptr, races_ptr,
    limits_ptr, V, ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, ANY_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr
):  # fmt: skip
    """The largest weight / E of each part of each row, of the tokens that the filters keep."""
    b = tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    if temperature <= 0:
        return
    top, _ = _peaks(peaks_ptr, tl.num_programs(0), BLOCK_S)
    v, _, x = _block(logits_ptr, b, V, BLOCK)
    weights = _weights(x, top, temperature)
    if ANY_TOP_K:
        weights = _after_top_k(weights, x, b, V, top_k_ptr, limits_ptr)
    if ANY_TOP_P and tl.load(top_p_ptr + b) < 1:
        key = -weights.to(tl.int32, bitcast=True)
        weights = tl.where(key <= tl.load(limits_ptr + 2 * b + 1), weights, 0.0)
    if ANY_MIN_P:
        weights = tl.where(weights < tl.load(min_p_ptr + b), 0.0, weights)
    best = tl.zeros((), tl.int64)  # less than any token's
    if tl.max(weights, 0) > 0:
        counter = (tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        zero = counter * 0
        step = zero + tl.load(step_ptr + b).to(tl.uint32)
        word0, word1, word2, word3 = tl.philox(tl.load(seed_ptr + b), counter, step, zero, zero)
        word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
        u = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
        t = 1.0 - u  # -log1p(-u) by Kahan's identity; log(t) is libdevice's, accurate also near 1
        noise = tl.where(t == 1.0, u, tl.div_rn(tl.log(t) * u, tl.where(t == 1.0, 1.0, t - 1.0)))
        best = tl.max(_pack(tl.div_rn(weights, noise).to(tl.int32, bitcast=True), v), 0)
    tl.store(races_ptr + b * tl.num_programs(0) + tl.program_id(0), best)


@triton.jit
def _token_kernel(
    temperature_ptr, peaks_ptr, races_ptr, out_ptr, SPLITS, ALL_GREEDY: tl.constexpr, BLOCK_S: tl.constexpr
):
    """A row's token from the maxima of its parts, -1 if the largest logit is NaN or -inf."""
    b = tl.program_id(1)
    at, valid = b * SPLITS + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_S) < SPLITS
    best = tl.max(tl.load(peaks_ptr + at, mask=valid, other=_LOWEST), 0)
    top = _logit(best)
    if not ALL_GREEDY and tl.load(temperature_ptr + b) > 0:
        best = tl.max(tl.load(races_ptr + at, mask=valid, other=0), 0)
    token = (best & _MAX_INT) ^ _MAX_INT
    tl.store(out_ptr + b, tl.where(top > float("-inf"), token, -1))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    step: Tensor,
    *,
    all_greedy: bool,
    any_top_k: bool,
    any_top_p: bool,
    any_min_p: bool,
    workspace: SamplingWorkspace | None = None,
    out: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """One token for each row of `logits` [B, V] fp32 → [B] int64, -1 for a row with NaN or nothing but -inf.

    The settings are tensors [B] as in `minirt.sampler.SamplingBatch`, and so are the flags; filters without their flag
    are not looked at. 2 launches if all are greedy, else 3, and 4 for top_k and for top_p. Nothing syncs.

    Raises:
        InputError: a wrong shape, dtype, device or stride; no vocabulary or one over 2²²; a workspace too small.
    """
    if check:
        check_tensor("logits", logits, (None, None), torch.float32, logits.device)
        floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        longs = {"seed": seed, "step": step} | ({} if out is None else {"out": out})
        for dtype, tensors in ((torch.float32, floats), (torch.int32, {"top_k": top_k}), (torch.int64, longs)):
            for name, tensor in tensors.items():
                check_tensor(name, tensor, (logits.shape[0],), dtype, logits.device)
        if not 0 < logits.shape[1] <= MAX_VOCAB:
            raise InputError("wrong vocabulary", where="logits", expected="1 to 2**22", found=logits.shape[1])
    B, V = logits.shape
    if out is None:
        out = torch.empty(B, dtype=torch.int64, device=logits.device)
    if workspace is None:
        workspace = SamplingWorkspace(B, V, logits.device, greedy_only=all_greedy)
    elif check and (workspace.max_batch < B or workspace.vocab < V or (workspace.greedy_only and not all_greedy)):
        expected = f"at least {B} rows of {V} logits" + ("" if all_greedy else ", sampled")
        found = f"{workspace.max_batch} of {workspace.vocab}" + (", greedy only" if workspace.greedy_only else "")
        raise InputError("too small", where="workspace", expected=expected, found=found)
    if not B:
        return out
    w, splits = workspace, triton.cdiv(V, _BLOCK)
    grid, sizes = (splits, B), {"BLOCK": _BLOCK, "BLOCK_S": triton.next_power_of_2(splits)}
    _peak_kernel[grid](logits, w.peaks, w.sums, V, CLEAR=not all_greedy, BLOCK=_BLOCK)
    if not all_greedy:
        rows = (temperature, top_k, top_p)
        for by_mass in [False] * any_top_k + [True] * any_top_p:
            options = {"ANY_TOP_K": any_top_k, "BY_MASS": by_mass, **sizes}
            for level in (0, 1):
                _sum_kernel[grid](logits, *rows, w.peaks, w.sums, w.limits, V, LEVEL=level, **options)
            buffers = (w.peaks, w.sums, w.limits, w.candidates, V)
            _collect_kernel[grid](logits, *rows, *buffers, **options)
            _select_kernel[(1, B)](*rows, *buffers, splits, BY_MASS=by_mass, **sizes, num_warps=8)
        kept = {"ANY_TOP_K": any_top_k, "ANY_TOP_P": any_top_p, "ANY_MIN_P": any_min_p}
        _race_kernel[grid](logits, *rows, min_p, seed, step, w.peaks, w.races, w.limits, V, **kept, **sizes)
    sizes = {"ALL_GREEDY": all_greedy, "BLOCK_S": sizes["BLOCK_S"], "num_warps": 1}
    _token_kernel[(1, B)](temperature, w.peaks, w.races, out, splits, **sizes)
    return out


def cost(B: int, V: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of a greedy batch; sampled ones read logits 2 … 8 times."""
    return 4 * B * V + 8 * B, 0
