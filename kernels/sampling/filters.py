"""Top-k and top-p without sorting, for `minirt.kernels.sampling.sample`, and the functions that both files use.

Each token has a key: the larger its weight, the smaller its key. A filter finds the smallest key up to which the mass (for top-k:
the number of tokens) reaches a target, and keeps the tokens up to that key. Two passes of 16 bins each narrow the range of keys.
A third collects the tokens in that range, and one program for each row bisects them. The edges of bins never change the result.

These kernels work on a list of rows, which the device makes. A fixed number of programs shares it, whatever its length is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.argmax import LOWEST, MAX_INT, sortable
from minirt.kernels.launch import cdiv
from minirt.kernels.prepared import prepared
from minirt.kernels.sampling.batch import SamplingBatch

BLOCK_V = 2048
_BINS = tl.constexpr(16)
NUM_SUMS = tl.constexpr(64)  # for each row: 2 filters × (16 bins, then 15 bins and the number of candidates)
MASS_SCALE = tl.constexpr(2.0**40)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0 in fp32
_INFINITY = tl.constexpr(0x7F800000)
_LEAST = tl.constexpr(2.0**-40)  # lighter tokens have no mass
# What is known of a row: its largest logit, the distance from there to the smallest finite maximum of a block, the winner's logit
# and weight, and the weight of the lightest token that top-p may keep.
NUM_FACTS, TOP, SPREAD, WINNER_LOGIT, WINNER_WEIGHT, LIGHTEST = (tl.constexpr(i) for i in (5, 0, 1, 2, 3, 4))
MOST_ROWS = 32  # of a list, that programs work on at a time


class Buffers(NamedTuple):
    """What the kernels of a call tell each other.

    Attributes:
        row_maxima: [B, blocks] int64, the largest logit of each block of tokens.
        arrivals: [B] int32, how many programs of a row have ended. Zero between launches.
        scores: [B, blocks] fp32, the race's best score in each block.
        facts: [B, NUM_FACTS] fp32, see there.
        checks: [B, 2] int64, mass of the tokens heavier than the winner, and with top-k their number, else the mass of all.
        unsettled: [1 + B] int32, the number of rows whose winner a filter drops, or may drop, and these rows in any order.
        sums: [B, NUM_SUMS] int64, of bins.
        limits: [B, 2] int32, the last keys that top-k and top-p keep.
        candidates: [B, V] int32, keys.
    """

    row_maxima: Tensor
    arrivals: Tensor
    scores: Tensor
    facts: Tensor
    checks: Tensor
    unsettled: Tensor
    sums: Tensor
    limits: Tensor
    candidates: Tensor


class SamplingWorkspace:
    """Scratch memory of `sample` for up to `max_batch` rows of up to `vocab` logits: a little more than 4 bytes per logit.

    Allocate it once, before any CUDA graph is captured, and use it in one stream at a time. With `greedy_only` it has no
    buffers for sampled rows.
    """

    def __init__(self, max_batch: int, vocab: int, device: torch.device | str, *, greedy_only: bool = False) -> None:
        self.max_batch, self.vocab, self.greedy_only = max_batch, vocab, greedy_only
        splits, rows = cdiv(vocab, BLOCK_V), 0 if greedy_only else max_batch
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        shapes = (
            ((max_batch, splits), i64), ((max_batch,), i32), ((rows, splits), f32), ((rows, NUM_FACTS.value), f32),
            ((rows, 2), i64), ((1 + rows,), i32), ((rows, NUM_SUMS.value), i64), ((rows, 2), i32), ((rows, vocab), i32),
        )  # fmt: skip
        self.buffers = Buffers(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes))
        self.buffers.arrivals.zero_()
        self.unfiltered = SamplingBatch.unfiltered(rows, device)


@triton.jit
def divided(d, temperature):
    """d / temperature, rounded as a division rounds, without its branches (Markstein, IBM J. Res. Dev. 34, 1990).

    The product with the correctly rounded reciprocal is at most one unit off, and the correction rounds correctly. A quotient may
    be one unit off if |d| < 2⁻¹⁰⁰ or temperature > 2¹²⁶. An overflow gives NaN.
    """
    inverse = tl.div_rn(1.0, temperature)
    quotient = d * inverse
    return tl.fma(tl.fma(-quotient, temperature, d), inverse, quotient)


@triton.jit
def weights_of(x, top, temperature):
    """exp((x - top) / temperature) in fp32, for a finite `top`. The quotient is the eager sampler's bit for bit, exp nearly."""
    d = tl.maximum(divided(x - top, temperature), -105.0)  # exp(-105) is 0 in fp32; of NaN and a number, the number
    high = d * 1.4426950216293335  # log₂ e is this plus 1.925963e-08
    low = tl.fma(d, 1.4426950216293335, -high) + d * 1.925963033500e-08
    return tl.minimum(tl.exp2(high) * tl.fma(low, 0.6931471805599453, 1.0), 1.0)


