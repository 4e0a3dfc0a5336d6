"""Attention of few new tokens on a long context, as in the last chunk of a long prompt: parts of the context side by side.

`prefill.py` has a program for each tile of queries and KV head, which walks through all tokens before them, so that few tiles
on a long context leave most SMs idle. Here the context is cut in parts (Flash-Decoding, Dao et al. 2023) that are the
longer the more tokens are new, so that tiles × parts stay as many; a second kernel adds the parts up in order. Which sequences
are meant follows from their new and cached tokens alone, is read on the device, and no other sequence changes a bit of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.attention.online_softmax import attend, blank, fuses, page_slots, prepare, whole
from minirt.kernels.attention.rope_write import as_integers
from minirt.kernels.launch import Workspace, sm_count

ROWS = 4  # of partial results, parts × new tokens, that such a sequence has at most for every 256 of its tokens
MOST = 256  # new tokens of such a sequence; with more there are tiles enough
_COMBINED = 32  # parts that are loaded side by side
_COMBINING = 12  # programs of the second kernel that an SM has room for


@triton.jit
def parts_of(new, length):
    """In how many parts sequences of `length` tokens, `new` of them new, are cut (0: they are not for this kernel), and how many
    tokens, at least 256, each part has but the last, which has the rest as well, and so all that are new."""
    tokens = 256
    for i in tl.static_range(6):
        tokens += (new > (4 << i)).to(tl.int32) * (256 << i)
    parts = length // tokens
    return parts * ((new > 1) & (new <= 256) & (parts > 1)).to(tl.int32), tokens


@triton.jit
def _sequences(starts_ptr, lens_ptr, B, BLOCK_B: tl.constexpr):
    """Of all sequences: new tokens, parts [BLOCK_B]."""
    index = tl.arange(0, BLOCK_B)
    new = tl.load(starts_ptr + index + 1, mask=index < B, other=0) - tl.load(starts_ptr + index, mask=index < B, other=0)
    parts, _ = parts_of(new, tl.load(lens_ptr + index, mask=index < B, other=0))
    return new, parts


@triton.jit
def _place(ends, item):
    """The sequence that an item is of, given the number of items up to the end of each, and the number of its first one."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def _before(ends, b, BLOCK_B: tl.constexpr):
    """The number of items of the sequences before b."""
    return tl.max(tl.where(tl.arange(0, BLOCK_B) < b, ends, 0), 0)


