"""Combines partial results of attention in a fixed order: `combine` of `decode` and `decode_few`; `merge` also of `partial`.

Flash-Decoding, Dao et al. 2023.
"""

import triton
import triton.language as tl

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.online_softmax import close, existing, gate_output, store_channels
from minirt.kernels.attention.operands import AttentionInput
from minirt.kernels.launch import cdiv, launch_options, sm_count
from minirt.kernels.prepared import prepared

BLOCK_S = tl.constexpr(32)  # partial results that a program loads at once
PROGRAMS = 12  # programs that fit on an SM


@triton.jit
def merge(results, first, step, count, head, C):
    """Combine `count` partial results of a head (those of the parts first, first + step, …) in order → sum, total, maximum.

    A part has QUERIES · NQ partial results; `head` is the number of one of them.
    Fastest with one warp for 128 channels: each thread has the same channels of all partial results, so none waits for another.
    """
    d = tl.arange(0, C.BLOCK_D)[None, :]
    row_max = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, C.BLOCK_D), tl.float32)
    for begin in range(0, count, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        at = (first + s * step).to(tl.int64) * (C.NQ * C.QUERIES) + head
        row_stats = tl.load(results.row_stats + 2 * at, mask=s < count, other=float("-inf"))
        new_row_max = tl.maximum(row_max, tl.max(row_stats, 0))
        rescale = tl.exp2(row_max - new_row_max)
        if C.INVARIANT:  # as `add_split` does
            total *= rescale
            acc *= rescale[:, None]
            for i in tl.static_range(BLOCK_S):
                one = begin + i + tl.zeros((1,), tl.int32)
                part = (first + one * step).to(tl.int64) * (C.NQ * C.QUERIES) + head
                weight = tl.exp2(tl.load(results.row_stats + 2 * part, mask=one < count, other=float("-inf")) - new_row_max)
                total += weight * tl.load(results.row_stats + 2 * part + 1, mask=one < count, other=0.0)
                stored = existing((one < count)[:, None], d, C.D)
                sums = tl.load(results.sums + part[:, None] * C.D + d, mask=stored, other=0.0)
                acc += weight[:, None] * sums
        else:
            totals = tl.load(results.row_stats + 2 * at + 1, mask=s < count, other=0.0)
            sums = tl.load(results.sums + at[:, None] * C.D + d, mask=existing((s < count)[:, None], d, C.D), other=0.0)
            weights = tl.exp2(row_stats - new_row_max)
            total = total * rescale + tl.sum(weights * totals, 0)
            acc = acc * rescale[:, None] + tl.sum(weights[:, None] * sums, 0)[None, :]
        row_max = new_row_max
    return acc, total, row_max


@triton.jit
def store_head(out, results, token, head, d, gated, C):
    """Store a head's output, channels d [1, BLOCK_D]. `gated`: how many of them have a gate, if there is one."""
    out = gate_output(out, results, token, head, d, d < gated)
    store_channels(results.out + (token * C.NQ + head) * C.D + d, out, d, C.D)


@prepared
@triton.jit(do_not_specialize=["heads"])
def _combine_kernel(sequences, results, heads, C, PDL: tl.constexpr):
    """For `heads` heads of one sequence, store the weighted mean of its KV splits; zeros for a sequence without cached tokens.

    QUERIES = 1: sequences with another number of new tokens are left out. Else the heads of all new tokens are counted.
    """
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # these programs are small, so the next kernel's programs fit beside them
    start = tl.load(sequences.split_starts + b)
    splits = tl.load(sequences.split_starts + b + 1) - start
    token = b.to(tl.int64)
    if sequences.query_starts is not None:
        token = tl.load(sequences.query_starts + b).to(tl.int64)
        new = tl.load(sequences.query_starts + b + 1) - token
        if C.QUERIES == 1:
            splits = tl.where(new == 1, splits, 1)  # nothing to do
    if PDL:
        tl.extra.cuda.gdc_wait()
    if splits != 1:
        d = tl.arange(0, C.BLOCK_D)[None, :]
        first_head = tl.program_id(1) * heads
        count = C.NQ if C.QUERIES == 1 else new.to(tl.int32) * C.NQ
        for item in range(first_head, tl.minimum(first_head + heads, count)):
            query, head = item // C.NQ, item % C.NQ
            part = (head // C.GROUP * C.QUERIES + query) * C.GROUP + head % C.GROUP  # its number in a split: see `decode_few`
            acc, total, row_max = merge(results, start, 1, splits, part, C)
            total = close(total, row_max, results, head, True)
            out = acc / tl.where(splits == 0, 1.0, total)[:, None]
            gated = tl.where(splits == 0, 0, C.D)  # the gate of padding may be NaN
            store_head(out, results, token + query, head, d, gated, C)


def warps(block_d: int) -> int:
    """Warps of a program that merges partial results of heads of `block_d` channels."""
    return max(1, block_d // 128)


def combine(a: AttentionInput, queries: int = 1) -> None:
    """Write `out` of each sequence that has several splits, and of those without cached tokens.

    Few programs are launched: if every sequence has one split, they have nothing to do.

    Args:
        queries: partial results of each split, one for each new token that a sequence may have.
    """
    constants, B = Constants.of(a, QUERIES=queries), a.num_seqs
    most = constants.NQ * (1 if queries == 1 else a.max_query_len or queries)  # heads of a sequence
    heads = cdiv(B * most, PROGRAMS * sm_count(a.out.device))
    _combine_kernel[(B, cdiv(most, heads))](
        a.sequences, a.results(a.max_splits * queries), heads, C=constants,
        **launch_options(warps(constants.BLOCK_D), 1, a.pdl),
    )  # fmt: skip
