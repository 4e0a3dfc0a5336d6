"""Decode attention of `attention_decode.py` for Hopper on pages of fp8, fused with rotary embedding and KV write.

As in `attention_decode_hopper` one warp fetches pages by TMA, and four warps compute an item at a time, with tokens, then
channels on the M side of the MMA. Pages are fetched as tiles of int16, pairs of channels: 64 of them, 128 bytes, are one head of
128 channels or two of 64. Two heads are one item: each one's queries are zeros in the channels of the other, and of the sums only
those of a head's own channels are stored. An odd number of heads leaves a last one alone, beside which TMA puts zeros.

K and V are widened to fp16, exactly, between shared memory and the tensor cores, so they are the MMA's operand in registers.
That is `mma.sync`, not Hopper's own instruction: ptxas before CUDA 13.3 may overwrite registers that the latter still reads
(triton#11781), and where memory is what takes the time the slower one will do.

The scales are gathered an item ahead. K's multiply the scores; V's enter as a term of the exponents, as in `attention.attend`.
"""

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.attention_decode_items import (
    BLOCK_N,
    BOX,
    LONGEST,
    MOST_SEQUENCES,
    PROGRAMS,
    REGISTERS,
    count_blocks,
    fetch_items,
    find_candidates,
    find_firsts,
    find_place,
    in_rows,
    norm_halves,
    turn,
)
from minirt.kernels.attention_steps import inverse, log2, widen
from minirt.kernels.common import cdiv, launch_options, processors
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.gemm_hopper import LEAST_TOKENS
from minirt.kernels.hopper import CHANNELS, described
from minirt.kernels.kv_write import as_integers

STAGES = 12  # blocks of K or V that a program has room for
PAIRS = CHANNELS  # of channels: what a tile has
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
WIDE = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))  # K and V
NARROW = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))  # queries and probabilities
_MOST_ROWS = 8  # queries of an item; with 16 `attention_decode.py`'s kernel is as fast, or faster


