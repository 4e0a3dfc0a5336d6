"""Top-k and top-p without sorting, for `minirt.kernels.sampling.sample`, and the functions that both files use.

Each token has a key: the larger its weight, the smaller its key. A filter finds the smallest key up to which the mass (for top-k:
the number of tokens) reaches a target, and keeps the tokens up to that key. Two passes of 16 bins each narrow the range of keys,
a third collects the tokens in that range, and one program for each row bisects them. Bin edges follow powers of two, because
the ratios of weights and of distances to the largest logit matter. Badly placed edges cost time and never change the result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import prepared

BLOCK_V = 2048
_BINS = tl.constexpr(16)
NUM_SUMS = tl.constexpr(64)  # for each row: 2 filters × (16 bins, then 15 bins and the number of candidates)
MASS_SCALE = tl.constexpr(2.0**40)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0 in fp32
_INFINITY = tl.constexpr(0x7F800000)
MAX_INT = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))


class SamplingWorkspace:
    """Scratch memory of `sample` for up to `max_batch` rows of up to `vocab` logits: a little more than 4 bytes per logit.

    Allocate it once, before any CUDA graph is captured, and use it in one stream at a time. Its contents between calls do not
    matter. With `greedy_only` it has no buffers for sampled rows.
    """

    def __init__(self, max_batch: int, vocab: int, device: torch.device | str, *, greedy_only: bool = False) -> None:
        self.max_batch, self.vocab, self.greedy_only = max_batch, vocab, greedy_only
        splits, rows = cdiv(vocab, BLOCK_V), 0 if greedy_only else max_batch
        self.row_maxima = torch.empty(max_batch, splits, dtype=torch.int64, device=device)
        self.races = torch.empty(rows, splits, dtype=torch.int64, device=device)
        self.sums = torch.empty(rows, NUM_SUMS.value, dtype=torch.int64, device=device)
        self.checks = torch.empty(rows, 2, dtype=torch.int64, device=device)  # mass heavier than the winner, total mass
        self.limits = torch.empty(rows, 2, dtype=torch.int32, device=device)  # last keys kept by top-k and by top-p
        self.candidates = torch.empty(rows, vocab, dtype=torch.int32, device=device)


@triton.jit
def sortable(x):
    """fp32 → int32 in the same order; -0 and 0 become equal, and NaN becomes the largest."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(x == x, bits ^ ((bits >> 31) & MAX_INT), MAX_INT))


@triton.jit
def logit_of(packed):
    """The fp32 logit in the upper half of a packed maximum."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(packed):
    """The index in the lower half of a packed maximum."""
    return (packed & MAX_INT) ^ MAX_INT


@triton.jit
def greedy_token(packed):
    """The token of a row whose largest logit, packed, this is: int64; -1 if it is NaN or infinite."""
    return tl.where(tl.abs(logit_of(packed)) < float("inf"), token_of(packed), -1)


@triton.jit
def pack(key, v):
    """Key and index v as one int64. The largest has the largest key and, among equal keys, the lowest index."""
    return (key.to(tl.int64) << 32) | (v ^ MAX_INT).to(tl.int64)


@triton.jit
def row_maximum(row_maxima_ptr, SPLITS, BLOCK_S: tl.constexpr):
    """A row's largest logit, and its distance to the smallest finite maximum of the row's splits."""
    s = tl.arange(0, BLOCK_S)
    packed = tl.load(row_maxima_ptr + tl.program_id(1) * SPLITS + s, mask=s < SPLITS, other=LOWEST)
    top = logit_of(tl.max(packed, 0))
    row_maxima = logit_of(packed)
    lowest = tl.min(tl.where((s < SPLITS) & (tl.abs(row_maxima) < float("inf")), row_maxima, float("inf")), 0)
    return top, top - tl.minimum(lowest, top)


@triton.jit
def weights_of(x, top, temperature):
    """exp((x - top) / temperature) in fp32; 1 where x is top. The quotient equals the eager sampler's bit for bit, exp nearly."""
    d = tl.where(x == top, 0.0, tl.maximum(tl.div_rn(x - top, temperature), -105.0))  # exp(-105) is 0 in fp32
    high = d * 1.4426950216293335  # log₂ e is this plus 1.925963e-08
    low = tl.fma(d, 1.4426950216293335, -high) + d * 1.925963033500e-08
    return tl.minimum(tl.exp2(high) * tl.fma(low, 0.6931471805599453, 1.0), 1.0)


@triton.jit
def row_block(logits_ptr, b, V, BLOCK: tl.constexpr):
    """This program's block of row b: indices, whether each is a token, and logits (-inf if not)."""
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return v, v < V, tl.load(logits_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))


