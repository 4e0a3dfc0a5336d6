"""Causal attention on the paged KV cache, for prompts (ragged, any mix of lengths) and for decoding (one token a sequence).

The query heads that share a KV head are computed together as rows of one matrix, so K and V are read once for all of them.
Online softmax in fp32, in powers of two (Milakov & Gimelshein 2018; Dao et al. 2022). Decoding cuts each sequence into
splits of a fixed number of tokens (Flash-Decoding), which do not depend on the batch; a second kernel combines them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.common import (
    Workspace,
    capability,
    check_activations,
    check_tensor,
    fit_stages,
    launch_options,
    shared_limit,
)

HEAD_DIMS = (64, 128)
MAX_GROUP = 16
_LOG2_E = 1.4426950408889634

CASES = [  # contexts: tokens cached before each sequence's new ones
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 16, "lens": (1,), "contexts": (0,)},
    {"Nq": 3, "Nkv": 1, "D": 64, "page_size": 16, "lens": (3, 1, 37), "contexts": (0, 16, 70)},
    {"Nq": 7, "Nkv": 1, "D": 128, "page_size": 64, "lens": (17, 50), "contexts": (129, 0)},
    {"Nq": 16, "Nkv": 2, "D": 64, "page_size": 128, "lens": (20, 1), "contexts": (0, 300)},
    {"Nq": 14, "Nkv": 2, "D": 64, "page_size": 32, "lens": (1, 1, 1), "contexts": (31, 511, 700)},
    {"Nq": 16, "Nkv": 1, "D": 128, "page_size": 16, "lens": (130,), "contexts": (5,)},
]


@dataclass(frozen=True)
class AttentionConfig:
    """Rows (queries × heads of a group) and tokens of K and V that a program holds at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _slots(table_ptr, t, first, limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tokens t = first + [0, BLOCK_N) of a sequence are in the pages; `first` is a multiple of BLOCK_N."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table_ptr + first // PAGE_SIZE).to(tl.int64)
        return page * PAGE_SIZE + t % PAGE_SIZE
    else:
        page = tl.load(table_ptr + t // PAGE_SIZE, mask=t < limit, other=0).to(tl.int64)
        return page * PAGE_SIZE + t % PAGE_SIZE


@triton.jit
def _attend(
    q,
    peak,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    limit,
    row_limit,
    scale,
    STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax: rows q [M, D] on tokens first + [0, BLOCK_N); row r sees tokens below row_limit [M].

    MASKED: some of the tokens are at or past `limit`, the sequence's end (what the page holds there may be NaN, also in V,
    where a probability of zero would not stop it), or hidden from some rows.
    """
    t = first + tl.arange(0, BLOCK_N)
    at = _slots(table_ptr, t, first, limit, PAGE_SIZE, BLOCK_N)[:, None] * STRIDE + tl.arange(0, D)[None, :]
    if MASKED:
        k = tl.load(k_ptr + at, mask=(t < limit)[:, None], other=0.0)
    else:
        k = tl.load(k_ptr + at)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        s = tl.where(t[None, :] < row_limit[:, None], s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    rescale = tl.exp2(peak - new_peak)
    p = tl.exp2(s - new_peak[:, None])
    total = total * rescale + tl.sum(p, 1)
    if MASKED:
        v = tl.load(v_ptr + at, mask=(t < limit)[:, None], other=0.0)
    else:
        v = tl.load(v_ptr + at)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    out_ptr,
    table_width,
    scale,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M // GROUP queries of one sequence, with the GROUP heads of one KV head."""
    GROUP: tl.constexpr = NQ // NKV
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    b, kv_head = tl.program_id(2), tl.program_id(1)
    start = tl.load(query_starts_ptr + b)
    length = tl.load(query_starts_ptr + b + 1) - start
    blocks = tl.cdiv(length, QUERIES)
    if tl.program_id(0) < blocks:
        # The last block has the longest way to go, so it starts first.
        first_query = (blocks - 1 - tl.program_id(0)) * QUERIES
        limit = tl.load(seq_lens_ptr + b)
        context = limit - length
        row = tl.arange(0, BLOCK_M)
        query = first_query + row // GROUP
        valid = (query < length) & (row < QUERIES * GROUP)
        # Rows past the end repeat the last query instead of being masked; they are not stored.
        query = tl.minimum(query, length - 1)
        head = kv_head * GROUP + row % GROUP
        d = tl.arange(0, D)
        at = ((start + query).to(tl.int64) * NQ + head)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + at)
        row_limit = context + query + 1
        k_ptr += kv_head * D
        v_ptr += kv_head * D
        table_ptr = tables_ptr + b.to(tl.int64) * table_width
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        seen_by_all = (context + first_query + 1) // BLOCK_N * BLOCK_N
        seen_by_any = tl.minimum(context + first_query + QUERIES, limit)
        for first in range(0, seen_by_all, BLOCK_N):
            peak, total, acc = _attend(
                q, peak, total, acc, k_ptr, v_ptr, table_ptr, first, limit, row_limit, scale,
                NKV * D, PAGE_SIZE, D, BLOCK_N, False,
            )  # fmt: skip
        for first in range(seen_by_all, seen_by_any, BLOCK_N):
            peak, total, acc = _attend(
                q, peak, total, acc, k_ptr, v_ptr, table_ptr, first, limit, row_limit, scale,
                NKV * D, PAGE_SIZE, D, BLOCK_N, True,
            )  # fmt: skip
        acc = acc / total[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    out_ptr,
    sums_ptr,
    peaks_ptr,
    table_width,
    scale,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPLIT tokens of one sequence for one KV head. A sequence of one split is finished here."""
    GROUP: tl.constexpr = NQ // NKV
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, split = tl.program_id(0) // NKV, tl.program_id(1)
    kv_head = tl.program_id(0) % NKV
    limit = tl.load(seq_lens_ptr + b)
    begin = split * SPLIT
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q_row = b.to(tl.int64) * NQ + kv_head * GROUP + tl.minimum(row, GROUP - 1)  # surplus rows: not stored
    valid = row < GROUP
    if begin < limit:
        q = tl.load(q_ptr + q_row[:, None] * D + d[None, :])
        k_ptr += kv_head * D
        v_ptr += kv_head * D
        table_ptr = tables_ptr + b.to(tl.int64) * table_width
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        row_limit = tl.zeros((BLOCK_M,), tl.int32) + limit
        for first in range(begin, tl.minimum(begin + SPLIT, limit), BLOCK_N):
            peak, total, acc = _attend(
                q, peak, total, acc, k_ptr, v_ptr, table_ptr, first, limit, row_limit, scale,
                NKV * D, PAGE_SIZE, D, BLOCK_N, True,
            )  # fmt: skip
        if limit <= SPLIT:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_row[:, None] * D + d[None, :], out, mask=valid[:, None])
        else:
            part = q_row * tl.num_programs(1) + split
            tl.store(sums_ptr + part[:, None] * D + d[None, :], acc, mask=valid[:, None])
            tl.store(peaks_ptr + 2 * part, peak, mask=valid)
            tl.store(peaks_ptr + 2 * part + 1, total, mask=valid)
    elif split == 0:  # an empty sequence: padding of a batch
        zeros = tl.zeros((BLOCK_M, D), out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_row[:, None] * D + d[None, :], zeros, mask=valid[:, None])


@triton.jit
def _combine_kernel(
    seq_lens_ptr,
    out_ptr,
    sums_ptr,
    peaks_ptr,
    num_splits,
    NQ: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted mean of the splits of one head of one sequence, BLOCK_S at a time, in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limit = tl.load(seq_lens_ptr + tl.program_id(0) // NQ)
    if limit > SPLIT:
        row = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, D)
        splits = tl.cdiv(limit, SPLIT)
        peak = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((D,), tl.float32)
        for first in range(0, splits, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            part = row * num_splits + s
            peaks = tl.load(peaks_ptr + 2 * part, mask=s < splits, other=float("-inf"))
            totals = tl.load(peaks_ptr + 2 * part + 1, mask=s < splits, other=0.0)
            sums = tl.load(sums_ptr + part[:, None] * D + d[None, :], mask=(s < splits)[:, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            rescale = tl.exp2(peak - new_peak)
            weights = tl.exp2(peaks - new_peak)
            total = total * rescale + tl.sum(weights * totals, 0)
            acc = acc * rescale + tl.sum(weights[:, None] * sums, 0)
            peak = new_peak
        tl.store(out_ptr + row * D + d, (acc / total).to(out_ptr.dtype.element_ty))


def choose_prefill(D: int, itemsize: int, cc: int) -> AttentionConfig:
    """The configuration of the prefill kernel for a head size, an element size and a device."""
    if itemsize == 4:
        return AttentionConfig(32, 32, 4, 1)
    block_m, num_warps = (128, 8) if shared_limit(cc) > 100 * 1024 else (64, 4)
    return AttentionConfig(block_m, 64, num_warps, fit_stages(4 * 64 * D, shared_limit(cc) - 40 * 1024, 3))


def choose_decode(D: int, itemsize: int, cc: int) -> AttentionConfig:
    """The configuration of the decode kernel for a head size, an element size and a device."""
    block_n = 32 if itemsize == 4 else 64
    return AttentionConfig(16, block_n, 4, fit_stages(2 * block_n * D * itemsize, shared_limit(cc) // 2, 3))


def split_size(max_context: int) -> int:
    """Tokens a split for a cache of sequences up to `max_context` tokens: 256, more where that would make over 64 splits.

    A property of the cache, never of a batch: the same sequence is cut in the same way whatever it is batched with.
    """
    return max(256, triton.next_power_of_2(triton.cdiv(max_context, 64)))


def workspace_floats(B: int, Nq: int, D: int, max_seq_len: int, split: int) -> int:
    """fp32 values that `paged_attention_decode` keeps in the workspace."""
    splits = triton.cdiv(max_seq_len, split)
    return B * Nq * splits * (D + 2) if splits > 1 else 0


def paged_attention_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    out: Tensor | None = None,
    *,
    check: bool = True,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of each sequence's new tokens on all its cached ones, the new ones included, causally → [T, Nq, D].

    q [T, Nq, D], sequence after sequence; pages [P, page_size, Nkv, D]; block_tables [B, pages] int32; query_starts [B + 1]
    int32; seq_lens [B] int32 counts the new tokens too; max_query_len: at least the longest sequence's new tokens.
    """
    B = seq_lens.shape[0]
    if check:
        _check(q, k_pages, v_pages, block_tables, seq_lens, out)
        check_tensor("query_starts", query_starts, (B + 1,), torch.int32, q.device)
    Nq, Nkv, D, page_size = q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1]
    out = torch.empty_like(q) if out is None else out
    if q.shape[0] == 0 or max_query_len == 0:
        return out
    config = config or choose_prefill(D, q.element_size(), capability(q.device))
    grid = (triton.cdiv(max_query_len, config.block_m // (Nq // Nkv)), Nkv, B)
    _prefill_kernel[grid](
        q, k_pages, v_pages, block_tables, query_starts, seq_lens, out, block_tables.shape[1], scale * _LOG2_E,
        NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def paged_attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    workspace: Workspace,
    out: Tensor | None = None,
    *,
    split: int = 256,
    pdl: bool = False,
    check: bool = True,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of one new token per sequence on all its cached ones, itself included: q [B, Nq, D] → [B, Nq, D].

    pages [P, page_size, Nkv, D]; block_tables [B, pages] int32; seq_lens [B] int32, 0: padding, the result is 0.
    max_seq_len bounds seq_lens and sizes the grid (programs past a sequence's end return at once); what it bounds is not
    checked, which would need the device. split: tokens a program reads, a power of two, see `split_size`.
    `pdl`: overlap with the kernel before it in the stream (sm_90 and later).
    """
    if check:
        _check(q, k_pages, v_pages, block_tables, seq_lens, out)
        check_tensor("seq_lens", seq_lens, (q.shape[0],), torch.int32, q.device)
        if split < 64 or split & (split - 1):
            raise InputError("not a power of two from 64", where="split", found=split)
    B, Nq, D = q.shape
    Nkv, page_size = k_pages.shape[2], k_pages.shape[1]
    out = torch.empty_like(q) if out is None else out
    if B == 0:
        return out
    config = config or choose_decode(D, q.element_size(), capability(q.device))
    splits = max(1, triton.cdiv(max_seq_len, split))
    sums = peaks = None
    if splits > 1:
        sums = workspace.sums(workspace_floats(B, Nq, D, max_seq_len, split))
        peaks = sums[B * Nq * splits * D :]
    _decode_kernel[(B * Nkv, splits)](
        q, k_pages, v_pages, block_tables, seq_lens, out, sums, peaks, block_tables.shape[1], scale * _LOG2_E,
        NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size, SPLIT=split, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        **launch_options(config.num_warps, config.num_stages, pdl),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(B * Nq,)](
            seq_lens, out, sums, peaks, splits, NQ=Nq, D=D, SPLIT=split, BLOCK_S=16, **launch_options(4, 1, pdl)
        )
    return out
