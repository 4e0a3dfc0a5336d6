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
from minirt.kernels.attention import partial as chunk
from minirt.kernels.attention import prefill_sm90, widen_kv
from minirt.kernels.attention.online_softmax import LOG2_E, attend, blank, fuses, page_slots, prepare, whole
from minirt.kernels.attention.rope_write import as_integers, check_pages
from minirt.kernels.checks import check_activations, check_tensor
from minirt.kernels.launch import Workspace, capability

HEAD_DIMS = (64, 128)
MAX_GROUP = 16

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
    registers: int | None = None  # the most that a thread may use, for more programs to run at once


@triton.jit
def _find(block, starts_ptr, B, QUERIES: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence that a block of queries is for, its first row and its number of rows.

    Sequence b's blocks are numbered from query_starts[b] // QUERIES + b on, which leaves each sequence room for all of its
    own, and some numbers unused. So the number of blocks is known from that of tokens and sequences alone.
    """
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(starts_ptr + index, mask=index < B, other=2**30)
    b = tl.sum((starts // QUERIES + index <= block).to(tl.int32), 0) - 1
    start = tl.load(starts_ptr + b)
    return b, start, tl.load(starts_ptr + b + 1) - start


@triton.jit(do_not_specialize=["B", "table_width"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    out_ptr,
    B,
    table_width,
    scale,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORTEST: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """BLOCK_M // GROUP queries of one sequence, with the GROUP heads of one KV head. CHUNKS: without those of
    `partial`."""
    GROUP: tl.constexpr = NQ // NKV
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    FP8: tl.constexpr = k_scales_ptr is not None
    kv_head = tl.program_id(0) % NKV
    # A sequence's last block has the longest way to go, so it starts first.
    block = tl.num_programs(0) // NKV - 1 - tl.program_id(0) // NKV
    b, start, length = _find(block, query_starts_ptr, B, QUERIES, BLOCK_B)
    first_query = (block - start // QUERIES - b) * QUERIES
    limit = tl.load(seq_lens_ptr + b)
    works = (first_query < length) & (length >= SHORTEST)
    if CHUNKS:
        parts, _ = chunk.parts_of(length, limit)
        works = works & (parts == 0)
    if works:
        context = limit - length
        row = tl.arange(0, BLOCK_M)
        query = first_query + row // GROUP
        valid = (query < length) & (row < QUERIES * GROUP)
        # Rows past the end repeat the last query instead of being masked; they are not stored.
        query = tl.minimum(query, length - 1)
        head = kv_head * GROUP + row % GROUP
        d = tl.arange(0, D)
        at = ((start + query).to(tl.int64) * NQ + head)[:, None] * D + d[None, :]
        q = prepare(tl.load(q_ptr + at), FP8)
        row_limit = context + query + 1
        table_ptr = tables_ptr + b.to(tl.int64) * table_width
        row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = blank(BLOCK_M, D, FP8)
        seen_by_all = (context + first_query + 1) // BLOCK_N * BLOCK_N
        seen_by_any = tl.minimum(context + first_query + QUERIES, limit)
        for first in range(0, seen_by_all, BLOCK_N):
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
        acc = whole(acc) / total[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def choose_prefill_config(itemsize: int, D: int, fp8: bool, cc: int) -> AttentionConfig:
    """The configuration for q's element size, a head size, pages of fp8 or of that size, and a compute capability."""
    if itemsize == 4:
        return AttentionConfig(32, 32, 8, 1)
    if fp8 and D == 128:
        return AttentionConfig(64, 64, 4, 3, registers=168)
    if D == 64 and not fp8:
        return AttentionConfig(64, 64, 4, 3)
    # Two programs on an SM hide each other's softmax; before Hopper, where q is in registers too, there is no room.
    return AttentionConfig(128, 64, 8, 3 if fp8 else 2, registers=128 if cc == 90 else None)


def paged_attention_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    shortest: int = 1,
    workspace: Workspace | None = None,
    max_splits: int = 0,
    check: bool = True,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of each sequence's new tokens on all its cached ones, the new ones included, causally → [T, Nq, D].

    q [T, Nq, D], sequence after sequence; pages [P, page_size, Nkv, D]; block_tables [B, pages] int32; query_starts
    [B + 1] int32, rising, 0 first and at most T last; seq_lens [B] int32 counts the new tokens too. Rows of q that belong to
    no sequence, behind the last, are padding, and so are sequences without rows: `out` is not written there. The launch
    depends on the shapes alone, so a CUDA graph of it serves any batch that was padded to T and B. With k_scales, v_scales
    [P, page_size, Nkv] fp32 the pages are float8_e4m3fn, with a scale for each token and head. scale must be positive.
    Sequences of less than `shortest` new tokens are left to another kernel. With a workspace, few new tokens on a long context
    are computed in parts (`partial`); `max_splits` bounds how many times 256 cached tokens there are, with begun ones.
    With max_splits, prompts on fp8 pages are computed on a 16-bit copy where that pays (Hopper). With `config` it is this file's
    kernel that runs on the others.
    """
    B = seq_lens.shape[0]
    if check:
        check_activations("q", q, 3)
        check_inputs(q, k_pages, v_pages, k_scales, v_scales, block_tables, seq_lens, q.shape[1], q.shape[2])
        if out is not None:
            check_tensor("out", out, tuple(q.shape), q.dtype, q.device)
        check_tensor("query_starts", query_starts, (B + 1,), torch.int32, q.device)
        check_scale(scale)
        if workspace is not None and max_splits < 1:
            raise InputError("not positive", where="max_splits", expected="a bound, with a workspace", found=max_splits)
        if workspace is not None and shortest > 2:
            raise InputError("too large", where="shortest", expected="at most 2, with a workspace", found=shortest)
    Nq, Nkv, D, page_size = q.shape[1], k_pages.shape[2], q.shape[2], k_pages.shape[1]
    out = torch.empty_like(q) if out is None else out
    if q.shape[0] == 0 or B == 0:
        return out
    cc = capability(q.device)
    chunks = workspace is not None and chunk.possible(q.shape[0], B, max_splits)
    if workspace is not None and chunks:
        cache = (k_pages, v_pages, k_scales, v_scales, block_tables, query_starts, seq_lens)
        chunk.attend_chunks(q, *cache, max_splits, scale * LOG2_E, out, workspace)
    if config is None and cc == 90 and prefill_sm90.can_prefill(q, out):
        few = 0 < max_splits <= widen_kv.MOST_SPLITS
        if k_scales is not None and v_scales is not None and few:
            cache = (k_pages, v_pages, k_scales, v_scales, block_tables, query_starts, seq_lens)
            k_pages, v_pages, block_tables = widen_kv.widen(*cache, max_splits, q.dtype, shortest, chunks)
            k_scales, v_scales = None, None
    if config is None and cc == 90 and prefill_sm90.can_prefill(q, out, k_pages, v_pages):
        batch = (block_tables, query_starts, seq_lens)
        return prefill_sm90.launch_prefill(q, k_pages, v_pages, *batch, scale, out, shortest, chunks)
    config = config or choose_prefill_config(q.element_size(), D, k_scales is not None, cc)
    blocks = q.shape[0] // (config.block_m // (Nq // Nkv)) + B
    _prefill_kernel[(blocks * Nkv,)](
        q, *as_integers(torch.int16, k_pages, v_pages), k_scales, v_scales, block_tables, query_starts, seq_lens, out,
        B, block_tables.shape[1], scale * LOG2_E, NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size,
        BLOCK_B=max(256, triton.next_power_of_2(B)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        SHORTEST=shortest, CHUNKS=chunks, num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.registers,
        enable_fp_fusion=fuses(q.dtype),
    )  # fmt: skip
    return out


def check_inputs(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    Nq: int,
    D: int,
) -> None:
    """Raise InputError unless pages, tables and lengths fit each other, q's dtype and device, Nq heads of D."""
    if D not in HEAD_DIMS:
        raise InputError("unsupported head size", where="q", expected="64 or 128", found=D)
    check_pages(k_pages, v_pages, k_scales, v_scales, None, D, q)
    page_size, Nkv = k_pages.shape[1:3]
    if page_size < 16 or page_size & (page_size - 1):
        raise InputError("unsupported page size", where="k_pages", expected="a power of two from 16", found=page_size)
    if Nq % Nkv or Nq // Nkv > MAX_GROUP:
        what = f"a multiple of {Nkv} KV heads, at most {MAX_GROUP} times as many"
        raise InputError("unsupported number of query heads", where="q", expected=what, found=Nq)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, q.device)
    check_tensor("block_tables", block_tables, (seq_lens.shape[0], None), torch.int32, q.device)


def check_scale(scale: float) -> None:
    """Raise InputError unless the scores' factor is positive: their largest is looked for before it is applied."""
    if not scale > 0:
        raise InputError("not positive", where="scale", found=scale)


def cost(
    query_lens: Sequence[int], seq_lens: Sequence[int], Nq: int, Nkv: int, D: int, itemsize: int, fp8: bool = False
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of a batch, K and V of each sequence read once; `fp8`: from pages of
    that type, with a scale for each token and head."""
    seen = sum(new * total - new * (new - 1) // 2 for new, total in zip(query_lens, seq_lens, strict=True))
    head = D + 4 if fp8 else D * itemsize
    return 2 * (sum(query_lens) * Nq * D * itemsize + sum(seq_lens) * Nkv * head), 4 * seen * Nq * D