@triton.jit
def row_block(logits_ptr, b, block, V, BLOCK: tl.constexpr):
    """A block of row b: indices, whether each is a token, and logits (-inf if not)."""
    v = block * BLOCK + tl.arange(0, BLOCK)
    return v, v < V, tl.load(logits_ptr + b.to(tl.int64) * V + v, mask=v < V, other=float("-inf"))


@triton.jit
def has_top_k(rows, b, V):
    """Whether row b asks for top-k."""
    k = tl.load(rows.top_k + b)
    return (k > 0) & (k < V)


@triton.jit
def has_top_p(rows, b):
    """Whether row b asks for top-p."""
    return tl.load(rows.top_p + b) < 1


@triton.jit
def after_top_k(x, w, b):
    """`x`, with -inf for the tokens that top-k drops."""
    return tl.where(~sortable(x) <= tl.load(w.limits + 2 * b), x, float("-inf"))


@triton.jit
def target_mass(rows, b, total):
    """The least mass that top-p keeps, out of `total`."""
    return tl.maximum(tl.ceil(tl.load(rows.top_p + b).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _keyed(logits_ptr, rows, w, b, V, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Logit, key and mass of each of this program's tokens. The mass of padding is 0.

    With BY_MASS (top-p) key and mass come from the weight. Otherwise (top-k) the key is the distance to the largest logit and the
    mass is 1.
    """
    top = tl.load(w.facts + b * NUM_FACTS + TOP)
    _, valid, x = row_block(logits_ptr, b, tl.program_id(0), V, BLOCK)
    if BY_MASS:
        if has_top_k(rows, b, V):
            x = after_top_k(x, w, b)
        weights = weights_of(x, top, tl.load(rows.temperature + b))
        return x, -weights.to(tl.int32, bitcast=True), (weights * MASS_SCALE).to(tl.int64)
    else:
        return x, (top - x).to(tl.int32, bitcast=True), valid.to(tl.int32)


@triton.jit
def _edge(i, w, b, BY_MASS: tl.constexpr):
    """Lower edge of bin i of the first level.

    Edges of weights are equal factors apart, from 1 to the lightest that the row may keep. Edges of distances are a factor of 2
    apart, around the distance of the largest logit to the smallest maximum of a block.
    """
    facts = w.facts + b * NUM_FACTS
    if BY_MASS:
        least = tl.load(facts + LIGHTEST)
        lightest = tl.maximum(least, _LEAST).to(tl.int32, bitcast=True)
        edge, end = i * ((_ONE - lightest + _BINS - 1) // _BINS) - _ONE, tl.where(least >= _LEAST, 1 - lightest, 1)
    else:
        spread = tl.load(facts + SPREAD)
        anchor = tl.where(spread > 0, spread, 1.0).to(tl.int32, bitcast=True)
        edge = tl.where(i == 0, 0, tl.minimum(anchor, 0x7A000000) + ((i - 6) << 23))
        end = _INFINITY + 1
    return tl.where(i == _BINS, end, edge)


@triton.jit
def _bracket(sums_ptr, rows, w, b, LEVELS: tl.constexpr, BY_MASS: tl.constexpr):
    """The range lo ≤ key < hi after one or two levels of sums, and the mass that is still to be reached within it."""
    i = tl.arange(0, _BINS)
    sums = tl.load(sums_ptr + i)
    target = target_mass(rows, b, tl.load(sums_ptr + _BINS - 1)) if BY_MASS else tl.load(rows.top_k + b).to(tl.int64)
    bin_index = tl.sum((sums < target).to(tl.int32), 0)
    target -= tl.max(tl.where(sums < target, sums, 0), 0)
    lo, hi = _edge(bin_index, w, b, BY_MASS), _edge(bin_index + 1, w, b, BY_MASS)
    if LEVELS == 2:
        step = (hi - lo + _BINS - 1) // _BINS
        sums = tl.load(sums_ptr + _BINS + i, mask=i < _BINS - 1, other=-LOWEST - 1)
        bin_index = tl.sum((sums < target).to(tl.int32), 0)
        target -= tl.max(tl.where(sums < target, sums, 0), 0)
        lo, hi = lo + bin_index * step, lo + (bin_index + 1) * step
    return lo, hi, target


@triton.jit
def _can_keep(rows, w, b, V, BY_MASS: tl.constexpr):
    """Whether top-k, if it comes before this filter, keeps a token of this program's block: its largest logit."""
    if BY_MASS:
        largest = tl.load(w.row_maxima + b * tl.num_programs(0) + tl.program_id(0)) >> 32
        return ~has_top_k(rows, b, V) | (~largest.to(tl.int32) <= tl.load(w.limits + 2 * b))
    else:
        return b >= 0


@triton.jit
def _sums_of(rows, w, b, V, BY_MASS: tl.constexpr):
    """The sums of a row's filter, and whether the row has the filter."""
    return w.sums + b * NUM_SUMS + (2 * _BINS if BY_MASS else 0), has_top_p(rows, b) if BY_MASS else has_top_k(rows, b, V)


@prepared
@triton.jit
def _sum_kernel(logits_ptr, rows, w, V, LEVEL: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to the sums of each listed row, for each of 16 bins, the mass of a block that lies before the bin's end."""
    for place in range(tl.program_id(1), tl.load(w.unsettled), tl.num_programs(1)):
        b = tl.load(w.unsettled + 1 + place)
        sums, asked = _sums_of(rows, w, b, V, BY_MASS)
        if asked & _can_keep(rows, w, b, V, BY_MASS):
            _x, key, mass = _keyed(logits_ptr, rows, w, b, V, BY_MASS, BLOCK)
            lo, step = 0, 0
            if LEVEL == 1:
                lo, hi, _target = _bracket(sums, rows, w, b, 1, BY_MASS)
                step = (hi - lo + _BINS - 1) // _BINS
                mass = tl.where((key >= lo) & (key < hi), mass, 0)
            total = tl.sum(mass, 0)
            if total > 0:
                least = tl.min(tl.where(mass > 0, key, MAX_INT), 0)
                most = tl.max(tl.where(mass > 0, key, -MAX_INT), 0)
                for i in range(1, _BINS):
                    end = _edge(i, w, b, BY_MASS) if LEVEL == 0 else lo + i * step
                    if end > least:
                        part = total
                        if end <= most:  # else the whole block lies before it
                            part = tl.sum(tl.where(key < end, mass, 0), 0)
                        tl.atomic_add(sums + LEVEL * _BINS + i - 1, part.to(tl.int64), sem="relaxed")
                if LEVEL == 0:
                    tl.atomic_add(sums + _BINS - 1, total.to(tl.int64), sem="relaxed")


@prepared
@triton.jit
def _collect_kernel(logits_ptr, rows, w, V, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Appends to each listed row's candidates, in any order, the keys in the found range; for top-k, keys of logits."""
    for place in range(tl.program_id(1), tl.load(w.unsettled), tl.num_programs(1)):
        b = tl.load(w.unsettled + 1 + place)
        sums, asked = _sums_of(rows, w, b, V, BY_MASS)
        if asked & _can_keep(rows, w, b, V, BY_MASS):
            lo, hi, _target = _bracket(sums, rows, w, b, 2, BY_MASS)
            x, key, mass = _keyed(logits_ptr, rows, w, b, V, BY_MASS, BLOCK)
            inside = (key >= lo) & (key < hi) & (mass > 0)
            if not BY_MASS:
                key = ~sortable(x)
            number = tl.sum(inside.to(tl.int32), 0)
            if number > 0:
                begin = tl.atomic_add(sums + 2 * _BINS - 1, number.to(tl.int64), sem="relaxed")
                at = begin + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(w.candidates + b.to(tl.int64) * V + at, key, mask=inside)


@prepared
@triton.jit
def _select_kernel(rows, w, V, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the limit of each listed row, by its candidates."""
    for place in range(tl.program_id(0), tl.load(w.unsettled), tl.num_programs(0)):
        b = tl.load(w.unsettled + 1 + place)
        sums, asked = _sums_of(rows, w, b, V, BY_MASS)
        if asked:
            _lo, _hi, target = _bracket(sums, rows, w, b, 2, BY_MASS)
            count = tl.load(sums + 2 * _BINS - 1).to(tl.int32)
            limit = _smallest_key(w.candidates + b.to(tl.int64) * V, count, target, BY_MASS, BLOCK)
            tl.store(w.limits + 2 * b + BY_MASS, limit)


@triton.jit
def _mass(key, counted, BY_MASS: tl.constexpr):
    return tl.where(counted, ((-key).to(tl.float32, bitcast=True) * MASS_SCALE).to(tl.int64) if BY_MASS else 1, 0)


@triton.jit
def _smallest_key(candidates_ptr, count, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest of `count` keys, in any order, up to which their mass reaches the target, found by bisection."""
    i = tl.arange(0, BLOCK)
    # The first block stays in registers. Usually there is no other.
    first = tl.load(candidates_ptr + i, mask=i < count, other=0)
    mass = _mass(first, i < count, BY_MASS)
    least = tl.where(i < count, first, MAX_INT)
    most = tl.where(i < count, first, -MAX_INT - 1)
    for begin in range(BLOCK, count, BLOCK):
        inside = i < count - begin
        key = tl.load(candidates_ptr + begin + i, mask=inside, other=0)
        least = tl.minimum(least, tl.where(inside, key, MAX_INT))
        most = tl.maximum(most, tl.where(inside, key, -MAX_INT - 1))
    lo, hi = tl.min(least, 0).to(tl.int64), tl.max(most, 0).to(tl.int64)
    while lo < hi:
        middle = (lo + hi) >> 1
        last = middle.to(tl.int32)
        reached = tl.sum(tl.where(first <= last, mass, 0), 0).to(tl.int64)
        for begin in range(BLOCK, count, BLOCK):
            inside = i < count - begin
            key = tl.load(candidates_ptr + begin + i, mask=inside, other=0)
            reached += tl.sum(_mass(key, inside & (key <= last), BY_MASS), 0)
        if reached >= target:
            hi = middle
        else:
            lo = middle + 1
    return hi.to(tl.int32)


def select(logits: Tensor, rows: SamplingBatch, w: Buffers, by_mass: bool) -> None:
    """Store in `w.limits` the last key that top-k (with `by_mass`: top-p) keeps in each row of the list `w.unsettled`."""
    B, V = logits.shape
    grid, options = (cdiv(V, BLOCK_V), min(B, MOST_ROWS)), {"BY_MASS": by_mass, "BLOCK": BLOCK_V}
    for level in (0, 1):
        _sum_kernel[grid](logits, rows, w, V, LEVEL=level, **options)
    _collect_kernel[grid](logits, rows, w, V, **options)
    _select_kernel[(B,)](rows, w, V, **options, num_warps=8)
