"""What top-k and top-p keep: the selection for `minirt.kernels.sampling.sample`, and what both share.

A filter is a selection: the smallest key (the larger the weight, the smaller its key) up to which the mass (for top-k:
the count) reaches a target. Two passes of 16 bins each find a short range of keys that holds it, a third collects the
tokens in that range, and one program a row bisects those. The bins follow powers of two, since what matters of weights
and of distances to the largest logit is their ratio; ill-chosen bins cost time only, never the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 2048
_BINS = tl.constexpr(16)
NUM_SUMS = tl.constexpr(64)  # of a row: 2 filters × (16 bins, then 15 bins and the number of candidates)
MASS_SCALE = tl.constexpr(2.0**40)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0 and of infinity
_INFINITY = tl.constexpr(0x7F800000)
MAX_INT = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))


class SamplingWorkspace:
    """Scratch of `sample` for up to `max_batch` rows of up to `vocab` logits: 4 bytes per logit and a little more.

    Allocated once, before any CUDA graph is captured, and used by one stream at a time. What it holds between calls does
    not matter. `greedy_only` leaves out all that sampled rows need.
    """

    def __init__(self, max_batch: int, vocab: int, device: torch.device | str, *, greedy_only: bool = False) -> None:
        self.max_batch, self.vocab, self.greedy_only = max_batch, vocab, greedy_only
        splits, rows = triton.cdiv(vocab, BLOCK_V), 0 if greedy_only else max_batch
        self.row_maxima = torch.empty(max_batch, splits, dtype=torch.int64, device=device)
        self.races = torch.empty(rows, splits, dtype=torch.int64, device=device)
        self.sums = torch.empty(rows, NUM_SUMS.value, dtype=torch.int64, device=device)
        self.checks = torch.empty(rows, 2, dtype=torch.int64, device=device)  # mass before a winner, of all
        self.limits = torch.empty(rows, 2, dtype=torch.int32, device=device)  # last key kept by top-k, top-p
        self.candidates = torch.empty(rows, vocab, dtype=torch.int32, device=device)


@triton.jit
def sortable(x):
    """fp32 → int32 in the same order; -0 and 0 become one, NaN comes after everything."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(x == x, bits ^ ((bits >> 31) & MAX_INT), MAX_INT))


@triton.jit
def logit_of(packed):
    """The fp32 value in the upper half of a packed maximum."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, v):
    """Ordered by key, then lowest index first."""
    return (key.to(tl.int64) << 32) | (v ^ MAX_INT).to(tl.int64)


@triton.jit
def row_maximum(row_maxima_ptr, SPLITS, BLOCK_S: tl.constexpr):
    """A row's largest logit, and its distance from the smallest finite one among the largest of each split."""
    s = tl.arange(0, BLOCK_S)
    packed = tl.load(row_maxima_ptr + tl.program_id(1) * SPLITS + s, mask=s < SPLITS, other=LOWEST)
    top = logit_of(tl.max(packed, 0))
    row_maxima = logit_of(packed)
    lowest = tl.min(tl.where((s < SPLITS) & (tl.abs(row_maxima) < float("inf")), row_maxima, float("inf")), 0)
    return top, top - tl.minimum(lowest, top)


@triton.jit
def weights_of(x, top, temperature):
    """exp((x - top) / temperature), 1 where x is top, in fp32: the eager sampler's quotient, bit for bit, and its exp."""
    d = tl.where(x == top, 0.0, tl.maximum(tl.div_rn(x - top, temperature), -105.0))  # exp(-105) is 0
    high = d * 1.4426950216293335  # log₂ e is this and 1.925963e-08
    low = tl.fma(d, 1.4426950216293335, -high) + d * 1.925963033500e-08
    return tl.minimum(tl.exp2(high) * tl.fma(low, 0.6931471805599453, 1.0), 1.0)


@triton.jit
def row_block(logits_ptr, b, V, BLOCK: tl.constexpr):
    """This program's part of row b: indices, whether they are tokens, logits (-inf if not)."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return v, v < V, tl.load(logits_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))


@triton.jit
def after_top_k(weights, x, b, V, top_k_ptr, limits_ptr):
    k = tl.load(top_k_ptr + b)
    if (k > 0) & (k < V):
        weights = tl.where(~sortable(x) <= tl.load(limits_ptr + 2 * b), weights, 0.0)
    return weights


@triton.jit
def _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, checks_ptr, BY_MASS: tl.constexpr):
    """Whether a row still needs this filter's selection."""
    k = tl.load(top_k_ptr + b)
    asked = (k > 0) & (k < V)
    if BY_MASS:
        asked = (tl.load(top_p_ptr + b) < 1) & ~is_settled(b, V, top_k_ptr, top_p_ptr, checks_ptr)
    return asked & (tl.load(temperature_ptr + b) > 0) & (top > float("-inf"))


@triton.jit
def takes_short_way(b, V, top_k_ptr, top_p_ptr):
    k = tl.load(top_k_ptr + b)
    return (tl.load(top_p_ptr + b) < 1) & ((k <= 0) | (k >= V))


