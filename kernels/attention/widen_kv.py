"""16-bit copies of FP8 KV pages, for attention of long prompts.

Many tiles read the same values. To convert each value once, instead of in every tile, takes little time beside the products.
"""

import torch
import triton
import triton.language as tl

from minirt.kernels.attention.operands import KVPages, Prefill, prefill_lookup_size
from minirt.kernels.attention.partial import parts_of
from minirt.kernels.launch import sm_count
from minirt.kernels.prepared import prepared

CASES = [
    {"Nkv": 3, "D": 64, "page_size": 16, "lens": (40, 1, 0, 17), "contexts": (9, 33, 5, 0), "shortest": 2},
    {"Nkv": 2, "D": 128, "page_size": 128, "lens": (130, 3), "contexts": (0, 700), "shortest": 1},
]


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _widen_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, tables_ptr, starts_ptr, lens_ptr, wide_k_ptr, wide_v_ptr, wide_tables_ptr, B,
    table_width, NKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_B: tl.constexpr, ROWS: tl.constexpr,
    SHORTEST: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One KV head of every n-th page, for n programs per head. A page is copied whole, also past the end of its sequence."""
    kv_head = tl.program_id(0) % NKV
    index = tl.arange(0, BLOCK_B)
    new = tl.load(starts_ptr + index + 1, mask=index < B, other=0) - tl.load(starts_ptr + index, mask=index < B, other=0)
    lens = tl.load(lens_ptr + index, mask=index < B, other=0)
    meant = (new >= SHORTEST) & (new > 0)
    if PARTIAL:
        parts, _ = parts_of(new, lens, PARTIAL)
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


def widen(prefill: Prefill, split: int) -> Prefill:
    """Copy FP8 pages to 16 bits (values times scales, rounded to q's dtype), and return operands with the copies.

    Only the pages of sequences that `paged_attention_prefill` computes without `partial` are copied. Other entries of the new
    block tables are not written. The size of the copies follows from `max_splits`, the number of KV splits of `split` tokens.
    """
    q, pages, tables, starts, lens = prefill[:5]
    page_size, (Nkv, D), B = pages.page_size, pages.k.shape[2:], prefill.num_seqs
    num_pages = prefill.max_splits * max(1, split // page_size)
    k, v = (torch.empty(num_pages, page_size, Nkv, D, dtype=q.dtype, device=q.device) for _ in range(2))
    wide_tables = torch.empty_like(tables)
    programs = min(num_pages, max(1, 8 * sm_count(k.device) // Nkv))
    _widen_kernel[(programs * Nkv,)](
        pages.k.view(torch.uint8), pages.v.view(torch.uint8), pages.k_scale, pages.v_scale, tables, starts, lens, k, v,
        wide_tables, B, tables.shape[1], NKV=Nkv, D=D, PAGE_SIZE=page_size, BLOCK_B=prefill_lookup_size(B),
        ROWS=min(page_size, 64), SHORTEST=prefill.shortest, PARTIAL=prefill.partial, num_warps=4,
    )  # fmt: skip
    return prefill._replace(pages=KVPages(k, v), block_tables=wide_tables)
