"""From logits to tokens without sorting the vocabulary: the same draws as `minirt.engine.sampler.sample`, which defines them.

Several programs share the vocabulary of a row, and every launch is one pass over it. Partial results are integers: (value, index)
packed into one for maxima, fixed-point numbers for sums of counts and masses. Their order does not matter, so a row's token
depends neither on the batch nor on the scheduling of programs.

The draw is a race: the token with the largest weight / E wins, with E exponential noise. A row with top-p and no top-k first
tries a short way: it runs the race over the whole vocabulary. If the tokens heavier than the winner hold less than a share top_p
of the mass, top-p keeps the winner, which then also wins among the kept tokens. This happens for a share top_p of the draws. The
other rows select the tokens to keep and race again.

Weights are exp2 with a compensated exponent: within about 2 units in the last place of PyTorch's exp. So results can differ from
the eager sampler's in three cases: a sum of masses comes this close to top_p, a weight comes this close to min_p, or two tokens
come this close in the race. All else is equal bit for bit.
"""

from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_tensor
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import prepared
from minirt.kernels.sampling.filters import (
    BLOCK_V,
    LOWEST,
    MASS_SCALE,
    NUM_SUMS,
    SamplingWorkspace,
    after_top_k,
    greedy_token,
    is_settled,
    pack,
    row_block,
    row_maximum,
    select,
    sortable,
    takes_short_way,
    token_of,
    weights_of,
)

CASES = [{"B": B, "V": V} for B, V in ((1, 17), (3, 1), (5, 1031), (2, 4099), (7, 2048))]

MAX_VOCAB = 2**22  # the sum of this many masses, at most 2⁴⁰ each, fits in an int64


class Variant(NamedTuple):
    """What the sampling kernels are compiled for: the flags of `sample`."""

    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


VARIANTS = (Variant(True, False, False, False), *(Variant(False, *flags) for flags in product((False, True), repeat=3)))


