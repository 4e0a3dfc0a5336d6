"""Attention of few new tokens on a long context (such as the last chunk of a long prompt), with parts of the context in parallel.

In `prefill.py`, one program computes a tile of queries for one KV head, over all tokens before them. So a few tiles on a long
context leave most SMs idle. Here the context is divided into parts (Flash-Decoding, Dao et al. 2023). With more new tokens the
parts are longer, so that the number of tiles × parts stays about the same. A second kernel combines the parts in order.

The device decides which sequences this kernel computes, from their numbers of new and cached tokens. A sequence's result does not
depend on the other sequences.
"""

import torch
import triton
import triton.language as tl

from minirt.kernels.attention import combine
from minirt.kernels.attention.combine import merge
from minirt.kernels.attention.online_softmax import LOG2_E, attend_context, blank, fuses, prepare, whole
from minirt.kernels.attention.operands import Prefill, Scratch, prefill_lookup_size
from minirt.kernels.attention.rope_write import as_integers
from minirt.kernels.launch import Workspace, sm_count
from minirt.kernels.prepared import prepared

_ROWS = 4  # a sequence has at most this many partial results (parts × new tokens) for each KV split of its context
MOST = tl.constexpr(256)  # most new tokens; with more, there are enough tiles


@triton.jit
def parts_of(new, length, SPLIT: tl.constexpr):
    """(number of parts, tokens of a part) for a sequence of `length` tokens, of which `new` are new.

    0 parts: this kernel does not compute the sequence. A part has a multiple of SPLIT tokens. The last part also has the
    remaining tokens, including all new ones.
    """
    tokens = SPLIT
    for i in tl.static_range(6):
        tokens += (new > (4 << i)).to(tl.int32) * (SPLIT << i)
    parts = length // tokens
    return parts * ((new > 1) & (new <= MOST) & (parts > 1)).to(tl.int32), tokens


@triton.jit
def _sequences(starts_ptr, lens_ptr, B, BLOCK_B: tl.constexpr, SPLIT: tl.constexpr):
    """The number of new tokens and of parts of each sequence, [BLOCK_B] each."""
    index = tl.arange(0, BLOCK_B)
    new = tl.load(starts_ptr + index + 1, mask=index < B, other=0) - tl.load(starts_ptr + index, mask=index < B, other=0)
    parts, _ = parts_of(new, tl.load(lens_ptr + index, mask=index < B, other=0), SPLIT)
    return new, parts