@gluon.jit
def _ask(
    place, first_head, batch, row, writes, d, m, NQ: gl.constexpr, NKV: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """All that an item needs of its sequence's new token, asked for side by side: both halves of the channels of q, k and v, for
    each row its head's, v once more in the order of sums, even and odd channels, cosines and sines, and, for the rows that write
    its K and V, the token's page."""
    GROUP: gl.constexpr = NQ // NKV
    HALF: gl.constexpr = D // 2
    qkv_ptr, cos_sin_ptr, tables_ptr, table_width = batch
    b, length, _ = place
    limit = length - 1
    heads_ptr = qkv_ptr + b * ((NQ + 2 * NKV) * D)
    # Rows without a head of their own repeat a last one and are not stored.
    q_ptrs = heads_ptr + (gl.minimum(first_head * GROUP + row, NQ - 1) * D)[:, None] + d[None, :]
    k_ptrs = heads_ptr + ((NQ + gl.minimum(first_head + row // GROUP, NKV - 1)) * D)[:, None] + d[None, :]
    v_ptrs = k_ptrs + NKV * D
    channel = first_head * D + 2 * m
    v_ptr = heads_ptr + (NQ + NKV) * D
    v_even = gl.load(v_ptr + gl.minimum(channel, NKV * D - 2))
    v_odd = gl.load(v_ptr + gl.minimum(channel + 1, NKV * D - 1))
    angles_ptr = cos_sin_ptr + gl.maximum(limit, 0).to(gl.int64) * D + d
    # Rows that write nothing load another page: one page for all would go to a uniform register, and be waited for at once.
    place_in_table = gl.maximum(limit // PAGE_SIZE - gl.where(writes, 0, 1), 0)
    page = gl.load(tables_ptr + b * table_width + place_in_table)
    return (
        gl.load(q_ptrs), gl.load(q_ptrs + HALF), gl.load(k_ptrs), gl.load(k_ptrs + HALF), gl.load(v_ptrs),
        gl.load(v_ptrs + HALF), v_even, v_odd, gl.load(angles_ptr), gl.load(angles_ptr + HALF), page,
    )  # fmt: skip


@gluon.jit
def _ask_pages(place, tables_ptr, table_width, m, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr):
    """The pages of the tokens of a split, for each block [tokens]: 0 where no token of the pages is."""
    b, length, split = place
    pages = ()
    for i in gl.static_range(0, SPLIT, BLOCK_N):
        t = split * SPLIT + i + m
        page = gl.load(tables_ptr + b * table_width + t // PAGE_SIZE, mask=t < length - 1, other=0)
        pages += (page,)  # type: ignore[assignment]
    return pages


@gluon.jit
def _ask_heads(scales_ptr, slot, first_head, inside, NKV: gl.constexpr, HEADS: gl.constexpr):
    """The scales of the item's heads in slots of the pages, [tokens] each, 1 where none is inside."""
    at = slot * NKV + first_head
    if HEADS == 1:
        return (gl.load(scales_ptr + at, mask=inside, other=1.0),)
    elif NKV % 2 == 0:  # both at once
        both = gl.load(scales_ptr.to(gl.pointer_type(gl.int64)) + at // 2, mask=inside, other=0x3F8000003F800000)
        return both.to(gl.int32).to(gl.float32, bitcast=True), (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    else:
        last = slot * NKV + gl.minimum(first_head + 1, NKV - 1)
        return gl.load(scales_ptr + at, mask=inside, other=1.0), gl.load(scales_ptr + last, mask=inside, other=1.0)


@gluon.jit
def _ask_scales(
    place, pages, first_head, k_scales_ptr, v_scales_ptr, m,
    NKV: gl.constexpr, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """K's and V's scales of those tokens, for each block and each of the item's heads."""
    _, length, split = place
    k_scales, v_scales = (), ()
    for i in gl.static_range(SPLIT // BLOCK_N):
        t = split * SPLIT + i * BLOCK_N + m
        slot = pages[i].to(gl.int64) * PAGE_SIZE + t % PAGE_SIZE
        k_scales += (_ask_heads(k_scales_ptr, slot, first_head, t < length - 1, NKV, HEADS),)  # type: ignore[assignment]
        v_scales += (_ask_heads(v_scales_ptr, slot, first_head, t < length - 1, NKV, HEADS),)  # type: ignore[assignment]
    return k_scales, v_scales


@gluon.jit
def _write(left, right, pages_ptr, scales_ptr, slot, d, writes, D: gl.constexpr):
    """Heads, given as halves [N, D/2], to their slots [N] as fp8 where `writes` → as the pages have them, and the scales [N]."""
    scale = fp8_scale(gl.max(gl.maximum(finite_magnitude(left), finite_magnitude(right)), 1))
    left, right = to_fp8(left, scale[:, None]), to_fp8(right, scale[:, None])
    ptrs = pages_ptr + slot[:, None] * D + d[None, :]
    gl.store(ptrs, left, mask=writes[:, None])
    gl.store(ptrs + D // 2, right, mask=writes[:, None])
    gl.store(scales_ptr + slot, scale, mask=writes)
    left, right = left.to(gl.float8e4nv, bitcast=True), right.to(gl.float8e4nv, bitcast=True)
    return left.to(gl.float32), right.to(gl.float32), scale


@gluon.jit
def _of_head(scales, second):
    """Of a block's scales [tokens] for each of the item's heads those of the columns of the first or of the `second` one."""
    if len(scales) == 1:
        return scales[0][:, None]
    else:
        return gl.where(second[None, :], scales[1][:, None], scales[0][:, None])


@gluon.jit
def _store_queries(x, q_tiles, head, START: gl.constexpr, D: gl.constexpr):
    """Half the channels of the queries [N, D/2] in fp16 to the tiles of even and of odd channels, zeros beside them."""
    N: gl.constexpr = x.shape[0]
    QUARTER: gl.constexpr = D // 4
    for h in gl.static_range(PAIRS * 2 // D):
        own = gl.where((head == h)[:, None], x, gl.zeros_like(x))
        even, odd = gl.split(gl.reshape(own, [N, QUARTER, 2]))
        q_tiles.index(0).slice(h * (D // 2) + START, QUARTER, 1).store(even)
        q_tiles.index(1).slice(h * (D // 2) + START, QUARTER, 1).store(odd)


@gluon.jit
def _release(empty):
    """Let a tile be overwritten that was read to registers. TMA's writes are ordered behind such reads by a fence alone: without
    it some came first as soon as programs fetched far ahead."""
    fence_async_shared()
    mbarrier.arrive(empty)


@gluon.jit
def _scores(
    ring, q_tiles, k_scales, v_scales, step, blocks, begin, limit, unit, second, SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of each block of the split: scores of the tokens from `begin` on, [tokens, heads], in powers of two and with V's scales as
    a term; −inf where no token of the pages is. With the next step in the ring."""
    N: gl.constexpr = q_tiles.shape[1]
    tiles, full, empty = ring
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))
    q_even = q_tiles.index(0).permute((1, 0)).load(NARROW)
    q_odd = q_tiles.index(1).permute((1, 0)).load(NARROW)
    scores = ()
    for i in gl.static_range(SPLIT // BLOCK_N):
        s = gl.full([BLOCK_N, N], float("-inf"), gl.float32, PRODUCTS)
        if i < blocks:
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            k = tiles.index(stage).load(WIDE)
            _release(empty.index(stage))
            even, odd = widen(k, gl.float16)
            zeros = gl.zeros([BLOCK_N, N], gl.float32, PRODUCTS)
            s = mma_v2(even, q_even, zeros) + mma_v2(odd, q_odd, zeros)  # two short chains of instructions, not a long one
            exponent = log2(_of_head(v_scales[i], second))
            s = s * unit[None, :] * _of_head(k_scales[i], second) + exponent
            s = gl.where((begin + i * BLOCK_N + m < limit)[:, None], s, float("-inf"))
            step += 1
        scores += (s,)  # type: ignore[assignment]
    return scores, step


@gluon.jit
def _values(ring, p_tiles, sums_even, sums_odd, step, blocks, tokens, STAGES: gl.constexpr):
    """Vᵀ · Pᵀ of the split's blocks added to the sums of even and of odd channels [pairs, heads], and the next step in the ring.
    V's rows from `tokens` on are cleared: a page may hold NaN there, which a probability of zero would not stop."""
    BLOCKS: gl.constexpr = p_tiles.shape[0]
    tiles, full, empty = ring
    token = gl.arange(0, BLOCK_N, gl.SliceLayout(0, WIDE))
    for i in gl.static_range(BLOCKS):
        if i < blocks:
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            v = tiles.index(stage).permute((1, 0)).load(WIDE)
            _release(empty.index(stage))
            inside = tokens - i * BLOCK_N
            if inside < BLOCK_N:
                v = gl.where((token < inside)[None, :], v, gl.zeros_like(v))
            even, odd = widen(v, gl.float16)
            p = p_tiles.index(i).load(NARROW)
            sums_even, sums_odd = mma_v2(even, p, sums_even), mma_v2(odd, p, sums_odd)
            step += 1
    return sums_even, sums_odd, step


@gluon.jit
def _attend_items(
    qkv_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, ring, q_tiles, p_tiles, tables_ptr,
    table_width, starts_ptr, lens_ptr, out_ptr, sums_ptr, peaks_ptr, B, scale, eps, NQ: gl.constexpr, NKV: gl.constexpr,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr, STRIDE: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The attention of one item after the other. The new token is not in the tiles: who has the split that it ends adds its score
    and its value, as rounded to fp8, by plain arithmetic, and writes its K and V and their scales to the pages."""
    GROUP: gl.constexpr = NQ // NKV
    N: gl.constexpr = q_tiles.shape[1]
    HEADS: gl.constexpr = PAIRS * 2 // D  # of an item
    UNITS: gl.constexpr = (NKV + HEADS - 1) // HEADS
    BLOCKS: gl.constexpr = SPLIT // BLOCK_N
    HALF: gl.constexpr = D // 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))  # tokens of a block, and pairs of channels
    n = gl.arange(0, N, gl.SliceLayout(0, PRODUCTS))
    row = gl.arange(0, N, gl.SliceLayout(1, ROWS))
    d = gl.arange(0, HALF, gl.SliceLayout(0, ROWS))
    second = n >= GROUP
    writes = (row % GROUP == 0) & (row < HEADS * GROUP)  # the new token's K and V
    q_norm, k_norm = in_rows(norm_halves(q_norm_ptr, d, D)), in_rows(norm_halves(k_norm_ptr, d, D))
    first, programs = gl.program_id(0), gl.num_programs(0)
    items = gl.load(starts_ptr + B)
    firsts = find_firsts(starts_ptr, B, STRIDE)
    next_place = find_place(first // UNITS, find_candidates(first // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE))
    candidates = find_candidates((first + programs) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
    pages = _ask_pages(next_place, tables_ptr, table_width, m, PAGE_SIZE, SPLIT)
    next_head = first % UNITS * HEADS
    scales = _ask_scales(next_place, pages, next_head, k_scales_ptr, v_scales_ptr, m, NKV, HEADS, PAGE_SIZE, SPLIT)
    if PDL:
        gdc_wait()  # before anything of the kernel before is read, and before anything is written
    if PDL and EARLY:
        gdc_launch_dependents()  # as in `attention_decode_hopper`
    batch = (qkv_ptr, cos_sin_ptr, tables_ptr, table_width)
    asked = _ask(next_place, next_head, batch, row, writes, d, m, NQ, NKV, D, PAGE_SIZE)
    step = 0
    for pair in range(first, items * UNITS, programs):
        item, head = pair // UNITS, pair % UNITS * HEADS
        b, length, split = next_place
        q_left, q_right, k_left, k_right, v_left, v_right, v_even, v_odd, cos, sin, page = asked
        begin, limit = split * SPLIT, length - 1
        blocks = count_blocks(split, length, SPLIT)
        newest = limit < begin + SPLIT  # the new token belongs to this split
        cos, sin = cos[None, :], sin[None, :]
        q_left, q_right = turn(q_left, q_right, q_norm, cos, sin, eps, D)
        q_left, q_right = q_left.to(gl.float32), q_right.to(gl.float32)
        # A power of two for each row makes queries fit fp16, see `attention.prepare`.
        largest = gl.max(gl.maximum(gl.abs(q_left), gl.abs(q_right)), 1)
        exponent = gl.minimum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
        shrink = (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
        _store_queries((q_left * shrink).to(gl.float16), q_tiles, row // GROUP, 0, D)
        _store_queries((q_right * shrink).to(gl.float16), q_tiles, row // GROUP, D // 4, D)
        unit = gl.convert_layout(exponent.to(gl.float32, bitcast=True), gl.SliceLayout(0, PRODUCTS)) * scale
        # The new token's own score, [heads]: −inf where it belongs to another split.
        new_score = gl.full([N], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCTS))
        new_scale = gl.full([N], 1.0, gl.float32, gl.SliceLayout(0, PRODUCTS))
        if newest:
            turned_left, turned_right = turn(k_left, k_right, k_norm, cos, sin, eps, D)
            slot = (page.to(gl.int64) * PAGE_SIZE + limit % PAGE_SIZE) * NKV + head + row // GROUP
            exists = writes & (head + row // GROUP < NKV)
            new_left, new_right, k_scale = _write(turned_left, turned_right, k_ptr, k_scales_ptr, slot, d, exists, D)
            v_scale = _write(v_left, v_right, v_ptr, v_scales_ptr, slot, d, exists, D)[2]
            score = gl.sum(q_left * new_left + q_right * new_right, 1) * k_scale
            new_score = gl.convert_layout(score, gl.SliceLayout(0, PRODUCTS)) * scale
            new_scale = gl.convert_layout(v_scale, gl.SliceLayout(0, PRODUCTS))
        new_score += log2(new_scale)
        # What the next item needs arrives while this one is computed.
        next_place = find_place((pair + programs) // UNITS, candidates)
        next_head = (pair + programs) % UNITS * HEADS
        asked = _ask(next_place, next_head, batch, row, writes, d, m, NQ, NKV, D, PAGE_SIZE)
        pages = _ask_pages(next_place, tables_ptr, table_width, m, PAGE_SIZE, SPLIT)
        candidates = find_candidates((pair + 2 * programs) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
        k_scales, v_scales = scales
        scores, step = _scores(ring, q_tiles, k_scales, v_scales, step, blocks, begin, limit, unit, second, SPLIT, STAGES)
        highest = gl.full([BLOCK_N, N], float("-inf"), gl.float32, PRODUCTS)
        for i in gl.static_range(BLOCKS):
            highest = gl.maximum(highest, scores[i])
        # 2^15 times a probability is the most that occurs; they go to shared memory, where the next products take them from.
        peak = gl.maximum(gl.max(highest, 0), new_score) - 15
        weights = gl.zeros([BLOCK_N, N], gl.float32, PRODUCTS)
        for i in gl.static_range(BLOCKS):
            p = gl.exp2(scores[i] - peak[None, :])
            weights += p * inverse(_of_head(v_scales[i], second))
            p_tiles.index(i).store(p.to(gl.float16))
        new_weight = gl.exp2(new_score - peak)
        total = gl.sum(weights, 0) + new_weight * inverse(new_scale)
        scales = _ask_scales(next_place, pages, next_head, k_scales_ptr, v_scales_ptr, m, NKV, HEADS, PAGE_SIZE, SPLIT)
        # The sums [pairs of channels, heads]. A split that the new token does not belong to must not see its V, which may be NaN.
        sums_even = gl.zeros([PAIRS, N], gl.float32, PRODUCTS)
        sums_odd = gl.zeros_like(sums_even)
        if newest:
            new_even = to_fp8(v_even[:, None] + gl.zeros_like(weights), new_scale[None, :]).to(gl.float8e4nv, bitcast=True)
            new_odd = to_fp8(v_odd[:, None] + gl.zeros_like(weights), new_scale[None, :]).to(gl.float8e4nv, bitcast=True)
            sums_even = new_even.to(gl.float32) * new_weight[None, :]
            sums_odd = new_odd.to(gl.float32) * new_weight[None, :]
        sums_even, sums_odd, step = _values(ring, p_tiles, sums_even, sums_odd, step, blocks, limit - begin, STAGES)
        own = (n < HEADS * GROUP) & (head * GROUP + n < NQ)
        stored = own[None, :] & ((2 * m // D)[:, None] == (n // GROUP)[None, :])
        at = n[None, :] * D + (2 * m % D)[:, None]
        factor = 1 / total
        part = item.to(gl.int64) * NQ + head * GROUP
        if length <= SPLIT:
            out_ptrs = out_ptr + (b * NQ + head * GROUP) * D + at
            gl.store(out_ptrs, (sums_even * factor[None, :]).to(out_ptr.dtype.element_ty), mask=stored)
            gl.store(out_ptrs + 1, (sums_odd * factor[None, :]).to(out_ptr.dtype.element_ty), mask=stored)
        else:
            gl.store(sums_ptr + part * D + at, sums_even, mask=stored)
            gl.store(sums_ptr + part * D + at + 1, sums_odd, mask=stored)
            gl.store(peaks_ptr + 2 * (part + n), peak, mask=own)
            gl.store(peaks_ptr + 2 * (part + n) + 1, total, mask=own)
    if PDL and not EARLY:
        gdc_launch_dependents()


@gluon.jit(do_not_specialize=["B", "table_width"])
def _hopper_fp8_decode_kernel(
    qkv_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, k_pages, v_pages, tables_ptr,
    lens_ptr, starts_ptr, out_ptr, sums_ptr, peaks_ptr, B, table_width, scale, eps, NQ: gl.constexpr, NKV: gl.constexpr,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr, STRIDE: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The KV heads of 128 channels of every so many-th item. k_pages, v_pages: descriptors of [P · page_size, NKV · D/2]."""
    UNITS: gl.constexpr = (NKV * D + 2 * PAIRS - 1) // (2 * PAIRS)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, PAIRS], gl.int16)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PAIRS], gl.float16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    tiles = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, PAIRS], BLOCK)
    q_tiles = gl.allocate_shared_memory(gl.float16, [2, N, PAIRS], QUERIES)
    p_tiles = gl.allocate_shared_memory(gl.float16, [SPLIT // BLOCK_N, BLOCK_N, N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    ring = (tiles, full, empty)
    gl.warp_specialize(
        [
            (_attend_items, (qkv_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, ring,
             q_tiles, p_tiles, tables_ptr, table_width, starts_ptr, lens_ptr, out_ptr, sums_ptr, peaks_ptr, B, scale, eps, NQ,
             NKV, D, PAGE_SIZE, SPLIT, STRIDE, STAGES, EARLY, PDL)),
            (fetch_items, (k_pages, v_pages, ring, tables_ptr, table_width, starts_ptr, lens_ptr, B, UNITS, PAIRS, PAGE_SIZE,
             SPLIT, STRIDE, STAGES)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def _rows(Nq: int, Nkv: int, D: int) -> int:
    """Queries of an item: those of one KV head, or of two."""
    return min(Nkv, 2 * PAIRS.value // D) * (Nq // Nkv)


def suits(q: Tensor, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor, v_scales: Tensor, sequences: int, split: int) -> bool:
    """Whether q has 16 bits, TMA can move the pages, aligned to 16 bytes, and rows, splits, sequences are few or short enough."""
    aligned = all(t.data_ptr() % 16 == 0 for t in (k_pages, v_pages, k_scales, v_scales))
    few = _rows(q.shape[1], *k_pages.shape[2:]) <= _MOST_ROWS
    return aligned and q.element_size() == 2 and few and split <= LONGEST and sequences <= MOST_SEQUENCES


def decode(
    inputs: tuple[Tensor | None, ...], k_pages: Tensor, v_pages: Tensor, k_scales: Tensor, v_scales: Tensor,
    block_tables: Tensor, seq_lens: Tensor, split_starts: Tensor, out: Tensor, sums: Tensor, peaks: Tensor, max_splits: int,
    scale: float, eps: float, split: int, block_b: int, pdl: bool,
) -> None:  # fmt: skip
    """What `_decode_kernel` does of checked arguments that TMA can move. `scale` is for powers of two; inputs: qkv, cos_sin,
    q_norm, k_norm."""
    (page_size, Nkv, D), Nq = k_pages.shape[1:], out.shape[1]
    pairs = (x.view(torch.int16).view(-1, Nkv * D // 2) for x in (k_pages, v_pages))
    k, v = (described(x, min(page_size, BOX), PAIRS.value) for x in pairs)
    units = cdiv(Nkv * D, 2 * PAIRS.value)
    programs = max(1, min(max_splits * units, PROGRAMS * processors(out.device)))
    _hopper_fp8_decode_kernel[(programs,)](
        *inputs, *as_integers(torch.uint8, k_pages, v_pages), k_scales, v_scales, k, v, block_tables, seq_lens, split_starts, out,
        sums, peaks, seq_lens.shape[0], block_tables.shape[1], scale * math.log2(math.e), eps, NQ=Nq, NKV=Nkv, D=D,
        PAGE_SIZE=page_size, SPLIT=split, STRIDE=max(1, block_b // 32), N=_MOST_ROWS,
        STAGES=STAGES, REGISTERS=REGISTERS, EARLY=seq_lens.shape[0] >= LEAST_TOKENS,
        maxnreg=65536 // (256 * PROGRAMS) // 8 * 8, **launch_options(4, 1, pdl),
    )  # fmt: skip