@triton.jit(do_not_specialize=["B", "table_width"])
def _chunk_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, starts_ptr, lens_ptr, sums_ptr, row_stats_ptr, B, table_width,
    scale, NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One KV head of every so many-th unit: a tile of queries on a part of the context."""
    GROUP: tl.constexpr = NQ // NKV
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    FP8: tl.constexpr = k_scales_ptr is not None
    kv_head = tl.program_id(0) % NKV
    new, parts = _sequences(starts_ptr, lens_ptr, B, BLOCK_B)
    ends = tl.cumsum(parts * ((new + QUERIES - 1) // QUERIES), 0)
    rows = tl.cumsum(parts * new, 0)
    for unit in range(tl.program_id(0) // NKV, tl.max(ends, 0), tl.num_programs(0) // NKV):
        b, first_unit = _place(ends, unit)
        start, limit = tl.load(starts_ptr + b), tl.load(lens_ptr + b)
        count = tl.load(starts_ptr + b + 1) - start
        own_parts, tokens = parts_of(count, limit)
        tiles = (count + QUERIES - 1) // QUERIES
        part, first_query = (unit - first_unit) // tiles, (unit - first_unit) % tiles * QUERIES
        row = tl.arange(0, BLOCK_M)
        valid = (first_query + row // GROUP < count) & (row < QUERIES * GROUP)
        # Rows past the end repeat the last query instead of being masked; they are not stored.
        query = tl.minimum(first_query + row // GROUP, count - 1)
        head = kv_head * GROUP + row % GROUP
        d = tl.arange(0, D)[None, :]
        q = prepare(tl.load(q_ptr + ((start + query).to(tl.int64) * NQ + head)[:, None] * D + d), FP8)
        row_limit = limit - count + query + 1
        table_ptr = tables_ptr + b.to(tl.int64) * table_width
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = blank(BLOCK_M, D, FP8)
        begin = part * tokens
        last = part == own_parts - 1
        seen_by_all = tl.where(last, (limit - count + first_query + 1) // BLOCK_N * BLOCK_N, begin + tokens)
        seen_by_any = tl.where(last, tl.minimum(limit - count + first_query + QUERIES, limit), begin + tokens)
        for first in range(begin, seen_by_all, BLOCK_N):
            t, base, slot = page_slots(table_ptr, first, limit, PAGE_SIZE, BLOCK_N)
            row_max, total, acc = attend(
                q, row_max, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, base * NKV + kv_head, slot, t, limit,
                row_limit, scale, NKV, D, False,
            )  # fmt: skip
        for first in range(seen_by_all, seen_by_any, BLOCK_N):
            t, base, slot = page_slots(table_ptr, first, limit, PAGE_SIZE, BLOCK_N)
            row_max, total, acc = attend(
                q, row_max, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, base * NKV + kv_head, slot, t, limit,
                row_limit, scale, NKV, D, True,
            )  # fmt: skip
        first_row = _before(rows, b, BLOCK_B) + part * count + first_query
        at = (first_row + row // GROUP).to(tl.int64) * NQ + head
        tl.store(sums_ptr + at[:, None] * D + d, whole(acc), mask=valid[:, None])
        tl.store(row_stats_ptr + 2 * at, row_max, mask=valid)
        tl.store(row_stats_ptr + 2 * at + 1, total, mask=valid)


@triton.jit(do_not_specialize=["B"])
def _combine_chunks_kernel(
    starts_ptr, lens_ptr, out_ptr, sums_ptr, row_stats_ptr, B, NQ: tl.constexpr, D: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One warp for a token and head at a time: the weighted mean of its parts, BLOCK_S at a time, in order."""
    new, parts = _sequences(starts_ptr, lens_ptr, B, BLOCK_B)
    rows = tl.cumsum(parts * new, 0)
    ends = tl.cumsum(tl.where(parts > 0, new * NQ, 0), 0)
    d = tl.arange(0, D)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        b, first_item = _place(ends, item)
        start = tl.load(starts_ptr + b)
        count = tl.load(starts_ptr + b + 1) - start
        own_parts, _ = parts_of(count, tl.load(lens_ptr + b))
        first_row = _before(rows, b, BLOCK_B)
        query, head = (item - first_item) // NQ, (item - first_item) % NQ
        row_max = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, D), tl.float32)
        for first in range(0, own_parts, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            there = s < own_parts
            at = (first_row + s * count + query).to(tl.int64) * NQ + head
            row_stats = tl.load(row_stats_ptr + 2 * at, mask=there, other=float("-inf"))
            totals = tl.load(row_stats_ptr + 2 * at + 1, mask=there, other=0.0)
            sums = tl.load(sums_ptr + at[:, None] * D + d, mask=there[:, None], other=0.0)
            new_row_max = tl.maximum(row_max, tl.max(row_stats, 0))
            rescale = tl.exp2(row_max - new_row_max)
            weights = tl.exp2(row_stats - new_row_max)
            total = total * rescale + tl.sum(weights * totals, 0)
            acc = acc * rescale[:, None] + tl.sum(weights[:, None] * sums, 0)[None, :]
            row_max = new_row_max
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((start + query).to(tl.int64) * NQ + head) * D + d, out)


def possible(tokens: int, sequences: int, max_splits: int) -> bool:
    """Whether a step of so many tokens, sequences and splits of 256 cached tokens can have such a sequence. One that is alone has
    all tokens, or, where they are padded to a multiple of 128, almost all."""
    return max_splits > 1 and tokens > 1 and (sequences > 1 or tokens <= MOST)


def workspace_floats(max_splits: int, Nq: int, D: int) -> int:
    """fp32 values that such sequences keep in the workspace: of each row and head of partial results a sum [D], a row_max and a
    total; `max_splits` as `possible` takes it."""
    return ROWS * max_splits * Nq * (D + 2)


def attend_chunks(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, block_tables: Tensor,
    query_starts: Tensor, seq_lens: Tensor, max_splits: int, scale: float, out: Tensor, workspace: Workspace,
) -> None:  # fmt: skip
    """Write `out` [T, Nq, D] of the sequences of `parts_of`. Arguments as `paged_attention_prefill` has checked them, but `scale`
    is for powers of two."""
    (T, Nq, D), (page_size, Nkv), B = q.shape, k_pages.shape[1:3], seq_lens.shape[0]
    block_m, block_n, warps = (64, 64, 4) if q.element_size() == 2 else (32, 32, 8)
    rows, programs = ROWS * max_splits * Nq, sm_count(q.device)
    sums = workspace.sums(workspace_floats(max_splits, Nq, D))
    row_stats = sums[rows * D :]
    block_b = max(256, triton.next_power_of_2(B))
    _chunk_kernel[(Nkv * max(1, 2 * programs // Nkv),)](
        q, *as_integers(torch.int16, k_pages, v_pages), k_scales, v_scales, block_tables, query_starts, seq_lens, sums, row_stats,
        B, block_tables.shape[1], scale, NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size, BLOCK_B=block_b, BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=warps, num_stages=2, enable_fp_fusion=fuses(q.dtype),
    )  # fmt: skip
    _combine_chunks_kernel[(min(T * Nq, _COMBINING * programs),)](
        query_starts, seq_lens, out, sums, row_stats, B, NQ=Nq, D=D, BLOCK_B=block_b, BLOCK_S=_COMBINED, num_warps=1
    )