@triton.jit
def _target(b, total, top_p_ptr):
    """The mass that top-p keeps at least, of `total`."""
    return tl.maximum(tl.ceil(tl.load(top_p_ptr + b).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def is_settled(b, V, top_k_ptr, top_p_ptr, checks_ptr):
    """Whether the winner over the whole vocabulary is one that top-p keeps."""
    before, total = tl.load(checks_ptr + 2 * b), tl.load(checks_ptr + 2 * b + 1)
    return takes_short_way(b, V, top_k_ptr, top_p_ptr) & (before < _target(b, total, top_p_ptr))


@triton.jit
def _keyed(
    logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """x, key and mass of this program's tokens: by weight, or by distance from the top and 1 each. Mass 0 if no token.

    Equal logits are at equal distances and larger ones no farther, which is all that the bins need.
    """
    _, valid, x = row_block(logits_ptr, b, V, BLOCK)
    if BY_MASS:
        weights = weights_of(x, top, tl.load(temperature_ptr + b))
        if ANY_TOP_K:
            weights = after_top_k(weights, x, b, V, top_k_ptr, limits_ptr)
        return x, -weights.to(tl.int32, bitcast=True), (weights * MASS_SCALE).to(tl.int64)
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
        target = tl.load(top_k_ptr + b).to(tl.int64)
        if BY_MASS:
            target = _target(b, tl.load(sums_ptr + _BINS - 1), top_p_ptr)
        found = tl.sum((sums < target).to(tl.int32), 0)
        target -= tl.max(tl.where(sums < target, sums, 0), 0)
        lo, hi = _edge(found, spread, BY_MASS), _edge(found + 1, spread, BY_MASS)
        if LEVELS == 2:
            step = (hi - lo + _BINS - 1) // _BINS
            sums = tl.load(sums_ptr + _BINS + i, mask=i < _BINS - 1, other=-LOWEST - 1)
            found = tl.sum((sums < target).to(tl.int32), 0)
            target -= tl.max(tl.where(sums < target, sums, 0), 0)
            lo, hi = lo + found * step, lo + (found + 1) * step
        return lo, hi, target


@triton.jit
def _sum_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, V,
    LEVEL: tl.constexpr, ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Adds to a row's sums [bin] the mass of this part that lies before the end of each of 16 bins."""
    b = tl.program_id(1)
    top, spread = row_maximum(row_maxima_ptr, tl.num_programs(0), BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, checks_ptr, BY_MASS):
        return
    sums_ptr += b * NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    lo, hi, _ = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, LEVEL, BY_MASS)
    _, key, mass = _keyed(logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K, BY_MASS, BLOCK)
    mass = tl.where((key >= lo) & (key < hi), mass, 0)
    total = tl.sum(mass, 0)
    if total > 0:
        least = tl.min(tl.where(mass > 0, key, MAX_INT), 0)
        most = tl.max(tl.where(mass > 0, key, -MAX_INT), 0)
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
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, candidates_ptr, V,
    ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Appends to a row's candidates, in any order, the keys of this part in the range found (for top-k of its logits)."""
    b = tl.program_id(1)
    top, spread = row_maximum(row_maxima_ptr, tl.num_programs(0), BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, checks_ptr, BY_MASS):
        return
    sums_ptr += b * NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    lo, hi, _ = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, 2, BY_MASS)
    x, key, mass = _keyed(logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K, BY_MASS, BLOCK)
    inside = (key >= lo) & (key < hi) & (mass > 0)
    if not BY_MASS:
        key = ~sortable(x)
    number = tl.sum(inside.to(tl.int32), 0)
    if number > 0:
        begin = tl.atomic_add(sums_ptr + 2 * _BINS - 1, number.to(tl.int64), sem="relaxed")
        at = begin + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + b.to(tl.int64) * V + at, key, mask=inside)


@triton.jit
def _mass(key, counted, BY_MASS: tl.constexpr):
    return tl.where(counted, ((-key).to(tl.float32, bitcast=True) * MASS_SCALE).to(tl.int64) if BY_MASS else 1, 0)


@triton.jit
def _select_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, candidates_ptr, V, SPLITS,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """The smallest key of a row's candidates up to which their mass reaches the target, by bisection."""
    b = tl.program_id(1)
    top, spread = row_maximum(row_maxima_ptr, SPLITS, BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, checks_ptr, BY_MASS):
        return
    sums_ptr += b * NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    _, _, target = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, 2, BY_MASS)
    count = tl.load(sums_ptr + 2 * _BINS - 1).to(tl.int32)
    candidates_ptr += b.to(tl.int64) * V
    i = tl.arange(0, BLOCK)
    # The first block, as a rule the only one, stays in registers.
    first = tl.load(candidates_ptr + i, mask=i < count, other=0)
    mass = _mass(first, i < count, BY_MASS)
    least = tl.where(i < count, first, MAX_INT)
    most = tl.where(i < count, first, -MAX_INT - 1)
    for begin in range(BLOCK, count, BLOCK):
        more = i < count - begin
        key = tl.load(candidates_ptr + begin + i, mask=more, other=0)
        least = tl.minimum(least, tl.where(more, key, MAX_INT))
        most = tl.maximum(most, tl.where(more, key, -MAX_INT - 1))
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


def select(
    logits: Tensor, rows: tuple[Tensor, ...], w: SamplingWorkspace, any_top_k: bool, by_mass: bool
) -> None:
    """Find the last key that top-k, or with `by_mass` top-p, keeps of each row."""
    B, V = logits.shape
    splits = triton.cdiv(V, BLOCK_V)
    sizes = {"BLOCK": BLOCK_V, "BLOCK_S": triton.next_power_of_2(splits)}
    options = {"ANY_TOP_K": any_top_k, "BY_MASS": by_mass, **sizes}
    found = (w.row_maxima, w.sums, w.checks, w.limits)
    for level in (0, 1):
        _sum_kernel[(splits, B)](logits, *rows, *found, V, LEVEL=level, **options)
    _collect_kernel[(splits, B)](logits, *rows, *found, w.candidates, V, **options)
    _select_kernel[(1, B)](*rows, *found, w.candidates, V, splits, BY_MASS=by_mass, **sizes, num_warps=8)