@triton.jit
def after_top_k(weights, x, b, V, top_k_ptr, limits_ptr):
    """`weights`, with 0 for the tokens that top-k drops."""
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
    """Whether the short way of `sample` applies to a row: it has top-p and no top-k."""
    k = tl.load(top_k_ptr + b)
    return (tl.load(top_p_ptr + b) < 1) & ((k <= 0) | (k >= V))


@triton.jit
def _target(b, total, top_p_ptr):
    """The least mass that top-p keeps, out of `total`."""
    return tl.maximum(tl.ceil(tl.load(top_p_ptr + b).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def is_settled(b, V, top_k_ptr, top_p_ptr, checks_ptr):
    """Whether top-p keeps the winner over the whole vocabulary, so that the row needs no selection."""
    before, total = tl.load(checks_ptr + 2 * b), tl.load(checks_ptr + 2 * b + 1)
    return takes_short_way(b, V, top_k_ptr, top_p_ptr) & (before < _target(b, total, top_p_ptr))


@triton.jit
def _keyed(
    logits_ptr, b, V, top, temperature_ptr, top_k_ptr, limits_ptr, ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Logit, key and mass of each of this program's tokens. The mass of padding is 0.

    With BY_MASS (top-p) key and mass come from the weight. Otherwise (top-k) the key is the distance to the largest logit and the
    mass is 1. Equal logits have equal distances, and a larger logit has no larger distance; the bins need nothing more.
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
    """Lower edge of bin i of the first level. Edges are a factor of 4 apart for weights and, around `spread`, 2 for distances."""
    if BY_MASS:
        edge, end = (i << 24) - _ONE, 1
    else:
        anchor = tl.where(spread > 0, spread, 1.0).to(tl.int32, bitcast=True)
        edge = tl.where(i == 0, 0, tl.minimum(anchor, 0x7A000000) + ((i - 6) << 23))
        end = _INFINITY + 1
    return tl.where(i == _BINS, end, edge)


@triton.jit
def _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, LEVELS: tl.constexpr, BY_MASS: tl.constexpr):
    """The range lo ≤ key < hi after LEVELS levels of sums, and the mass that is still to be reached within it."""
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


@prepared
@triton.jit
def _sum_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, V,
    LEVEL: tl.constexpr, ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Adds to a row's sums, for each of 16 bins, the mass of this program's block that lies before the bin's end."""
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
                if end <= most:  # else the whole block lies before it
                    part = tl.sum(tl.where(key < end, mass, 0), 0)
                tl.atomic_add(sums_ptr + LEVEL * _BINS + i - 1, part.to(tl.int64), sem="relaxed")
        if LEVEL == 0:
            tl.atomic_add(sums_ptr + _BINS - 1, total.to(tl.int64), sem="relaxed")


@prepared
@triton.jit
def _collect_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, candidates_ptr, V,
    ANY_TOP_K: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Appends to a row's candidates, in any order, the keys in the found range. For top-k, these are keys of logits instead."""
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


@prepared
@triton.jit
def _select_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, sums_ptr, checks_ptr, limits_ptr, candidates_ptr, V, SPLITS,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Stores the smallest key of a row's candidates up to which their mass reaches the target, found by bisection."""
    b = tl.program_id(1)
    top, spread = row_maximum(row_maxima_ptr, SPLITS, BLOCK_S)
    if not _is_filtered(b, top, V, temperature_ptr, top_k_ptr, top_p_ptr, checks_ptr, BY_MASS):
        return
    sums_ptr += b * NUM_SUMS + (2 * _BINS if BY_MASS else 0)
    _, _, target = _bracket(sums_ptr, b, spread, top_k_ptr, top_p_ptr, 2, BY_MASS)
    count = tl.load(sums_ptr + 2 * _BINS - 1).to(tl.int32)
    candidates_ptr += b.to(tl.int64) * V
    i = tl.arange(0, BLOCK)
    # The first block stays in registers. Usually there is no other.
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
    """Store in `w.limits` the last key that top-k (with `by_mass`: top-p) keeps in each row.

    `rows`: temperature, top_k and top_p, each [B].
    """
    B, V = logits.shape
    splits = cdiv(V, BLOCK_V)
    sizes = {"BLOCK": BLOCK_V, "BLOCK_S": next_power_of_2(splits)}
    options = {"ANY_TOP_K": any_top_k, "BY_MASS": by_mass, **sizes}
    found = (w.row_maxima, w.sums, w.checks, w.limits)
    for level in (0, 1):
        _sum_kernel[(splits, B)](logits, *rows, *found, V, LEVEL=level, **options)
    _collect_kernel[(splits, B)](logits, *rows, *found, w.candidates, V, **options)
    _select_kernel[(1, B)](*rows, *found, w.candidates, V, splits, BY_MASS=by_mass, **sizes, num_warps=8)
