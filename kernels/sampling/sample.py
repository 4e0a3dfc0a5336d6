"""From logits to tokens without sorting the vocabulary: the draws of `reference.py`, which defines them.

Several programs share the vocabulary of a row. Partial results are maxima, (value, index) packed into one integer, and integer
sums of counts and masses. So a row's token depends neither on the batch nor on the scheduling of programs.

The draw is a race: the token with the largest weight / E wins, with E exponential noise. It runs over the whole vocabulary first,
in one pass, which also finds the largest logit. For each block of tokens the pass computes its best value approximately, within
`_MARGIN`. The last program of a row computes exact values in the blocks that can hold the winner, usually one.

Then a second pass checks the winner of rows with filters. If the tokens heavier than the winner hold less than a share top_p of
the mass, or with top-k are less than k, or if it is not lighter than min_p, the filter keeps the winner, and then it also wins
among the kept tokens. The other rows are listed. They select the tokens to keep and race again.

Weights are exp2 with a compensated exponent: within about 2 units in the last place of PyTorch's exp. So results can differ from
the eager sampler's in three cases: a sum of masses comes this close to top_p, a weight comes this close to min_p, or two tokens
come this close in the race. All else is equal bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.argmax import LOWEST, MAX_INT, greedy_token, logit_of, pack, sortable, token_of
from minirt.kernels.arrival import arrive_last
from minirt.kernels.attention.online_softmax import log2
from minirt.kernels.checks import check_tensor
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import prepared
from minirt.kernels.sampling.batch import DTYPES, SamplingBatch
from minirt.kernels.sampling.filters import (
    BLOCK_V,
    LIGHTEST,
    MASS_SCALE,
    MOST_ROWS,
    NUM_FACTS,
    NUM_SUMS,
    SPREAD,
    TOP,
    WINNER_LOGIT,
    WINNER_WEIGHT,
    SamplingWorkspace,
    after_top_k,
    has_top_k,
    has_top_p,
    row_block,
    select,
    target_mass,
    weights_of,
)

CASES = [{"B": B, "V": V} for B, V in ((1, 17), (3, 1), (5, 1031), (2, 4099), (7, 2048))]

MAX_VOCAB = 2**22  # the sum of this many masses, at most 2⁴⁰ each, fits in an int64


_LOG2_E = tl.constexpr(1.4426950408889634)
# Two blocks whose best values differ by more than this, as powers of two, are in the right order. An approximate value errs by at
# most 1e-4: 4e-5 in log₂ E, 3e-5 in the exponent, the rest in the sum. docs/decisions/sampling.md has the derivation.
_MARGIN = tl.constexpr(2.0**-11)


@triton.jit
def _uniform(seed, step, block, BLOCK: tl.constexpr):
    """The random number of each token in a block, see `minirt.kernels.sampling.philox.uniform`."""
    word0 = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    word2 = word0 * 0
    word1, word3 = word2 + step.to(tl.uint32), word2
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):  # as `tl.philox`, with one product of 64 bits instead of two of 32
        product0, product2 = word0.to(tl.uint64) * 0xD2511F53, word2.to(tl.uint64) * 0xCD9E8D57
        word0, word1 = (product2 >> 32).to(tl.uint32) ^ word1 ^ key0, product2.to(tl.uint32)
        word2, word3 = (product0 >> 32).to(tl.uint32) ^ word3 ^ key1, product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    return tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)


@triton.jit
def approximate_noise(u):
    """-log₂(1 - u) within a factor of 1 ± 2.1e-5."""
    return tl.where(u < 2.0**-7, u * (_LOG2_E + u * (0.5 * _LOG2_E)), -log2(1.0 - u))


@triton.jit
def _exact_noise(u):
    t = 1.0 - u  # -log1p(-u) by Kahan's identity; libdevice's log(t) is accurate near 1, too
    return tl.where(t == 1.0, u, tl.div_rn(tl.log(t) * u, tl.where(t == 1.0, 1.0, t - 1.0)))


@triton.jit
def _kept(x, rows, w, b, V):
    """`x`, with -inf for the tokens that the row's filters drop."""
    weights = weights_of(x, tl.load(w.facts + b * NUM_FACTS + TOP), tl.load(rows.temperature + b))
    if has_top_k(rows, b, V):
        x = after_top_k(x, w, b)
    if has_top_p(rows, b):
        x = tl.where(-weights.to(tl.int32, bitcast=True) <= tl.load(w.limits + 2 * b + 1), x, float("-inf"))
    return tl.where(weights < tl.load(rows.min_p + b), float("-inf"), x)


