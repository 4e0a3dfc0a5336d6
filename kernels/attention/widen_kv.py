"""16-bit copies of FP8 KV pages, for the attention of long prompts: its products are so many more than the values that are read
that widening these once, instead of in every tile, takes hardly any of its time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.attention.partial import parts_of
from minirt.kernels.launch import sm_count

MOST_SPLITS = 512  # of 256 tokens, by what the host knows of a step: copies of 131,072 tokens take 0.5 GB in Llama-3.1-8B

CASES = [
    {"Nkv": 3, "D": 64, "page_size": 16, "lens": (40, 1, 0, 17), "contexts": (9, 33, 5, 0), "shortest": 2},
    {"Nkv": 2, "D": 128, "page_size": 128, "lens": (130, 3), "contexts": (0, 700), "shortest": 1},
]


@triton.jit(do_not_specialize=["B", "table_width"])
def _widen_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, starts_ptr, lens_ptr, wide_k_ptr, wide_v_ptr, wide_tables_ptr, B,
    table_width, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
    SHORTEST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One KV head of every so many-th page. What a page holds behind its sequence's end is copied, too."""
    kv_head = tl.program_id(0) % NKV
    index = tl.arange(0, BLOCK_B)
    new = tl.load(starts_ptr + index + 1, mask=index < B, other=0) - tl.load(starts_ptr + index, mask=index < B, other=0)
    lens = tl.load(lens_ptr + index, mask=index < B, other=0)
    meant = (new >= SHORTEST) & (new > 0)
    if CHUNKS:
        parts, _ = parts_of(new, lens)
        meant = meant & (parts == 0)
    ends = tl.cumsum(tl.where(meant, (lens + PAGE_SIZE - 1) // PAGE_SIZE, 0), 0)
    d = tl.arange(0, D)[None, :]
    for page in range(tl.program_id(0) // NKV, tl.max(ends, 0), tl.num_programs(0) // NKV):
        before = ends <= page
        b = tl.sum(before.to(tl.int32), 0)
        at = b.to(tl.int64) * table_width + page - tl.max(tl.where(before, ends, 0), 0)
        source = tl.load(tables_ptr + at).to(tl.int64) * PAGE_SIZE
        if kv_head == 0:
            tl.store(wide_tables_ptr + at, page)
        for first in range(0, PAGE_SIZE, ROWS):
            row = first + tl.arange(0, ROWS)
            old = (source + row) * NKV + kv_head
            wide = (tl.cast(page, tl.int64) * PAGE_SIZE + row) * NKV + kv_head
            k = tl.load(k_ptr + old[:, None] * D + d).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            v = tl.load(v_ptr + old[:, None] * D + d).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            k *= tl.load(k_scales_ptr + old)[:, None]
            v *= tl.load(v_scales_ptr + old)[:, None]
            tl.store(wide_k_ptr + wide[:, None] * D + d, k.to(wide_k_ptr.dtype.element_ty))
            tl.store(wide_v_ptr + wide[:, None] * D + d, v.to(wide_v_ptr.dtype.element_ty))


def widen(
    k_pages: Tensor, v_pages: Tensor, k_scales: Tensor, v_scales: Tensor, block_tables: Tensor, query_starts: Tensor,
    seq_lens: Tensor, max_splits: int, dtype: torch.dtype, shortest: int, chunks: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Values times scales, rounded to `dtype`, of the sequences that `paged_attention_prefill` computes without parts: k and v
    pages [P, page_size, Nkv, D] in the order of the sequences, and their block tables, whose other entries are not written.

    Arguments as `paged_attention_prefill` has checked them; P follows from max_splits alone.
    """
    page_size, Nkv, D = k_pages.shape[1:]
    pages = max_splits * max(1, 256 // page_size)
    k, v = (torch.empty(pages, page_size, Nkv, D, dtype=dtype, device=k_pages.device) for _ in range(2))
    tables = torch.empty_like(block_tables)
    programs = min(pages, max(1, 8 * sm_count(k.device) // Nkv))
    _widen_kernel[(programs * Nkv,)](
        k_pages.view(torch.uint8), v_pages.view(torch.uint8), k_scales, v_scales, block_tables, query_starts, seq_lens, k, v,
        tables, seq_lens.shape[0], block_tables.shape[1], NKV=Nkv, D=D, PAGE_SIZE=page_size,
        BLOCK_B=max(256, triton.next_power_of_2(seq_lens.shape[0])), ROWS=min(page_size, 64), SHORTEST=shortest, CHUNKS=chunks,
        num_warps=4,
    )  # fmt: skip
    return k, v, tables
