"""Attention of a few new tokens of each sequence on the paged KV cache, such as drafts and the token before them.

`decode` with more rows: a program computes all new tokens of a sequence for the query heads that share a KV head, so K and V are
read once for all of them. KV splits, work items and combination are those of `decode`. New tokens see those before them. Their K
and V are in the pages already (`rope_write`).

The tile has rows for the most tokens of any step (of wide heads, several programs have a tile of them each). So the order of sums
does not depend on how many tokens the step's sequences have, and a token's result is the same with any number of drafts after it.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.decode import DecodeConfig, find_work_item, split_slots
from minirt.kernels.attention.online_softmax import (
    attend,
    blank,
    block_n,
    close,
    existing,
    fuses,
    gate_output,
    oldest_seen,
    prepare,
    total_of,
    whole,
)
from minirt.kernels.attention.operands import AttentionFacts, AttentionInput, decode_lookup_size
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, next_power_of_2, sm_count
from minirt.kernels.prepared import prepared
from minirt.kernels.speculative.limits import MAX_DRAFTS

QUERIES = 1 + MAX_DRAFTS  # the most new tokens of a sequence

CASES = [  # new: new tokens of each sequence, among its seq_lens cached ones
    {"Nq": 3, "Nkv": 3, "D": 64, "page_size": 16, "seq_lens": (8, 1, 63, 0, 130), "new": (8, 1, 2, 0, 5), "split": 64},
    {"Nq": 2, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": (257, 256, 511, 7, 255), "new": (5, 5, 8, 0, 2), "split": 256},
    {"Nq": 7, "Nkv": 1, "D": 128, "page_size": 32, "seq_lens": (130, 63), "new": (8, 3), "split": 64},
    {"Nq": 16, "Nkv": 1, "D": 64, "page_size": 16, "seq_lens": (70,), "new": (5,), "split": 64},
    {"Nq": 16, "Nkv": 1, "D": 512, "page_size": 16, "seq_lens": (70, 9), "new": (8, 3), "split": 64},
]


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _decode_few_kernel(q_ptr, pages, sequences, results, scores, B, table_width, C, PDL: tl.constexpr):
    """Attention of one KV head on every n-th work item, n being the number of programs per head.

    For a sequence with one split it stores the final result, else a partial one for each new token. Row r of the tile is head
    r % GROUP of the group, of new token r // GROUP.
    """
    FP8: tl.constexpr = pages.k_scale is not None
    TILES: tl.constexpr = (C.QUERIES * C.GROUP + C.BLOCK_M - 1) // C.BLOCK_M
    kv_head = tl.program_id(0) % C.NKV
    first_item, programs = tl.program_id(0) // C.NKV, tl.num_programs(0) // C.NKV
    items = tl.load(sequences.split_starts + B)
    row = tl.arange(0, C.BLOCK_M)
    if TILES > 1:
        row += first_item % TILES * C.BLOCK_M
        first_item, programs = first_item // TILES, programs // TILES
    d = tl.arange(0, C.BLOCK_D)[None, :]
    query, head = row // C.GROUP, kv_head * C.GROUP + row % C.GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()  # for q, and the new tokens' K and V
    for item in range(first_item, items, programs):
        b, length, split, numbers = find_work_item(item, sequences, scores, B, table_width, C)
        start = tl.load(sequences.query_starts + b)
        new = tl.load(sequences.query_starts + b + 1) - start
        begin = split * C.SPLIT
        end = tl.where(new > 0, tl.minimum(begin + C.SPLIT, length), begin)
        inside = row < new * C.GROUP
        stored = existing(inside[:, None], d, C.D)
        first_value = start.to(tl.int64) * (C.NQ * C.D)
        at = (query * C.NQ + head)[:, None] * C.D + d
        q = prepare(tl.load(q_ptr + first_value + at, mask=stored, other=0.0), FP8)
        row_limit = length - new + query + 1
        first_token, first_end, oldest, row_oldest = begin, C.SPLIT, None, None
        if scores.window is not None:
            oldest, row_oldest = oldest_seen(length, new, scores.window), row_limit - scores.window
            first_token = tl.maximum(begin, oldest // C.BLOCK_N * C.BLOCK_N)
            first_end = (oldest // C.SPLIT + 1) * C.SPLIT
        # In a sequence's last split, the first of its new tokens may see nothing. They get a token, since the online softmax of
        # no tokens is NaN, and their result is dropped.
        sees = row_limit > begin
        row_limit = tl.maximum(row_limit, begin + 1)
        row_max, total, acc = blank(C.BLOCK_M, C.BLOCK_D, FP8, C.INVARIANT)
        for first in range(first_token, end, C.BLOCK_N):
            base, slot = split_slots(numbers, first, begin, C.PAGE_SIZE, C.BLOCK_N)
            t = first + tl.arange(0, C.BLOCK_N)
            row_max, total, acc = attend(
                q, (row_max, total, acc), pages, base * C.NKV + kv_head, slot, t, length, row_limit, scores, C, True,
                oldest, row_oldest,
            )  # fmt: skip
        total = total_of(total)
        if length <= first_end:
            out = whole(acc) / tl.where(inside, close(total, row_max, results, head, True), 1.0)[:, None]
            out = gate_output(out, results, (start + query).to(tl.int64)[:, None], head[:, None], d, stored)
            tl.store(results.out + first_value + at, out.to(results.out.dtype.element_ty), mask=stored)
        else:
            part = (tl.cast(item, tl.int64) * C.NKV + kv_head) * (C.QUERIES * C.GROUP)
            sums_ptr, stats_ptr = results.sums + part * C.D, results.row_stats + 2 * part
            tl.store(sums_ptr + row[:, None] * C.D + d, tl.where(sees[:, None], whole(acc), 0.0), mask=stored)
            tl.store(stats_ptr + 2 * row, tl.where(sees, row_max, float("-inf")), mask=inside)
            tl.store(stats_ptr + 2 * row + 1, tl.where(sees, total, 0.0), mask=inside)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def tile_rows(group: int, D: int) -> int:
    """Rows of a tile: the most new tokens × the query heads of a KV head, padded for the MMA, or as many as registers hold."""
    return min(max(16, next_power_of_2(QUERIES * group)), 128 if D <= 256 else 64)


def rule(facts: AttentionFacts, gpu: Gpu) -> DecodeConfig:
    """The configuration, by what fits in registers. docs/decisions/attention-prefill.md has the times of an H100."""
    rows = tile_rows(facts.Nq // facts.Nkv, facts.D)
    wide = 90 <= gpu.capability < 120  # the MMA takes 64 rows, with K and V in shared memory
    if facts.itemsize == 4:
        return DecodeConfig(32 if facts.D <= 128 else 16, 8, 1, 1)
    if facts.D > 256:
        return DecodeConfig(16, 8, 2, 1)
    if facts.D > 128:
        return DecodeConfig(32 if wide or rows <= 64 else 16, 8, 2, 1)
    if rows > 64:
        return DecodeConfig(64, 8, 2, 1) if wide else DecodeConfig(32, 8, 3, 1)
    if facts.D == 64 and not facts.fp8:
        return DecodeConfig(64, 4, 3, 3)
    if rows == 64:
        return DecodeConfig(64, 4, 2, 2) if wide else DecodeConfig(32, 4, 3, 2)
    # `mma.sync`, whose pipeline needs a stage more for as many tokens in flight.
    return DecodeConfig(32 if facts.fp8 else 64, 4, 3, 2)


FAMILY = Family("decode_few", DecodeConfig, (__file__,), ("Nq", "Nkv", "D", "itemsize", "fp8", "split"), rule)


def workspace_floats(max_splits: int, Nq: int, D: int) -> int:
    """fp32 values in the workspace: for each split, new token and head a sum [D], a row maximum and a total."""
    return QUERIES * max_splits * Nq * (D + 2)


def launch(a: AttentionInput) -> None:
    """Write `out` of sequences with one split, and partial results of the others. `dispatch` checks the operands before."""
    (Nq, Nkv, D), B, device = a.head_shape, a.num_seqs, a.out.device
    c, rows = FAMILY.lookup(device, a.facts()), tile_rows(Nq // Nkv, D)
    if a.invariant:
        c = replace(c, block_n=block_n(a))
    constants = Constants.of(
        a, BLOCK_M=rows, BLOCK_N=c.block_n, BLOCK_B=decode_lookup_size(B), SPLIT=a.split, QUERIES=QUERIES
    )
    pairs = Nkv * cdiv(QUERIES * Nq // Nkv, rows)  # of a KV head and a tile of rows
    _decode_few_kernel[(max(1, min(a.max_splits, c.programs * sm_count(device) // pairs)) * pairs,)](
        a.heads, a.pages.for_kernel(torch.int16), a.sequences, a.results(a.max_splits * QUERIES), a.scores.in_base_2(),
        B, a.table_width, C=constants, maxnreg=most_registers(32 * c.num_warps * c.programs), enable_fp_fusion=fuses(a.out.dtype),
        **launch_options(c.num_warps, c.num_stages, a.pdl),
    )  # fmt: skip
