"""16-bit copies of FP8 KV pages, for attention of long prompts.

Many tiles read the same values. To convert each value once, instead of in every tile, takes little time beside the products.
"""


import torch
import triton
import triton.language as tl

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.online_softmax import load_channels, oldest_seen, store_channels
from minirt.kernels.attention.operands import AttentionInput, KVPages, prefill_lookup_size
from minirt.kernels.attention.partial import is_left, lengths
from minirt.kernels.launch import sm_count
from minirt.kernels.prepared import prepared

CASES = [
    {"Nkv": 3, "D": 64, "page_size": 16, "lens": (40, 1, 0, 17), "contexts": (9, 33, 5, 0), "shortest": 2},
    {"Nkv": 2, "D": 128, "page_size": 128, "lens": (130, 3), "contexts": (0, 700), "shortest": 1},
    {"Nkv": 1, "D": 512, "page_size": 32, "lens": (50, 3), "contexts": (0, 700), "shortest": 1},
]


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _widen_kernel(pages, sequences, wide, wide_tables_ptr, window, B, table_width, C):
    """One KV head of every n-th page, for n programs per head. A page is copied whole, also past the end of its sequence."""
    kv_head = tl.program_id(0) % C.NKV
    new, lens = lengths(sequences, B, C.BLOCK_B)
    left = (new > 0) & is_left(new, lens, C, window)
    counts = (lens + C.PAGE_SIZE - 1) // C.PAGE_SIZE
    if window is not None:
        unseen = oldest_seen(lens, new, window) // C.PAGE_SIZE  # pages before the first one that a new token sees
        counts -= unseen
    ends = tl.cumsum(tl.where(left, counts, 0), 0)
    d = tl.arange(0, C.BLOCK_D)[None, :]
    for page in range(tl.program_id(0) // C.NKV, tl.max(ends, 0), tl.num_programs(0) // C.NKV):
        before = ends <= page
        b = tl.sum(before.to(tl.int32), 0)
        at = b.to(tl.int64) * table_width + page - tl.max(tl.where(before, ends, 0), 0)
        if window is not None:
            at += tl.sum(tl.where(tl.arange(0, C.BLOCK_B) == b, unseen, 0), 0)
        source = tl.load(sequences.block_tables + at).to(tl.int64) * C.PAGE_SIZE
        if kv_head == 0:
            tl.store(wide_tables_ptr + at, page)
        for first in range(0, C.PAGE_SIZE, C.BLOCK_N):
            row = first + tl.arange(0, C.BLOCK_N)
            old = (source + row) * C.NKV + kv_head
            new_row = (tl.cast(page, tl.int64) * C.PAGE_SIZE + row) * C.NKV + kv_head
            k = load_channels(pages.k + old[:, None] * C.D + d, d, C.D).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            v = load_channels(pages.v + old[:, None] * C.D + d, d, C.D).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            k *= tl.load(pages.k_scale + old)[:, None]
            v *= tl.load(pages.v_scale + old)[:, None]
            store_channels(wide.k + new_row[:, None] * C.D + d, k, d, C.D)
            store_channels(wide.v + new_row[:, None] * C.D + d, v, d, C.D)


def widen(a: AttentionInput) -> AttentionInput:
    """Copy FP8 pages to 16 bits (values times scales, rounded to q's dtype), and return operands with the copies.

    Only the pages of sequences that are left to `prefill_sm90` are copied, with a window those that a new token sees. Other
    entries of the new block tables are not written. The size of the copies follows from `max_splits`.
    """
    q, pages, B, tables = a.heads, a.pages, a.num_seqs, a.sequences.block_tables
    page_size, (Nkv, D) = pages.page_size, pages.k.shape[2:]
    num_pages = a.max_splits * max(1, a.split // page_size)
    wide = KVPages(*(torch.empty(num_pages, page_size, Nkv, D, dtype=q.dtype, device=q.device) for _ in range(2)))
    wide_tables = torch.empty_like(tables)
    programs = min(num_pages, max(1, 8 * sm_count(q.device) // Nkv))
    constants = Constants.of(
        a, BLOCK_N=min(page_size, 64 if D <= 128 else 32 if D <= 256 else 16), BLOCK_B=prefill_lookup_size(B),
        SHORTEST=a.shortest, PARTIAL=a.partial,
    )  # fmt: skip
    _widen_kernel[(programs * Nkv,)](
        pages.for_kernel(torch.uint8), a.sequences, wide, wide_tables, a.scores.window, B, a.table_width, C=constants, num_warps=4
    )
    return a._replace(pages=wide, sequences=a.sequences._replace(block_tables=wide_tables))