@triton.jit
def _place(ends, item):
    """The sequence of a work item, and that sequence's first item. `ends`: number of items up to each sequence's end."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def _before(ends, b, BLOCK_B: tl.constexpr):
    """The number of items (or rows) of the sequences before b."""
    return tl.max(tl.where(tl.arange(0, BLOCK_B) < b, ends, 0), 0)


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _chunk_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, starts_ptr, lens_ptr, sums_ptr, row_stats_ptr, B, table_width,
    scale, NQ: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One KV head of every n-th work item, for n programs per head. A work item: a tile of queries on one part of the context."""
    GROUP: tl.constexpr = NQ // NKV
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    FP8: tl.constexpr = k_scales_ptr is not None
    kv_head = tl.program_id(0) % NKV
    new, parts = _sequences(starts_ptr, lens_ptr, B, BLOCK_B, SPLIT)
    ends = tl.cumsum(parts * ((new + QUERIES - 1) // QUERIES), 0)
    rows = tl.cumsum(parts * new, 0)
    for item in range(tl.program_id(0) // NKV, tl.max(ends, 0), tl.num_programs(0) // NKV):
        b, first_item = _place(ends, item)
        start, limit = tl.load(starts_ptr + b), tl.load(lens_ptr + b)
        count = tl.load(starts_ptr + b + 1) - start
        own_parts, tokens = parts_of(count, limit, SPLIT)
        tiles = (count + QUERIES - 1) // QUERIES
        part, first_query = (item - first_item) // tiles, (item - first_item) % tiles * QUERIES
        row = tl.arange(0, BLOCK_M)
        valid = (first_query + row // GROUP < count) & (row < QUERIES * GROUP)
        # Rows past the end repeat the last query instead of being masked. They are not stored.
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
        row_max, total, acc = attend_context(
            q, row_max, total, acc, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, begin, seen_by_all, seen_by_any, limit,
            row_limit, scale, kv_head, NKV, D, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
        first_row = _before(rows, b, BLOCK_B) + part * count + first_query
        at = (first_row + row // GROUP).to(tl.int64) * NQ + head
        tl.store(sums_ptr + at[:, None] * D + d, whole(acc), mask=valid[:, None])
        tl.store(row_stats_ptr + 2 * at, row_max, mask=valid)
        tl.store(row_stats_ptr + 2 * at + 1, total, mask=valid)


@prepared
@triton.jit(do_not_specialize=["B"])
def _combine_chunks_kernel(
    starts_ptr, lens_ptr, out_ptr, sums_ptr, row_stats_ptr, B, NQ: tl.constexpr, D: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store the weighted mean of the parts, in order. One warp computes one token and head at a time."""
    new, parts = _sequences(starts_ptr, lens_ptr, B, BLOCK_B, SPLIT)
    rows = tl.cumsum(parts * new, 0)
    ends = tl.cumsum(tl.where(parts > 0, new * NQ, 0), 0)
    d = tl.arange(0, D)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        b, first_item = _place(ends, item)
        start = tl.load(starts_ptr + b)
        count = tl.load(starts_ptr + b + 1) - start
        own_parts, _ = parts_of(count, tl.load(lens_ptr + b), SPLIT)
        first_row = _before(rows, b, BLOCK_B)
        query, head = (item - first_item) // NQ, (item - first_item) % NQ
        acc, total = merge(sums_ptr, row_stats_ptr, first_row + query, count, own_parts, head, NQ, D, BLOCK_S)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((start + query).to(tl.int64) * NQ + head) * D + d, out)


def workspace_floats(max_splits: int, Nq: int, D: int) -> int:
    """fp32 values in the workspace: for each partial result and head, a sum [D], a row maximum and a total.

    `max_splits`: upper bound of the number of KV splits of all sequences, incomplete ones included.
    """
    return _ROWS * max_splits * Nq * (D + 2)


def launch(prefill: Prefill, workspace: Workspace) -> None:
    """Write `out` of the sequences that `parts_of` divides into parts."""
    q, pages, tables, starts, lens, out = prefill[:6]
    (T, Nq, D), Nkv, B, split = q.shape, pages.num_kv_heads, prefill.num_seqs, prefill.partial
    block_m, block_n, warps = (64, 64, 4) if q.element_size() == 2 else (32, 32, 8)
    scratch, programs = Scratch.of(workspace, _ROWS * prefill.max_splits * Nq, D), sm_count(q.device)
    block_b = prefill_lookup_size(B)
    _chunk_kernel[(Nkv * max(1, 2 * programs // Nkv),)](
        q, *as_integers(torch.int16, pages.k, pages.v), pages.k_scale, pages.v_scale, tables, starts, lens, *scratch, B,
        tables.shape[1], prefill.scale * LOG2_E, NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=pages.page_size, BLOCK_B=block_b, BLOCK_M=block_m,
        BLOCK_N=block_n, SPLIT=split, num_warps=warps, num_stages=2, enable_fp_fusion=fuses(q.dtype),
    )  # fmt: skip
    _combine_chunks_kernel[(min(T * Nq, combine.PROGRAMS * programs),)](
        starts, lens, out, *scratch, B, NQ=Nq, D=D, BLOCK_B=block_b, BLOCK_S=combine.BLOCK_S, SPLIT=split, num_warps=1
    )
