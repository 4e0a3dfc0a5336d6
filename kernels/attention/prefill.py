"""Causal attention on the paged KV cache for ragged batches: prompts, parts of prompts, single tokens, in any mix.

The query heads that share a KV head are computed together as rows of one matrix, so K and V are read once for all of them.
`online_softmax` has the softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.online_softmax import (
    add_split,
    attend_context,
    blank,
    block_n,
    close,
    existing,
    fuses,
    gate_output,
    load_channels,
    prepare,
    total_of,
    whole,
)
from minirt.kernels.attention.operands import AttentionFacts, AttentionInput, prefill_lookup_size
from minirt.kernels.attention.partial import is_left
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu
from minirt.kernels.prepared import prepared

CASES = [  # contexts: tokens cached before each sequence's new ones
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 16, "lens": (1,), "contexts": (0,)},
    {"Nq": 3, "Nkv": 1, "D": 64, "page_size": 16, "lens": (3, 1, 37), "contexts": (0, 16, 70)},
    {"Nq": 7, "Nkv": 1, "D": 128, "page_size": 64, "lens": (17, 50), "contexts": (129, 0)},
    {"Nq": 16, "Nkv": 2, "D": 64, "page_size": 128, "lens": (20, 1), "contexts": (0, 300)},
    {"Nq": 14, "Nkv": 2, "D": 64, "page_size": 32, "lens": (1, 1, 1), "contexts": (31, 511, 700)},
    {"Nq": 16, "Nkv": 1, "D": 128, "page_size": 16, "lens": (130,), "contexts": (5,)},
    {"Nq": 16, "Nkv": 1, "D": 512, "page_size": 16, "lens": (9, 1), "contexts": (20, 0)},
]


@dataclass(frozen=True)
class PrefillConfig:
    """A launch configuration of `prefill`: `block_m` rows (queries × heads of a group), `block_n` tokens of K and V per step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # the most registers of a thread, so that more programs fit on an SM