@triton.jit
def _best_score(x, largest, temperature, seed, step, BLOCK: tl.constexpr):
    """A block's largest log₂ of weight / E, approximately; weights relative to its largest logit."""
    noise = approximate_noise(_uniform(seed, step, tl.program_id(0), BLOCK))
    return tl.max((x - largest) * (_LOG2_E * tl.div_rn(1.0, temperature)) - log2(noise), 0)


@triton.jit
def _race_block(logits_ptr, rows, w, b, V, temperature, seed, step, FILTERED: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the best score of a block, -inf if it has no token. Without FILTERED, also its largest logit."""
    block, best = tl.program_id(0), float("-inf")
    at = b * tl.num_programs(0) + block
    if FILTERED:
        largest = logit_of(tl.load(w.row_maxima + at))
        if _kept(largest, rows, w, b, V) > float("-inf"):  # else the filters keep none of its tokens
            _, _, x = row_block(logits_ptr, b, block, V, BLOCK)
            best = _best_score(_kept(x, rows, w, b, V), largest, temperature, seed, step, BLOCK)
        tl.store(w.scores + at, best)
    else:
        v, _, x = row_block(logits_ptr, b, block, V, BLOCK)
        if temperature > 0:
            largest = tl.max(x, 0)
            if tl.abs(largest) < float("inf"):
                best = _best_score(x, largest, temperature, seed, step, BLOCK)
            tl.store(w.scores + at, best)
            has_nan = tl.max(x.to(tl.int32, bitcast=True) & MAX_INT, 0) > 0x7F800000
            packed = tl.where(has_nan, MAX_INT, sortable(largest)).to(tl.int64) << 32
        else:
            packed = tl.max(pack(sortable(x), v), 0)
        tl.store(w.row_maxima + at, packed)


@triton.jit
def _exact_winner(logits_ptr, rows, w, b, block, V, top, temperature, seed, step, FILTERED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest weight / E of a block, packed with its token."""
    winner = tl.zeros((), tl.int64)
    # By parts: with all tokens at once, each program would need so many registers that few run at a time.
    for part in range(4 * block, 4 * block + 4):
        v, _, x = row_block(logits_ptr, b, part, V, BLOCK // 4)
        if FILTERED:
            x = _kept(x, rows, w, b, V)
        value = tl.div_rn(weights_of(x, top, temperature), _exact_noise(_uniform(seed, step, part, BLOCK // 4)))
        winner = tl.maximum(winner, tl.max(pack(value.to(tl.int32, bitcast=True), v), 0))
    return winner


@triton.jit
def _finish_race(
    logits_ptr, rows, w, out_ptr, b, V, temperature, seed, step, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr
):  # fmt: skip
    """Stores a row's token and, for the check, its facts, from what all its programs have stored."""
    blocks, s = tl.num_programs(0), tl.arange(0, BLOCK_S)
    packed = tl.load(w.row_maxima + b * blocks + s, mask=s < blocks, other=LOWEST, cache_modifier=".cg")
    token, top = greedy_token(tl.max(packed, 0)), logit_of(tl.max(packed, 0))
    if rows.temperature is not None:
        scores = tl.load(w.scores + b * blocks + s, mask=s < blocks, other=float("-inf"), cache_modifier=".cg")
        winner_logit, winner_weight, spread = top, 1.0, 0.0
        if (temperature > 0) & (token >= 0):
            maxima = logit_of(packed)
            finite = (s < blocks) & (tl.abs(maxima) < float("inf"))
            spread = top - tl.min(tl.where(finite, maxima, top), 0)
            scores += tl.where(finite, (maxima - top) * (_LOG2_E * tl.div_rn(1.0, temperature)), float("-inf"))
            near = scores >= tl.max(scores, 0) - _MARGIN
            block, winner = tl.min(tl.where(near, s, BLOCK_S), 0), tl.zeros((), tl.int64)
            while block < BLOCK_S:
                best = _exact_winner(logits_ptr, rows, w, b, block, V, top, temperature, seed, step, FILTERED, BLOCK)
                winner = tl.maximum(winner, best)
                block = tl.min(tl.where(near & (s > block), s, BLOCK_S), 0)
            token = token_of(winner)
            winner_logit = tl.load(logits_ptr + b.to(tl.int64) * V + token)
            winner_weight = weights_of(winner_logit, top, temperature)
        if not FILTERED:
            facts = w.facts + b * NUM_FACTS
            tl.store(facts + TOP, top)
            tl.store(facts + SPREAD, spread)
            tl.store(facts + WINNER_LOGIT, winner_logit)
            tl.store(facts + WINNER_WEIGHT, winner_weight)
            tl.store(w.checks + 2 * b + tl.arange(0, 2), tl.zeros((2,), tl.int64))
            if b == 0:
                tl.store(w.unsettled, 0)
    tl.store(out_ptr + b, token)


@prepared
@triton.jit
def _race_kernel(logits_ptr, rows, w, out_ptr, V, FILTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """Stores the token of each row, drawn from all tokens. FILTERED: of each listed row, from the tokens its filters keep."""
    first = tl.program_id(1)
    end, stride = (tl.load(w.unsettled), tl.num_programs(1)) if FILTERED else (first + 1, 1)
    for place in range(first, end, stride):
        b = tl.load(w.unsettled + 1 + place) if FILTERED else place
        temperature = 0.0 if rows.temperature is None else tl.load(rows.temperature + b)
        seed, step = tl.load(rows.seed + b), tl.load(rows.step + b)
        _race_block(logits_ptr, rows, w, b, V, temperature, seed, step, FILTERED, BLOCK)
        if arrive_last(w.arrivals + b, tl.num_programs(0)):
            _finish_race(logits_ptr, rows, w, out_ptr, b, V, temperature, seed, step, FILTERED, BLOCK, BLOCK_S)


@triton.jit
def mass_parts(weights):
    """(units of 2⁻²⁰, units of 2⁻⁴⁰ that may be negative): the masses, weight · 2⁴⁰ truncated. A conversion to int64 is slow.

    The sums of either part over a block fit in 32 bits.
    """
    shifted = weights * 2.0**20 + 2.0**23  # its last bit counts as 1
    rest = tl.floor((weights * 2.0**20 - (shifted - 2.0**23)) * 2.0**20)
    return (shifted.to(tl.int32, bitcast=True) - 0x4B000000).to(tl.uint32), rest.to(tl.int32)


@prepared
@triton.jit
def _check_kernel(logits_ptr, rows, w, V, BLOCK: tl.constexpr):
    """Lists the rows whose winner a filter drops. With both top-k and top-p, also those of which this is not certain.

    Top-p's target is a share of the mass that top-k keeps. This is at least the mass of the winner and of all heavier tokens.
    """
    b = tl.program_id(1)
    facts, checks = w.facts + b * NUM_FACTS, w.checks + 2 * b
    top, winner_logit, least = tl.load(facts + TOP), tl.load(facts + WINNER_LOGIT), tl.load(facts + WINNER_WEIGHT)
    by_count, by_mass, temperature = has_top_k(rows, b, V), has_top_p(rows, b), tl.load(rows.temperature + b)
    if not (winner_logit < top):  # every filter keeps the largest logit; rows without a distribution have no other
        return
    dropped, lightest = least < tl.load(rows.min_p + b), 0.0
    if (by_count | by_mass) & ~dropped:
        _, _, x = row_block(logits_ptr, b, tl.program_id(0), V, BLOCK)
        # The mass of the heavier tokens, and their number or, with top-p alone, the mass of all tokens.
        before, other = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        if by_mass:
            weights = weights_of(x, top, temperature)
            units, rest = mass_parts(weights)
            heavier = weights > least
            before = (tl.sum(tl.where(heavier, units, 0), 0).to(tl.int64) << 20) + tl.sum(tl.where(heavier, rest, 0), 0)
            other = (tl.sum(units, 0).to(tl.int64) << 20) + tl.sum(rest, 0)
        if by_count:
            other = tl.sum((x > winner_logit).to(tl.int32), 0).to(tl.int64)
        if other > 0:
            tl.atomic_add(checks, before, sem="relaxed")
            tl.atomic_add(checks + 1, other, sem="relaxed")
        if arrive_last(w.arrivals + b, tl.num_programs(0)):
            before, other = tl.load(checks, cache_modifier=".cg"), tl.load(checks + 1, cache_modifier=".cg")
            least_kept = tl.where(by_count, before + (least * MASS_SCALE).to(tl.int64), other)
            dropped = by_count & (other >= tl.load(rows.top_k + b)) | by_mass & (before >= target_mass(rows, b, least_kept))
            lightest = tl.where(by_mass & ~by_count, least, 0.0)
    else:
        dropped &= tl.program_id(0) == 0
    if dropped:
        tl.store(facts + LIGHTEST, lightest)
        tl.store(w.sums + b * NUM_SUMS + tl.arange(0, NUM_SUMS), tl.zeros((NUM_SUMS,), tl.int64))
        tl.store(w.unsettled + 1 + tl.atomic_add(w.unsettled, 1, sem="relaxed"), b)


@prepared
@triton.jit(do_not_specialize_on_alignment=["wanted_ptr"])
def _wanted_row_maxima_kernel(logits_ptr, row_maxima_ptr, wanted_ptr, V, BLOCK: tl.constexpr):
    """Stores the largest logit of each block of each row, or nothing."""
    if tl.load(wanted_ptr) != 0:
        b, split = tl.program_id(1), tl.program_id(0)
        v, _, x = row_block(logits_ptr, b, split, V, BLOCK)
        tl.store(row_maxima_ptr + b * tl.num_programs(0) + split, tl.max(pack(sortable(x), v), 0))


@prepared
@triton.jit
def _greedy_kernel(row_maxima_ptr, out_ptr, SPLITS, stride, BLOCK_S: tl.constexpr):
    """Stores a row's token from the maxima of its tiles; -1 if the largest logit is NaN or infinite."""
    b, s = tl.program_id(0), tl.arange(0, BLOCK_S)
    tl.store(out_ptr + b, greedy_token(tl.max(tl.load(row_maxima_ptr + b * stride + s, mask=s < SPLITS, other=LOWEST), 0)))


def sample(
    logits: Tensor, rows: SamplingBatch, *, workspace: SamplingWorkspace | None = None, out: Tensor | None = None,
    row_maxima: Tensor | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """Draw one token for each row of `logits` [B, V] fp32 → [B] int64; -1 for a row with NaN or +inf, or only -inf.

    Takes 1 launch without filters; otherwise 3, plus 4 for top-k and 4 for top-p. Does not synchronize with the host.

    Args:
        workspace: scratch memory; allocated for this call if None.
        row_maxima: [B, P] int64 with any row stride: the largest logit in each of P tiles of a row, as an LM head stores them
            (`RowMaxima`). If all rows are greedy, the kernel reads only these.
    Raises:
        InputError: a wrong shape, dtype, device or stride; an empty vocabulary or one above 2²²; a workspace that is too small.
    """
    all_greedy = rows.temperature is None
    if check:
        check_tensor("logits", logits, (None, None), torch.float32, logits.device)
        columns = zip((*rows._fields, "out"), (*rows, out), (*DTYPES, torch.int64), strict=True)
        for name, tensor, dtype in columns:
            if tensor is not None:
                check_tensor(name, tensor, (logits.shape[0],), dtype, logits.device)
        given = None if row_maxima is None else (row_maxima.dtype, row_maxima.ndim, len(row_maxima), row_maxima.stride(-1))
        if row_maxima is not None and given != (torch.int64, 2, len(logits), 1):
            shown = f"{row_maxima.dtype} {list(row_maxima.shape)}, strides {row_maxima.stride()}"
            expected = f"int64 [{len(logits)}, any], rows contiguous"
            raise InputError("wrong shape", where="row_maxima", expected=expected, found=shown)
        if not 0 < logits.shape[1] <= MAX_VOCAB:
            raise InputError("wrong vocabulary size", where="logits", expected="1 to 2**22", found=logits.shape[1])
    B, V = logits.shape
    if out is None:
        out = torch.empty(B, dtype=torch.int64, device=logits.device)
    if workspace is None:
        workspace = SamplingWorkspace(B, V, logits.device, greedy_only=all_greedy)
    elif check and (workspace.max_batch < B or workspace.vocab < V or (workspace.greedy_only and not all_greedy)):
        expected = f"at least {B} rows of {V} logits" + ("" if all_greedy else " with buffers for sampling")
        shown = f"{workspace.max_batch} rows of {workspace.vocab} logits" + (", greedy only" if workspace.greedy_only else "")
        raise InputError("too small", where="workspace", expected=expected, found=shown)
    if not B:
        return out
    if all_greedy and row_maxima is not None:
        parts = row_maxima.shape[1]
        block = next_power_of_2(parts)
        warps = max(1, min(4, block // 256))
        _greedy_kernel[(B,)](row_maxima, out, parts, row_maxima.stride(0), BLOCK_S=block, num_warps=warps)
        return out
    w, splits = workspace.buffers, cdiv(V, BLOCK_V)
    sizes = {"BLOCK": BLOCK_V, "BLOCK_S": next_power_of_2(splits)}
    _race_kernel[(splits, B)](logits, rows.needed(()), w, out, V, FILTERED=False, **sizes)
    if rows.filtered:
        by_count, by_mass = rows.top_k is not None, rows.top_p is not None
        rows = rows.with_all_filters(workspace.unfiltered)  # one form of the kernels for all filters
        _check_kernel[(splits if by_count or by_mass else 1, B)](logits, rows, w, V, BLOCK=BLOCK_V)
        if by_count:
            select(logits, rows, w, by_mass=False)
        if by_mass:
            select(logits, rows, w, by_mass=True)
        _race_kernel[(splits, min(B, MOST_ROWS))](logits, rows, w, out, V, FILTERED=True, **sizes)
    return out


def row_maxima(logits: Tensor, wanted: Tensor, workspace: SamplingWorkspace) -> Tensor:
    """Row maxima, as an LM head stores them (`RowMaxima`), of `logits` [B, V] fp32 → [B, P] int64, a part of the workspace.

    If `wanted` [1] int32 is 0, they are not computed, and what the result holds has no meaning.
    """
    (B, V), splits = logits.shape, cdiv(logits.shape[1], BLOCK_V)
    row_maxima = workspace.buffers.row_maxima
    _wanted_row_maxima_kernel[(splits, B)](logits, row_maxima, wanted, V, BLOCK=BLOCK_V)
    return row_maxima.view(-1)[: B * splits].view(B, splits)


def cost(B: int, V: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) without filters. Rows with filters read their logits again."""
    return 4 * B * V + 8 * B, 0
