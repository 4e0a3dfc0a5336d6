"""Attention of few new tokens on a long context (such as the last chunk of a long prompt), with parts of the context in parallel.

In `prefill.py`, a few tiles of queries on a long context would leave most SMs idle. Here the context is divided into parts
(Flash-Decoding, Dao et al. 2023). With more new tokens the parts are longer, so that the number of tiles × parts stays about the
same. A second kernel combines the parts in order. The device decides which sequences this kernel computes, from their numbers of
new and cached tokens. A sequence's result does not depend on the other sequences.
"""


import torch
import triton
import triton.language as tl

from minirt.kernels.attention import combine
from minirt.kernels.attention.combine import merge, store_head
from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.online_softmax import (
    attend_context,
    close,
    existing,
    fuses,
    load_channels,
    oldest_seen,
    prepare,
    whole,
)
from minirt.kernels.attention.operands import AttentionInput, prefill_lookup_size
from minirt.kernels.launch import next_power_of_2, sm_count
from minirt.kernels.prepared import prepared

_ROWS = 4  # a sequence has at most this many partial results (parts × new tokens) for each KV split of its context
MOST = tl.constexpr(256)  # most new tokens; with more, there are enough tiles


@triton.jit
def parts_of(new, length, SPLIT: tl.constexpr, window=None):
    """(number of parts, tokens of a part) for a sequence of `length` tokens, of which `new` are new.

    0 parts: this kernel does not compute the sequence. A part has a multiple of SPLIT tokens. The last part also has the
    remaining tokens, including all new ones. With a window, the parts that a new token sees only a piece of, or nothing, count as
    one with the next part: every new token sees some token of the first part.
    """
    tokens = SPLIT
    for i in tl.static_range(6):
        tokens += (new > (4 << i)).to(tl.int32) * (SPLIT << i)
    parts = length // tokens
    if window is not None:
        parts -= (oldest_seen(length, new, window) + tokens - 1) // tokens
    return parts * ((new > 1) & (new <= MOST) & (parts > 1)).to(tl.int32), tokens


@triton.jit
def is_left(new, length, C, window=None):
    """Whether a sequence of `length` tokens, of which `new` are new, is left to the kernels of prompts."""
    left = new >= C.SHORTEST
    if C.PARTIAL:
        left = left & (parts_of(new, length, C.PARTIAL, window)[0] == 0)
    return left