@prepared
@triton.jit
def _row_maxima_kernel(logits_ptr, row_maxima_ptr, sums_ptr, checks_ptr, V, CLEAR: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the largest logit of each block of each row. CLEAR: also zeroes the sums for the kernels that follow."""
    b, split = tl.program_id(1), tl.program_id(0)
    v, _, x = row_block(logits_ptr, b, V, BLOCK)
    tl.store(row_maxima_ptr + b * tl.num_programs(0) + split, tl.max(pack(sortable(x), v), 0))
    if CLEAR and split == 0:
        tl.store(sums_ptr + b * NUM_SUMS + tl.arange(0, NUM_SUMS), tl.zeros((NUM_SUMS,), tl.int64))
        tl.store(checks_ptr + 2 * b + tl.arange(0, 2), tl.zeros((2,), tl.int64))


@prepared
@triton.jit(do_not_specialize_on_alignment=["wanted_ptr"])
def _wanted_row_maxima_kernel(logits_ptr, row_maxima_ptr, wanted_ptr, V, BLOCK: tl.constexpr):
    """`_row_maxima_kernel` without zeros, or nothing."""
    if tl.load(wanted_ptr) != 0:
        b, split = tl.program_id(1), tl.program_id(0)
        v, _, x = row_block(logits_ptr, b, V, BLOCK)
        tl.store(row_maxima_ptr + b * tl.num_programs(0) + split, tl.max(pack(sortable(x), v), 0))


@prepared
@triton.jit
def _race_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, step_ptr, row_maxima_ptr, races_ptr, checks_ptr,
    limits_ptr, V, SHORT: tl.constexpr, ANY_TOP_K: tl.constexpr, ANY_TOP_P: tl.constexpr, ANY_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Stores the largest weight / E of each block of each row, over the tokens that the filters keep.

    SHORT: only in rows that try the short way, and without top-p. Otherwise: only in rows that the short way has not settled.
    """
    b = tl.program_id(1)
    temperature = tl.load(temperature_ptr + b)
    if temperature <= 0:
        return
    if SHORT:  # noqa: SIM102 (no `and` of a constexpr and a tensor)
        if not takes_short_way(b, V, top_k_ptr, top_p_ptr):
            return
    if ANY_TOP_P and not SHORT:  # noqa: SIM102
        if is_settled(b, V, top_k_ptr, top_p_ptr, checks_ptr):
            return
    top, _ = row_maximum(row_maxima_ptr, tl.num_programs(0), BLOCK_S)
    v, _, x = row_block(logits_ptr, b, V, BLOCK)
    weights = weights_of(x, top, temperature)
    if ANY_TOP_K:
        weights = after_top_k(weights, x, b, V, top_k_ptr, limits_ptr)
    if ANY_TOP_P and not SHORT and tl.load(top_p_ptr + b) < 1:
        key = -weights.to(tl.int32, bitcast=True)
        weights = tl.where(key <= tl.load(limits_ptr + 2 * b + 1), weights, 0.0)
    if ANY_MIN_P:
        weights = tl.where(weights < tl.load(min_p_ptr + b), 0.0, weights)
    best = tl.zeros((), tl.int64)  # less than any token's value
    if tl.max(weights, 0) > 0:
        counter = (tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        zero = counter * 0
        step = zero + tl.load(step_ptr + b).to(tl.uint32)
        word0, word1, word2, word3 = tl.philox(tl.load(seed_ptr + b), counter, step, zero, zero)
        word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
        u = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
        t = 1.0 - u  # -log1p(-u) by Kahan's identity; libdevice's log(t) is accurate near 1, too
        noise = tl.where(t == 1.0, u, tl.div_rn(tl.log(t) * u, tl.where(t == 1.0, 1.0, t - 1.0)))
        best = tl.max(pack(tl.div_rn(weights, noise).to(tl.int32, bitcast=True), v), 0)
    tl.store(races_ptr + b * tl.num_programs(0) + tl.program_id(0), best)


@prepared
@triton.jit
def _check_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_maxima_ptr, races_ptr, checks_ptr, V, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr
):  # fmt: skip
    """Adds up two masses: of the tokens that are heavier than the short way's winner, and of all tokens."""
    b, splits = tl.program_id(1), tl.num_programs(0)
    temperature = tl.load(temperature_ptr + b)
    top, _ = row_maximum(row_maxima_ptr, splits, BLOCK_S)
    if (temperature <= 0) | ~takes_short_way(b, V, top_k_ptr, top_p_ptr) | ~(top > float("-inf")):
        return
    s = tl.arange(0, BLOCK_S)
    best = tl.max(tl.load(races_ptr + b * splits + s, mask=s < splits, other=0), 0)
    winner = token_of(best)
    _, _, x = row_block(logits_ptr, b, V, BLOCK)
    weights = weights_of(x, top, temperature)
    mass = (weights * MASS_SCALE).to(tl.int64)
    total = tl.sum(mass, 0)
    if total > 0:
        least = weights_of(tl.load(logits_ptr + b.to(tl.int64) * V + winner), top, temperature)
        before = tl.sum(tl.where(weights > least, mass, 0), 0)
        tl.atomic_add(checks_ptr + 2 * b, before, sem="relaxed")
        tl.atomic_add(checks_ptr + 2 * b + 1, total, sem="relaxed")


@prepared
@triton.jit
def _token_kernel(
    temperature_ptr, row_maxima_ptr, races_ptr, out_ptr, SPLITS, stride, ALL_GREEDY: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Stores a row's token from the maxima of its tiles; -1 if the largest logit is NaN or infinite."""
    b = tl.program_id(1)
    at, valid = b * stride + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_S) < SPLITS
    token = greedy_token(tl.max(tl.load(row_maxima_ptr + at, mask=valid, other=LOWEST), 0))
    if not ALL_GREEDY and tl.load(temperature_ptr + b) > 0:
        winner = token_of(tl.max(tl.load(races_ptr + at, mask=valid, other=0), 0))
        token = tl.where(token >= 0, winner, token)
    tl.store(out_ptr + b, token)


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
    row_maxima: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """Draw one token for each row of `logits` [B, V] fp32 → [B] int64; -1 for a row with NaN or +inf, or only -inf.

    Takes 2 launches if all rows are greedy; otherwise 3, plus 4 for top-k and 6 for top-p. Does not synchronize with the host.

    Args:
        temperature, top_k, top_p, min_p, seed, step: tensors [B], as in `minirt.engine.sampler.SamplingBatch`.
        all_greedy, any_top_k, any_top_p, any_min_p: as in `SamplingBatch`. A filter whose flag is False is not applied.
        workspace: scratch memory; allocated for this call if None.
        out: [B] int64, for the result.
        row_maxima: [B, P] int64 with any row stride: the largest logit in each of P tiles of a row, as an LM head stores them
            (`RowMaxima`). If all rows are greedy, the kernel reads only these, in 1 launch.
        check: False skips the checks of arguments.

    Raises:
        InputError: a wrong shape, dtype, device or stride; an empty vocabulary or one above 2²²; a workspace that is too small.
    """
    if check:
        check_tensor("logits", logits, (None, None), torch.float32, logits.device)
        floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
        longs = {"seed": seed, "step": step} | ({} if out is None else {"out": out})
        for dtype, tensors in ((torch.float32, floats), (torch.int32, {"top_k": top_k}), (torch.int64, longs)):
            for name, tensor in tensors.items():
                check_tensor(name, tensor, (logits.shape[0],), dtype, logits.device)
        given = None if row_maxima is None else (row_maxima.dtype, row_maxima.ndim, len(row_maxima), row_maxima.stride(-1))
        if row_maxima is not None and given != (torch.int64, 2, len(logits), 1):
            found = f"{row_maxima.dtype} {list(row_maxima.shape)}, strides {row_maxima.stride()}"
            expected = f"int64 [{len(logits)}, any], rows contiguous"
            raise InputError("wrong shape", where="row_maxima", expected=expected, found=found)
        if not 0 < logits.shape[1] <= MAX_VOCAB:
            raise InputError("wrong vocabulary size", where="logits", expected="1 to 2**22", found=logits.shape[1])
    B, V = logits.shape
    if out is None:
        out = torch.empty(B, dtype=torch.int64, device=logits.device)
    if workspace is None:
        workspace = SamplingWorkspace(B, V, logits.device, greedy_only=all_greedy)
    elif check and (workspace.max_batch < B or workspace.vocab < V or (workspace.greedy_only and not all_greedy)):
        expected = f"at least {B} rows of {V} logits" + ("" if all_greedy else " with buffers for sampling")
        found = f"{workspace.max_batch} rows of {workspace.vocab} logits" + (", greedy only" if workspace.greedy_only else "")
        raise InputError("too small", where="workspace", expected=expected, found=found)
    if not B:
        return out
    if all_greedy and row_maxima is not None:
        _tokens(temperature, row_maxima, row_maxima, out, True)
        return out
    w, splits = workspace, cdiv(V, BLOCK_V)
    grid, sizes = (splits, B), {"BLOCK": BLOCK_V, "BLOCK_S": next_power_of_2(splits)}
    _row_maxima_kernel[grid](logits, w.row_maxima, w.sums, w.checks, V, CLEAR=not all_greedy, BLOCK=BLOCK_V)
    if not all_greedy:
        rows = (temperature, top_k, top_p)
        kept = {"ANY_TOP_K": any_top_k, "ANY_TOP_P": any_top_p, "ANY_MIN_P": any_min_p}
        race = (logits, *rows, min_p, seed, step, w.row_maxima, w.races, w.checks, w.limits, V)
        if any_top_k:
            select(logits, rows, w, any_top_k, False)
        if any_top_p:
            _race_kernel[grid](*race, SHORT=True, **kept, **sizes)
            _check_kernel[grid](logits, *rows, w.row_maxima, w.races, w.checks, V, **sizes)
            select(logits, rows, w, any_top_k, True)
        _race_kernel[grid](*race, SHORT=False, **kept, **sizes)
    _tokens(temperature, w.row_maxima.view(-1)[: B * splits].view(B, splits), w.races, out, all_greedy)
    return out


def row_maxima(logits: Tensor, wanted: Tensor, workspace: SamplingWorkspace) -> Tensor:
    """Row maxima, as an LM head stores them (`RowMaxima`), of `logits` [B, V] fp32 → [B, P] int64, a part of the workspace.

    If `wanted` [1] int32 is 0, they are not computed, and what the result holds has no meaning.
    """
    (B, V), splits = logits.shape, cdiv(logits.shape[1], BLOCK_V)
    _wanted_row_maxima_kernel[(splits, B)](logits, workspace.row_maxima, wanted, V, BLOCK=BLOCK_V)
    return workspace.row_maxima.view(-1)[: B * splits].view(B, splits)


def _tokens(temperature: Tensor, row_maxima: Tensor, races: Tensor, out: Tensor, all_greedy: bool) -> None:
    B, parts = row_maxima.shape
    block = next_power_of_2(parts)
    _token_kernel[(1, B)](
        temperature, row_maxima, races, out, parts, row_maxima.stride(0), ALL_GREEDY=all_greedy, BLOCK_S=block,
        num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip


def cost(B: int, V: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of a greedy batch. A sampled batch reads the logits 2 to 8 times."""
    return 4 * B * V + 8 * B, 0
