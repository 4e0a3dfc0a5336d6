"""The end of `decode.py`: the splits of each sequence, combined in order (Flash-Decoding, Dao et al. 2023)."""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.launch import cdiv, launch_options, sm_count

_COMBINED = 32  # splits whose sums a combining program loads side by side
_COMBINING = 12  # such programs that an SM has room for


@triton.jit(do_not_specialize=["heads"])
def _combine_kernel(
    starts_ptr, query_starts_ptr, out_ptr, sums_ptr, row_stats_ptr, heads,
    NQ: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For `heads` heads of one sequence: the weighted mean of its splits, BLOCK_S at a time, in order; zeros for none.

    One warp, each of whose threads has the same channels of all the splits, so that nobody waits for another.
    """
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # these programs are small: what comes next can prepare beside them
    start = tl.load(starts_ptr + b)
    splits = tl.load(starts_ptr + b + 1) - start
    token = b.to(tl.int64)
    if query_starts_ptr is not None:
        token = tl.load(query_starts_ptr + b).to(tl.int64)
        single = tl.load(query_starts_ptr + b + 1) == token + 1
        splits = tl.where(single, splits, 1)  # nothing to do
    if PDL:
        tl.extra.cuda.gdc_wait()
    if splits != 1:
        d = tl.arange(0, D)[None, :]
        first_head = tl.program_id(1) * heads
        for head in range(first_head, tl.minimum(first_head + heads, NQ)):
            row_max = tl.full((1,), float("-inf"), tl.float32)
            total = tl.zeros((1,), tl.float32)
            acc = tl.zeros((1, D), tl.float32)
            for first in range(0, splits, BLOCK_S):
                s = first + tl.arange(0, BLOCK_S)
                part = (start + s).to(tl.int64) * NQ + head
                row_stats = tl.load(row_stats_ptr + 2 * part, mask=s < splits, other=float("-inf"))
                totals = tl.load(row_stats_ptr + 2 * part + 1, mask=s < splits, other=0.0)
                sums = tl.load(sums_ptr + part[:, None] * D + d, mask=(s < splits)[:, None], other=0.0)
                new_row_max = tl.maximum(row_max, tl.max(row_stats, 0))
                rescale = tl.exp2(row_max - new_row_max)
                weights = tl.exp2(row_stats - new_row_max)
                total = total * rescale + tl.sum(weights * totals, 0)
                acc = acc * rescale[:, None] + tl.sum(weights[:, None] * sums, 0)[None, :]
                row_max = new_row_max
            out = acc / tl.where(splits == 0, 1.0, total)[:, None]
            tl.store(out_ptr + (token * NQ + head) * D + d, out.to(out_ptr.dtype.element_ty))


def combine(
    split_starts: Tensor, query_starts: Tensor | None, out: Tensor, sums: Tensor, row_stats: Tensor, pdl: bool
) -> None:
    """Write `out` [T, Nq, D] of each sequence that has several splits, or none: of every split and head `sums` has D sums, and
    `row_stats` a row_max and a total, fp32.

    Where all sequences have one split its programs only look and end, so there should not be many.
    """
    B, (Nq, D) = split_starts.shape[0] - 1, out.shape[1:]
    heads = cdiv(B * Nq, _COMBINING * sm_count(out.device))
    _combine_kernel[(B, cdiv(Nq, heads))](
        split_starts, query_starts, out, sums, row_stats, heads, NQ=Nq, D=D, BLOCK_S=_COMBINED, **launch_options(1, 1, pdl)
    )