@triton.jit
def lengths(sequences, B, BLOCK_B: tl.constexpr):
    """The number of new and of cached tokens of each sequence, [BLOCK_B] each."""
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(sequences.query_starts + index + 1, mask=index < B, other=0)
    new = ends - tl.load(sequences.query_starts + index, mask=index < B, other=0)
    return new, tl.load(sequences.seq_lens + index, mask=index < B, other=0)


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
def _chunk_kernel(q_ptr, pages, sequences, results, scores, B, table_width, C):
    """One KV head of every n-th work item, for n programs per head. A work item: a tile of queries on one part of the context."""
    QUERIES: tl.constexpr = C.BLOCK_M // C.GROUP
    kv_head = tl.program_id(0) % C.NKV
    new, lens = lengths(sequences, B, C.BLOCK_B)
    parts = parts_of(new, lens, C.PARTIAL, scores.window)[0]
    ends = tl.cumsum(parts * ((new + QUERIES - 1) // QUERIES), 0)
    rows = tl.cumsum(parts * new, 0)
    for item in range(tl.program_id(0) // C.NKV, tl.max(ends, 0), tl.num_programs(0) // C.NKV):
        b, first_item = _place(ends, item)
        start, limit = tl.load(sequences.query_starts + b), tl.load(sequences.seq_lens + b)
        count = tl.load(sequences.query_starts + b + 1) - start
        num_parts, tokens = parts_of(count, limit, C.PARTIAL, scores.window)
        tiles = (count + QUERIES - 1) // QUERIES
        part, first_query = (item - first_item) // tiles, (item - first_item) % tiles * QUERIES
        row = tl.arange(0, C.BLOCK_M)
        valid = (first_query + row // C.GROUP < count) & (row < QUERIES * C.GROUP)
        # Rows past the end repeat the last query instead of being masked. They are not stored.
        query = tl.minimum(first_query + row // C.GROUP, count - 1)
        head = kv_head * C.GROUP + row % C.GROUP
        d = tl.arange(0, C.BLOCK_D)[None, :]
        q = load_channels(q_ptr + ((start + query).to(tl.int64) * C.NQ + head)[:, None] * C.D + d, d, C.D)
        q = prepare(q, pages.k_scale is not None)
        row_limit = limit - count + query + 1
        table_ptr = sequences.block_tables + b.to(tl.int64) * table_width
        begin = part * tokens
        if scores.window is not None:
            begin += (limit // tokens - num_parts) * tokens
        last = part == num_parts - 1
        seen_by_all = tl.where(last, (limit - count + first_query + 1) // C.BLOCK_N * C.BLOCK_N, begin + tokens)
        seen_by_any = tl.where(last, tl.minimum(limit - count + first_query + QUERIES, limit), begin + tokens)
        if scores.window is not None:
            begin = tl.where(part == 0, 0, begin)  # of the tokens before the first part, `attend_context` takes those it must
        row_max, total, acc = attend_context(
            q, pages, table_ptr, kv_head, begin, seen_by_all, seen_by_any, limit, row_limit, scores, C
        )
        first_row = _before(rows, b, C.BLOCK_B) + part * count + first_query
        at = (first_row + row // C.GROUP).to(tl.int64) * C.NQ + head
        tl.store(results.sums + at[:, None] * C.D + d, whole(acc), mask=existing(valid[:, None], d, C.D))
        tl.store(results.row_stats + 2 * at, row_max, mask=valid)
        tl.store(results.row_stats + 2 * at + 1, total, mask=valid)


@prepared
@triton.jit(do_not_specialize=["B"])
def _combine_chunks_kernel(sequences, results, window, B, C):
    """Store the weighted mean of the parts, in order. A program computes one token and head at a time."""
    new, lens = lengths(sequences, B, C.BLOCK_B)
    parts = parts_of(new, lens, C.PARTIAL, window)[0]
    rows = tl.cumsum(parts * new, 0)
    ends = tl.cumsum(tl.where(parts > 0, new * C.NQ, 0), 0)
    d = tl.arange(0, C.BLOCK_D)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, 0), tl.num_programs(0)):
        b, first_item = _place(ends, item)
        start = tl.load(sequences.query_starts + b)
        count = tl.load(sequences.query_starts + b + 1) - start
        num_parts = parts_of(count, tl.load(sequences.seq_lens + b), C.PARTIAL, window)[0]
        first_row = _before(rows, b, C.BLOCK_B)
        query, head = (item - first_item) // C.NQ, (item - first_item) % C.NQ
        acc, total, row_max = merge(results, first_row + query, count, num_parts, head, C)
        total = close(total, row_max, results, head, True)
        store_head(acc / total[:, None], results, (start + query).to(tl.int64), head, d, C.D, C)


def workspace_floats(max_splits: int, Nq: int, D: int) -> int:
    """fp32 values in the workspace: for each partial result and head, a sum [D], a row maximum and a total.

    `max_splits`: upper bound of the number of KV splits of all sequences, incomplete ones included.
    """
    return _ROWS * max_splits * Nq * (D + 2)


def launch(a: AttentionInput) -> None:
    """Write `out` of the sequences that `parts_of` divides into parts of `a.partial` tokens or more."""
    (Nq, Nkv, _), B, programs = a.head_shape, a.num_seqs, sm_count(a.heads.device)
    block_m, block_n, warps = (64, 64, 4) if a.heads.element_size() == 2 else (32, 32, 8)
    if a.out.shape[2] > 128:  # as many bytes of K and V in a step
        block_n, warps = max(16, block_n * 128 // next_power_of_2(a.out.shape[2])), 8
    results = a.results(_ROWS * a.max_splits)
    constants = Constants.of(a, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_B=prefill_lookup_size(B), PARTIAL=a.partial)
    _chunk_kernel[(Nkv * max(1, 2 * programs // Nkv),)](
        a.heads, a.pages.for_kernel(torch.int16), a.sequences, results, a.scores.in_base_2(), B, a.table_width, C=constants,
        num_warps=warps, num_stages=2, enable_fp_fusion=fuses(a.heads.dtype),
    )  # fmt: skip
    grid = (min(a.heads.shape[0] * Nq, combine.PROGRAMS * programs),)
    _combine_chunks_kernel[grid](
        a.sequences, results, a.scores.window, B, C=constants, num_warps=combine.warps(constants.BLOCK_D)
    )
