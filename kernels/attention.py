"""Causal attention on the paged KV cache for ragged batches: prompts, parts of prompts, single tokens, in any mix.

The query heads that share a KV head are computed together as rows of one matrix, so K and V are read once for all of
them. Online softmax in fp32, in powers of two (Milakov & Gimelshein 2018; Dao et al. 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.common import check_activations, check_tensor

HEAD_DIMS = (64, 128)
MAX_GROUP = 16
LOG2_E = 1.4426950408889634

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
def _block(
    table_ptr, first, limit, STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The tokens t = first + [0, BLOCK_N) of a sequence, and where they are in the pages [BLOCK_N, D]; `first` is a
    multiple of BLOCK_N."""
    t = first + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table_ptr + first // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(table_ptr + t // PAGE_SIZE, mask=t < limit, other=0).to(tl.int64)
    return t, (page * PAGE_SIZE + t % PAGE_SIZE)[:, None] * STRIDE + tl.arange(0, D)[None, :]


@triton.jit
def attend(q, peak, total, acc, k_ptr, v_ptr, at, t, limit, row_limit, scale, MASKED: tl.constexpr):
    """One step of the online softmax: rows q [M, D] on the tokens t [N], whose K and V are at the offsets `at` [N, D].

    MASKED: some of the tokens are at or past `limit`, the sequence's end (what the page holds there may be NaN, also in
    V, where a probability of zero would not stop it), or hidden from some rows, which see tokens below row_limit [M].
    """
    k = tl.load(k_ptr + at, mask=(t < limit)[:, None], other=0.0) if MASKED else tl.load(k_ptr + at)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        s = tl.where(t[None, :] < row_limit[:, None], s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    rescale = tl.exp2(peak - new_peak)
    p = tl.exp2(s - new_peak[:, None])
    total = total * rescale + tl.sum(p, 1)
    v = tl.load(v_ptr + at, mask=(t < limit)[:, None], other=0.0) if MASKED else tl.load(v_ptr + at)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit(do_not_specialize=["table_width"])
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
            t, kv_at = _block(table_ptr, first, limit, NKV * D, PAGE_SIZE, D, BLOCK_N)
            peak, total, acc = attend(q, peak, total, acc, k_ptr, v_ptr, kv_at, t, limit, row_limit, scale, False)
        for first in range(seen_by_all, seen_by_any, BLOCK_N):
            t, kv_at = _block(table_ptr, first, limit, NKV * D, PAGE_SIZE, D, BLOCK_N)
            peak, total, acc = attend(q, peak, total, acc, k_ptr, v_ptr, kv_at, t, limit, row_limit, scale, True)
        acc = acc / total[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def choose_config(itemsize: int) -> AttentionConfig:
    """The configuration for an element size."""
    if itemsize == 4:
        return AttentionConfig(32, 32, 8, 1)
    return AttentionConfig(128, 64, 8, 3)


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

    q [T, Nq, D], sequence after sequence; pages [P, page_size, Nkv, D]; block_tables [B, pages] int32; query_starts
    [B + 1] int32; seq_lens [B] int32 counts the new tokens too; max_query_len bounds a sequence's new tokens and sizes
    the grid; that it does is not checked, which would need a read from the device.
    """
    B = seq_lens.shape[0]
    if check:
        check_activations("q", q, 3)
        check_inputs(q, k_pages, v_pages, block_tables, seq_lens, q.shape[1], q.shape[2])
        if out is not None:
            check_tensor("out", out, tuple(q.shape), q.dtype, q.device)
        check_tensor("query_starts", query_starts, (B + 1,), torch.int32, q.device)
    Nq, Nkv, D, page_size = q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1]
    out = torch.empty_like(q) if out is None else out
    if q.shape[0] == 0 or max_query_len == 0:
        return out
    config = config or choose_config(q.element_size())
    grid = (triton.cdiv(max_query_len, config.block_m // (Nq // Nkv)), Nkv, B)
    _prefill_kernel[grid](
        q, k_pages, v_pages, block_tables, query_starts, seq_lens, out, block_tables.shape[1], scale * LOG2_E,
        NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def check_inputs(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, Nq: int, D: int
) -> None:
    """Raise InputError unless pages, tables and lengths fit each other, q's dtype and device, Nq heads of D."""
    if D not in HEAD_DIMS:
        raise InputError("unsupported head size", where="q", expected="64 or 128", found=D)
    check_tensor("k_pages", k_pages, (None, None, None, D), q.dtype, q.device)
    check_tensor("v_pages", v_pages, tuple(k_pages.shape), q.dtype, q.device)
    page_size, Nkv = k_pages.shape[1:3]
    if page_size < 16 or page_size & (page_size - 1):
        raise InputError("unsupported page size", where="k_pages", expected="a power of two from 16", found=page_size)
    if Nq % Nkv or Nq // Nkv > MAX_GROUP:
        what = f"a multiple of {Nkv} KV heads, at most {MAX_GROUP} times as many"
        raise InputError("unsupported number of query heads", where="q", expected=what, found=Nq)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, q.device)
    check_tensor("block_tables", block_tables, (seq_lens.shape[0], None), torch.int32, q.device)


def cost(
    query_lens: Sequence[int], seq_lens: Sequence[int], Nq: int, Nkv: int, D: int, itemsize: int
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of a batch, K and V of each sequence read once."""
    seen = sum(new * total - new * (new - 1) // 2 for new, total in zip(query_lens, seq_lens, strict=True))
    return 2 * (sum(query_lens) * Nq + sum(seq_lens) * Nkv) * D * itemsize, 4 * seen * Nq * D