@triton.jit
def _find(block, starts_ptr, B, QUERIES: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence of a block of queries, its first row and its number of rows.

    The blocks of sequence b have the numbers from query_starts[b] // QUERIES + b on. So each sequence has enough numbers, some
    are not used, and the numbers of tokens and sequences alone determine the number of blocks.
    """
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + index, mask=index < B, other=2**30)
    b = tl.sum((starts // QUERIES + index <= block).to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + b)
    return b, start, tl.load(starts_ptr + b + 1) - start


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _prefill_kernel(q_ptr, pages, sequences, results, scores, B, table_width, C):
    """BLOCK_M // GROUP queries of one sequence, with the GROUP heads of one KV head."""
    QUERIES: tl.constexpr = C.BLOCK_M // C.GROUP
    kv_head = tl.program_id(0) % C.NKV
    # A sequence's last block takes longest, so it starts first.
    block = tl.num_programs(0) // C.NKV - 1 - tl.program_id(0) // C.NKV
    b, start, length = _find(block, sequences.query_starts, B, QUERIES, C.BLOCK_B)
    first_query = (block - start // QUERIES - b) * QUERIES
    limit = tl.load(sequences.seq_lens + b)
    if (first_query < length) & is_left(length, limit, C, scores.window):
        context = limit - length
        row = tl.arange(0, C.BLOCK_M)
        query = first_query + row // C.GROUP
        valid = (query < length) & (row < QUERIES * C.GROUP)
        # Rows past the end repeat the last query instead of being masked. They are not stored.
        query = tl.minimum(query, length - 1)
        head = kv_head * C.GROUP + row % C.GROUP
        d = tl.arange(0, C.BLOCK_D)[None, :]
        token = (start + query).to(tl.int64)
        at = (token * C.NQ + head)[:, None] * C.D + d
        q = prepare(load_channels(q_ptr + at, d, C.D), pages.k_scale is not None)
        row_limit = context + query + 1
        table_ptr = sequences.block_tables + b.to(tl.int64) * table_width
        seen_by_all = (context + first_query + 1) // C.BLOCK_N * C.BLOCK_N
        seen_by_any = tl.minimum(context + first_query + QUERIES, limit)
        if C.INVARIANT:
            state = blank(C.BLOCK_M, C.BLOCK_D, pages.k_scale is not None, True)
            opening = 0
            if scores.window is not None:
                opening = tl.maximum(context + first_query + 1 - scores.window, 0) // C.SPLIT * C.SPLIT
            for begin in range(opening, seen_by_any, C.SPLIT):
                end = tl.minimum(begin + C.SPLIT, seen_by_any)
                unmasked = tl.maximum(tl.minimum(seen_by_all, end), begin)
                part = attend_context(q, pages, table_ptr, kv_head, begin, unmasked, end, limit, row_limit, scores, C)
                state = add_split(state, part)
            row_max, total, acc = state
        else:
            row_max, total, acc = attend_context(
                q, pages, table_ptr, kv_head, 0, seen_by_all, seen_by_any, limit, row_limit, scores, C
            )
        total = total_of(total)
        stored = existing(valid[:, None], d, C.D)
        total = close(total, row_max, results, head, True)
        acc = gate_output(whole(acc) / total[:, None], results, token[:, None], head[:, None], d, stored)
        tl.store(results.out + at, acc.to(results.out.dtype.element_ty), mask=stored)


def rule(facts: AttentionFacts, gpu: Gpu) -> PrefillConfig:
    if facts.itemsize == 4:
        return PrefillConfig(32, 32 if facts.D <= 128 else 16, 8, 1)
    if facts.D > 256:  # by shared memory, and on Hopper a sum of 64 x 512 takes two warp groups
        if 90 <= gpu.capability < 120:
            return PrefillConfig(64, 32, 8, 2)
        return PrefillConfig(32 if facts.fp8 else 64, 16, 8, 2)
    if facts.D > 128:
        return PrefillConfig(64, 32, 4, 2)
    if facts.fp8 and facts.D > 64:
        return PrefillConfig(64, 64, 4, 3, registers=168)
    if facts.D == 64 and not facts.fp8:
        return PrefillConfig(64, 64, 4, 3)
    # Two programs on an SM hide each other's softmax. Before Hopper, q is in registers as well, so only one program fits.
    return PrefillConfig(128, 64, 8, 3 if facts.fp8 else 2, registers=128 if gpu.capability == 90 else None)


FAMILY = Family("prefill", PrefillConfig, (__file__,), ("D", "itemsize", "fp8"), rule)


def launch(a: AttentionInput) -> None:
    """Write `out`, for one or more tokens and sequences. `dispatch` checks the operands before."""
    q, (Nq, Nkv, _), pages, B = a.heads, a.head_shape, a.pages, a.num_seqs
    config = FAMILY.lookup(q.device, a.facts())
    if a.invariant:
        config = replace(config, block_n=block_n(a), registers=None)
    blocks = q.shape[0] // (config.block_m // (Nq // Nkv)) + B
    constants = Constants.of(
        a, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_B=prefill_lookup_size(B), SHORTEST=a.shortest, PARTIAL=a.partial,
        SPLIT=a.split if a.invariant else 0,
    )
    _prefill_kernel[(blocks * Nkv,)](
        q, pages.for_kernel(torch.int16), a.sequences, a.results(), a.scores.in_base_2(), B, a.table_width, C=constants,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.registers, enable_fp_fusion=fuses(q.dtype),
    )  # fmt: skip


def cost(
    query_lens: Sequence[int], seq_lens: Sequence[int], Nq: int, Nkv: int, D: int, itemsize: int, fp8: bool = False
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of a batch, if K and V of each sequence are read once.

    `fp8`: the pages are FP8, with a scale for each token and head.
    """
    seen = sum(new * total - new * (new - 1) // 2 for new, total in zip(query_lens, seq_lens, strict=True))
    head = D + 4 if fp8 else D * itemsize
    return 2 * (sum(query_lens) * Nq * D * itemsize + sum(seq_lens) * Nkv * head), 4 * seen * Nq * D
