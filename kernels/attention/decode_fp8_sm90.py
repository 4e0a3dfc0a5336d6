"""Decode attention of `decode.py` for Hopper on FP8 pages, fused with rotary embedding and KV write.

As in `decode_sm90`, one warp fetches pages by TMA, and four warps compute one item at a time. The M side of the MMA has the
tokens in scores, and the channels in sums. `work_items_sm90` says how work items are found.

K and V are converted to fp16, exactly, on their way from shared memory to the tensor cores, so this MMA operand is in
registers. The instruction is `mma.sync`, not Hopper's `wgmma`: ptxas before CUDA 13.3 may overwrite registers that `wgmma`
still reads (triton#11781). `mma.sync` is slower, but memory bandwidth limits the kernel.

A narrow item has one tile of 128 channels. A wide item has four; it is used with several sequences and few queries per KV head.
The fixed cost of an item is then spent once for four times the bytes, and every byte of a memory sector with scales is used.
Each head has separate columns in the MMA. A tile is multiplied by the queries of all columns, and only the results of its heads
are kept. If a tile has two heads of 64 channels, the queries of each are zero in the channels of the other. MMA columns
are independent, so results do not depend on the width of an item. If the last head has no neighbour in its tile, TMA fills the
other half with zeros.

The code uses loops (docs/decisions/attention-decode.md), which cannot keep scores in registers, so these go through shared
memory. K's scales multiply the scores; V's scales are a term of the exponents, as in
`online_softmax.attend`.

A tile has 64 tokens and 64 pairs of channels, as int16: the 128 bytes of a token are one head of 128 channels or two heads of
64. An item has `TILES` adjacent tiles. A ring is (tiles, full, empty), see `hopper.ring`; each stage holds `SIDE` adjacent tiles.

A slot of the scales holds K's and V's scales of a block of tokens, [tokens, columns] each. A column is a head of the item or,
if the item has more than two heads, a query. A slot is filled and read together with the first stage of the block's K.
"""

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.attention.online_softmax import close, gate_output, hide, hide_before, inverse, log2, score, widen
from minirt.kernels.attention.operands import AttentionFacts, AttentionInput, decode_lookup_size
from minirt.kernels.attention.work_items_sm90 import (
    BLOCK_N,
    constants_of,
    end_of_first,
    find_blocks,
    find_candidates,
    find_firsts,
    find_place,
    lanes,
    load_angles,
    load_norm,
    load_partners,
    load_pieces,
    load_scale,
    turn,
)
from minirt.kernels.compile.tuning import Family
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.hopper.ring import release, ring_barriers, wait_empty, wait_full
from minirt.kernels.hopper.tma import CHANNELS, cp_async, tma_descriptor, tma_load
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, sm_count
from minirt.kernels.prepared import prepared
from minirt.kernels.special_limits import TILE_QUERIES

PAIRS = CHANNELS  # pairs of channels of a tile
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
WIDE = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))  # K and V
NARROW = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))  # queries and probabilities


@gluon.jit
def ask_token(place, first_head, heads, rope, sequences, table_width, row, writes, d, m, C):
    """Load everything that an item needs of its sequence's new token, without waiting.

    This loads, for each row, its head's q, k and v in pieces. It also loads v of the first tiles in the layout of the sums, the
    cosines and sines, the token's page for the rows that write K and V, the partners of q and k, and the scale of q.
    """
    b, token, length, _ = place
    limit = length - 1
    token = gl.maximum(token, 0)
    heads_ptr = heads + token * C.ROW
    # Rows past the last head repeat the last head and are not stored.
    q_ptrs = heads_ptr + (gl.minimum(first_head * C.GROUP + row, C.NQ - 1) * C.D)[:, None]
    k_ptrs = heads_ptr + ((C.NQ + gl.minimum(first_head + row // C.GROUP, C.NKV - 1)) * C.D)[:, None]
    v_ptrs = k_ptrs + C.NKV * C.D
    position = gl.maximum(limit, 0)
    # Rows that write nothing load another page. If all loaded one page, the compiler would use a uniform register and wait.
    place_in_table = gl.maximum(limit // C.PAGE_SIZE - gl.where(writes, 0, 1), 0)
    page = gl.load(sequences.block_tables + b * table_width + place_in_table)
    return (
        load_pieces(q_ptrs, d[None, :], C), load_pieces(k_ptrs, d[None, :], C), load_pieces(v_ptrs, d[None, :], C),
        ask_values(token, first_head * (C.D // 2), heads, m, C), load_angles(rope, position, d, C), page,
        load_partners(q_ptrs, d[None, :], C), load_partners(k_ptrs, d[None, :], C), load_scale(rope, position),
    )  # fmt: skip


@gluon.jit
def ask_values(token, pair, heads, m, C):
    """The new token's V in the layout of the sums, from a pair of channels on: [pairs] int32 for each tile of a stage.

    Past the last head, the last pair is repeated and not stored.
    """
    pairs_ptr = (heads + token * C.ROW + (C.NQ + C.NKV) * C.D).to(gl.pointer_type(gl.int32))
    pairs = ()
    for c in gl.static_range(C.SIDE):
        pairs += (gl.load(pairs_ptr + gl.minimum(pair + c * PAIRS + m, C.NKV * C.D // 2 - 1)),)  # type: ignore[assignment]
    return pairs


@gluon.jit
def _fetch(pages, rows, ring, block, column, step, SIDE: gl.constexpr):
    """Fetch the tiles of one stage: a block's tokens, from a column of the pages on. `rows`: each lane has a box's first row."""
    BOX: gl.constexpr = pages.block_type.shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    tiles, full, empty = ring
    stage = wait_empty(empty, step)
    mbarrier.expect(full.index(stage), SIDE * BLOCK_N * PAIRS * 2)
    for j in gl.static_range(BOXES):
        row = gl.sum(gl.where(lanes() == block * BOXES + j, rows, 0), 0)
        for c in gl.static_range(SIDE):
            tile = tiles.index(stage * SIDE + c).slice(j * BOX, BOX)
            tma_load(pages, [row, column + c * PAIRS], full.index(stage), tile)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)  # each lane arrives when its scales have arrived


@gluon.jit
def _fetch_scales(pages, rows, slots, block, first_head, count, C, BOX: gl.constexpr):
    """Fetch the scales of a block's tokens into the next slot. `rows` as in `_fetch`. `count`: blocks before this one."""
    BOXES: gl.constexpr = BLOCK_N // BOX
    SLOTS: gl.constexpr = slots.shape[0] // 2
    COLUMNS: gl.constexpr = slots.shape[2]
    VECTOR: gl.constexpr = min(COLUMNS, 4)
    COPIES: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // COLUMNS, COLUMNS // VECTOR], [1, 1], [1, 0])
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIES))
    n = gl.arange(0, COLUMNS, gl.SliceLayout(0, COPIES))
    row = gl.zeros_like(m)
    for j in gl.static_range(BOXES):
        row = gl.where(m // BOX == j, gl.sum(gl.where(lanes() == block * BOXES + j, rows, 0), 0) + m % BOX, row)
    head = first_head + n
    if COLUMNS > C.HEADS:
        head = first_head + n // (C.NQ // C.NKV)
    if COLUMNS > C.HEADS or C.NKV % C.HEADS != 0:
        head = gl.minimum(head, C.NKV - 1)  # columns past the last head repeat the last head
    at, slot = (row.to(gl.int64) * C.NKV)[:, None] + head[None, :], count % SLOTS
    cp_async(slots.index(2 * slot), pages.k_scale + at)
    cp_async(slots.index(2 * slot + 1), pages.v_scale + at)


@gluon.jit
def fetch_stages(pages, k_pages, v_pages, ring, slots, sequences, sizes, window, C):
    """Task of the fetching warp: fetch scales, K and V of one item after the other.

    Order: for each block, its scales and all tiles of its K; then, for each stage of the tiles, V of all blocks. Like
    `work_items_sm90.fetch_items`, it does not wait for the kernel before.
    """
    BOX: gl.constexpr = k_pages.block_type.shape[0]
    TURN: gl.constexpr = C.SLOTS * (C.TILES // C.SIDE)  # a slot was last written this many steps ago, or more
    B, table_width = sizes
    programs = gl.num_programs(0)
    items = gl.load(sequences.split_starts + B)
    firsts = find_firsts(sequences, B, C)
    candidates = find_candidates(gl.program_id(0) // C.UNITS, firsts, sequences, B, C)
    step, count = 0, 0
    for unit in range(gl.program_id(0), items * C.UNITS, programs):
        b, _, length, split = find_place(unit // C.UNITS, candidates, sequences, window, C)
        begin, blocks, _ = find_blocks(split, length, window, C.SPLIT)
        column = unit % C.UNITS * (C.TILES * PAIRS)
        # The first row of each box of the split, one per lane. Past a sequence's end, its last rows are fetched again.
        t = gl.maximum(gl.minimum(begin + lanes() * BOX, length - 2), 0) // BOX * BOX
        numbers = gl.load(sequences.block_tables + b * table_width + t // C.PAGE_SIZE)
        rows = numbers * C.PAGE_SIZE + t % C.PAGE_SIZE
        candidates = find_candidates((unit + programs) // C.UNITS, firsts, sequences, B, C)
        for i in range(blocks):
            wait_empty(ring[2], step + C.STAGES - TURN)
            _fetch_scales(pages, rows, slots, i, unit % C.UNITS * C.HEADS, count, C, BOX)
            count += 1
            for c in range(0, C.TILES, C.SIDE):
                _fetch(k_pages, rows, ring, i, column + c * PAIRS, step, C.SIDE)
                step += 1
        for c in range(0, C.TILES, C.SIDE):
            for i in range(blocks):
                _fetch(v_pages, rows, ring, i, column + c * PAIRS, step, C.SIDE)
                step += 1


@gluon.jit
def _of_columns(scales, second):
    """A slot's scales for each column, [tokens, columns]; [tokens, 1] if the item has one head."""
    if scales.shape[1] == 2:
        return gl.where(second[None, :], scales.slice(1, 1, 1).load(PRODUCTS), scales.slice(0, 1, 1).load(PRODUCTS))
    else:
        return scales.load(PRODUCTS)


@gluon.jit
def _load(ring, step, TRANSPOSED: gl.constexpr):
    """Wait for a stage and load its tiles into registers."""
    tiles, full, _ = ring
    SIDE: gl.constexpr = tiles.shape[0] // full.shape[0]
    stage = wait_full(full, step)
    taken = ()
    for c in gl.static_range(SIDE):
        tile = tiles.index(stage * SIDE + c)
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        taken += (tile.load(WIDE),)  # type: ignore[assignment]
    return taken


@gluon.jit
def _release(ring, step):
    """Allow a stage, and the scales that came with it, to be overwritten."""
    # Only a fence orders TMA's writes after these reads. Without it, some writes came first when a program fetched far ahead.
    fence_async_shared()
    release(ring[2], step)


@gluon.jit
def take(ring, step, TRANSPOSED: gl.constexpr):
    """Wait for the ring's next stage, load its tiles into registers, and allow the stage to be overwritten."""
    taken = _load(ring, step, TRANSPOSED)
    _release(ring, step)
    return taken


@gluon.jit
def take_with_scales(ring, slots, step, count, second):
    """`take` for the first tiles of a block's K. Also returns the scales of K and of V, each in the shape of `_of_columns`.

    `second`: which columns belong to the second of two heads. Past a sequence's end, the scales are arbitrary.
    """
    slot = count % (slots.shape[0] // 2)
    taken = _load(ring, step, False)
    k_scale, v_scale = _of_columns(slots.index(2 * slot), second), _of_columns(slots.index(2 * slot + 1), second)
    _release(ring, step)
    return taken, k_scale, v_scale


_BOX = 32  # tokens of one TMA load
_FEW = 6  # up to this many sequences, items are narrow, because wide ones would occupy too few programs


@dataclass(frozen=True)
class DecodeFp8Sm90Config:
    """A launch configuration: the shape of narrow or of wide items. Narrow items wait most, so more programs share an SM.

    Args:
        tiles: tiles of an item.
        side: tiles of a stage.
        stages: stages of the ring.
        slots: slots of scales.
        programs: programs that share an SM.
        registers: registers of a thread of the fetching warp.
    """

    tiles: int
    side: int
    stages: int
    slots: int
    programs: int
    registers: int


_NARROW, _WIDE = DecodeFp8Sm90Config(1, 1, 6, 4, 3, 24), DecodeFp8Sm90Config(4, 2, 5, 2, 2, 64)


@gluon.jit
def _write(left, right, pages_ptr, scales_ptr, slot, d, writes, STORES: gl.constexpr, D: gl.constexpr):
    """Quantize heads, given as halves [N, D/2], and, if STORES, store them where `writes`.

    Returns:
        the quantized halves as fp32, not multiplied by the scales, and the scales [N].
    """
    scale = fp8_scale(gl.max(gl.maximum(finite_magnitude(left), finite_magnitude(right)), 1))
    left, right = to_fp8(left, scale[:, None]), to_fp8(right, scale[:, None])
    if STORES:
        ptrs = pages_ptr + slot[:, None] * D + d[None, :]
        gl.store(ptrs, left, mask=writes[:, None])
        gl.store(ptrs + D // 2, right, mask=writes[:, None])
        gl.store(scales_ptr + slot, scale, mask=writes)
    left, right = left.to(gl.float8e4nv, bitcast=True), right.to(gl.float8e4nv, bitcast=True)
    return left.to(gl.float32), right.to(gl.float32), scale


@gluon.jit
def _store_queries(x, q_tiles, head, START: gl.constexpr, D: gl.constexpr):
    """Store half the channels of fp16 queries, x [N, D/2], in the tiles of even and of odd channels; zeros for other heads."""
    N: gl.constexpr = x.shape[0]
    QUARTER: gl.constexpr = D // 4
    WITHIN: gl.constexpr = PAIRS * 2 // D  # heads of a tile
    for h in gl.static_range(WITHIN):
        queries = gl.where((head % WITHIN == h)[:, None], x, gl.zeros_like(x))
        even, odd = gl.split(gl.reshape(queries, [N, QUARTER, 2]))
        q_tiles.index(0).slice(h * (D // 2) + START, QUARTER, 1).store(even)
        q_tiles.index(1).slice(h * (D // 2) + START, QUARTER, 1).store(odd)


@gluon.jit
def _scores(scores, taken, q_even, q_odd, tile):
    """Scores [tokens, heads]: K · Qᵀ for the heads whose `tile` is in `taken`; unchanged for the other heads."""
    for j in gl.static_range(len(taken)):
        even, odd = widen(taken[j], gl.float16)
        zeros = gl.zeros_like(scores)
        product = mma_v2(even, q_even, zeros) + mma_v2(odd, q_odd, zeros)  # two short dependency chains instead of a long one
        scores = gl.where((tile == j)[None, :], product, scores)
    return scores


@gluon.jit
def _times(pairs, dtype: gl.constexpr, weight, scale):
    """The new token's V, rounded to FP8, times each head's weight [heads] → even channels and odd channels, [pairs, heads] each.

    `pairs` [pairs] int32: two 16-bit channels each.
    """
    even, odd = pairs.to(gl.int16).to(dtype, bitcast=True), (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    blank = gl.zeros([PAIRS, weight.shape[0]], gl.float32, PRODUCTS)
    even = to_fp8(even[:, None] + blank, scale[None, :]).to(gl.float8e4nv, bitcast=True)
    odd = to_fp8(odd[:, None] + blank, scale[None, :]).to(gl.float8e4nv, bitcast=True)
    return even.to(gl.float32) * weight[None, :], odd.to(gl.float32) * weight[None, :]


@gluon.jit
def _attend_items(heads, rope, pages, ring, slots, item_tiles, sequences, results, scores, sizes, C, PDL: gl.constexpr):
    """Compute the attention of one item after the other.

    The tiles do not contain the new token. The program that computes its split adds its score and its value (rounded to FP8)
    without tensor cores, and writes its K, its V and their scales to the pages; with `query_starts`, `rope_write` does.
    """
    q_tiles, s_tiles, inverse_tiles, p_tiles = item_tiles
    B, table_width = sizes
    WITHIN: gl.constexpr = PAIRS * 2 // C.D  # heads of a tile
    HALF: gl.constexpr = C.D // 2
    STORES: gl.constexpr = sequences.query_starts is None  # else `rope_write` does
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HALF, HALF // 4], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))  # tokens of a block, and pairs of channels
    n = gl.arange(0, C.N, gl.SliceLayout(0, PRODUCTS))
    row = gl.arange(0, C.N, gl.SliceLayout(1, ROWS))
    d = gl.arange(0, HALF, gl.SliceLayout(0, ROWS))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, WIDE))
    second = n >= C.GROUP
    writes = (row % C.GROUP == 0) & (row < C.HEADS * C.GROUP)  # rows that write the new token's K and V
    q_norm, k_norm = load_norm(rope.q_norm, d, C), load_norm(rope.k_norm, d, C)
    first, programs = gl.program_id(0), gl.num_programs(0)
    items = gl.load(sequences.split_starts + B)
    firsts = find_firsts(sequences, B, C)
    next_place = find_place(
        first // C.UNITS, find_candidates(first // C.UNITS, firsts, sequences, B, C), sequences, scores.window, C
    )
    candidates = find_candidates((first + programs) // C.UNITS, firsts, sequences, B, C)
    next_head = first % C.UNITS * C.HEADS
    if PDL:
        gdc_wait()  # before the first read of the kernel before's output, and before the first write
    if PDL and C.EARLY:
        gdc_launch_dependents()  # as in `decode_sm90`
    asked = ask_token(next_place, next_head, heads, rope, sequences, table_width, row, writes, d, m, C)
    step, count = 0, 0
    for unit in range(first, items * C.UNITS, programs):
        item, head = unit // C.UNITS, unit % C.UNITS * C.HEADS
        token, length, split = next_place[1], next_place[2], next_place[3]
        raw_q, raw_k, raw_v, v_pairs, angles, page, q_partners, k_partners, q_scale = asked
        begin, blocks, hidden = find_blocks(split, length, scores.window, C.SPLIT)
        limit = length - 1
        newest = limit < split * C.SPLIT + C.SPLIT  # the new token belongs to this split
        q_left, q_right = turn(raw_q, q_partners, q_norm, angles, q_scale, d, rope, C)
        q_left, q_right = q_left.to(gl.float32), q_right.to(gl.float32)
        # A power of two for each row makes the queries fit the range of fp16, see `online_softmax.prepare`.
        largest = gl.max(gl.maximum(gl.abs(q_left), gl.abs(q_right)), 1)
        exponent = gl.minimum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
        shrink = (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, None]
        _store_queries((q_left * shrink).to(gl.float16), q_tiles, row // C.GROUP, 0, C.D)
        _store_queries((q_right * shrink).to(gl.float16), q_tiles, row // C.GROUP, C.D // 4, C.D)
        power = gl.convert_layout(exponent.to(gl.float32, bitcast=True), gl.SliceLayout(0, PRODUCTS)) * scores.scale
        # The new token's score [heads]; −inf if the token belongs to another split.
        new_score = gl.full([C.N], float("-inf"), gl.float32, gl.SliceLayout(0, PRODUCTS))
        new_scale = gl.full([C.N], 1.0, gl.float32, gl.SliceLayout(0, PRODUCTS))
        if newest:
            turned_left, turned_right = turn(raw_k, k_partners, k_norm, angles, (), d, rope, C)
            slot = (page.to(gl.int64) * C.PAGE_SIZE + limit % C.PAGE_SIZE) * C.NKV + head + row // C.GROUP
            exists = writes & (head + row // C.GROUP < C.NKV)
            new_left, new_right, k_scale = _write(turned_left, turned_right, pages.k, pages.k_scale, slot, d, exists, STORES, C.D)
            v_scale = _write(raw_v[0], raw_v[1], pages.v, pages.v_scale, slot, d, exists, STORES, C.D)[2]
            product = gl.sum(q_left * new_left + q_right * new_right, 1) * k_scale
            new_score, factor = score(gl.convert_layout(product, gl.SliceLayout(0, PRODUCTS)), scores.scale, scores)
            new_score *= factor
            new_scale = gl.convert_layout(v_scale, gl.SliceLayout(0, PRODUCTS))
        new_score += log2(new_scale)
        # Load for the next item, while this one is computed.
        next_place = find_place((unit + programs) // C.UNITS, candidates, sequences, scores.window, C)
        next_head = (unit + programs) % C.UNITS * C.HEADS
        asked = ask_token(next_place, next_head, heads, rope, sequences, table_width, row, writes, d, m, C)
        candidates = find_candidates((unit + 2 * programs) // C.UNITS, firsts, sequences, B, C)
        # Scores [tokens, heads] are base-2 exponents and include V's scales; −inf past the last token in the pages.
        highest = gl.full([BLOCK_N, C.N], float("-inf"), gl.float32, PRODUCTS)
        q_even = q_tiles.index(0).permute((1, 0)).load(NARROW)
        q_odd = q_tiles.index(1).permute((1, 0)).load(NARROW)
        for i in range(blocks):
            taken, k_scale, v_scale = take_with_scales(ring, slots, step, count, second)
            step, count = step + 1, count + 1
            s = _scores(gl.zeros([BLOCK_N, C.N], gl.float32, PRODUCTS), taken, q_even, q_odd, n // (C.GROUP * WITHIN))
            for c in range(C.SIDE, C.TILES, C.SIDE):
                taken = take(ring, step, False)
                s = _scores(s, taken, q_even, q_odd, n // (C.GROUP * WITHIN) - c)
                step += 1
            inside = (begin + i * BLOCK_N + m < limit)[:, None]
            if scores.window is not None:
                inside = inside & (i * BLOCK_N + m >= hidden)[:, None]
            v_scale = gl.where(inside, v_scale, 1.0) + gl.zeros_like(s)
            s, factor = score(s * power[None, :], k_scale, scores)
            s = hide(s * factor + log2(v_scale), (begin + i * BLOCK_N + m)[:, None], limit)
            if scores.window is not None:
                s = hide_before(s, (i * BLOCK_N + m)[:, None], hidden)
            highest = gl.maximum(highest, s)
            s_tiles.index(i).store(s)
            inverse_tiles.index(i).store(inverse(v_scale))
        # Probabilities times V's scales, at most 2^15. They go to shared memory, from where the next products read them.
        row_max = gl.maximum(gl.max(highest, 0), new_score) - 15
        weights = gl.zeros([BLOCK_N, C.N], gl.float32, PRODUCTS)
        for i in range(blocks):
            p = gl.exp2(s_tiles.index(i).load(PRODUCTS) - row_max[None, :])
            weights += p * inverse_tiles.index(i).load(PRODUCTS)
            p_tiles.index(i).store(p.to(gl.float16))
        new_weight = gl.exp2(new_score - row_max)
        total = gl.sum(weights, 0) + new_weight * inverse(new_scale)
        exist = (n < C.HEADS * C.GROUP) & (head * C.GROUP + n < C.NQ) & (token >= 0)
        normalize = 1 / close(total, row_max, results, head * C.GROUP + n, exist)
        part = item.to(gl.int64) * C.NQ + head * C.GROUP
        if length > end_of_first(length, scores.window, C.SPLIT):
            gl.store(results.row_stats + 2 * (part + n), row_max, mask=exist)
            gl.store(results.row_stats + 2 * (part + n) + 1, total, mask=exist)
        # Vᵀ · Pᵀ [pairs of channels, heads], one stage of tiles after the other.
        for c in range(0, C.TILES, C.SIDE):
            sums = ()
            for _ in gl.static_range(C.SIDE):
                sums += (gl.zeros([PAIRS, C.N], gl.float32, PRODUCTS), gl.zeros([PAIRS, C.N], gl.float32, PRODUCTS))  # type: ignore[assignment]
            if newest:  # other splits must not use the new token's V, which may be NaN
                started = ()
                for j in gl.static_range(C.SIDE):
                    started += _times(v_pairs[j], heads.dtype.element_ty, new_weight, new_scale)  # type: ignore[assignment]
                sums = started
            if C.TILES > C.SIDE:
                v_pairs = ask_values(gl.maximum(token, 0), head * (C.D // 2) + (c + C.SIDE) * PAIRS, heads, m, C)
            for i in range(blocks):
                taken = take(ring, step, True)
                p = p_tiles.index(i).load(NARROW)
                remaining = limit - begin - i * BLOCK_N
                added = ()
                for j in gl.static_range(C.SIDE):
                    v = taken[j]
                    if remaining < BLOCK_N:  # past the last token, V may be NaN, and zero times NaN is NaN
                        v = gl.where((column < remaining)[None, :], v, gl.zeros_like(v))
                    if scores.window is not None and i * BLOCK_N < hidden:
                        v = gl.where((column >= hidden)[None, :], v, gl.zeros_like(v))
                    even, odd = widen(v, gl.float16)
                    added += (mma_v2(even, p, sums[2 * j]), mma_v2(odd, p, sums[2 * j + 1]))  # type: ignore[assignment]
                sums = added
                step += 1
            for j in gl.static_range(C.SIDE):
                even, odd = sums[2 * j], sums[2 * j + 1]
                channel = (c + j) * (PAIRS * 2) + 2 * m
                stored = exist[None, :] & ((channel // C.D)[:, None] == (n // C.GROUP)[None, :])
                at = n[None, :] * C.D + (channel % C.D)[:, None]
                if length <= end_of_first(length, scores.window, C.SPLIT):
                    out_ptrs = results.out + (token * C.NQ + head * C.GROUP) * C.D + at
                    out_head, out_channel = head * C.GROUP + n[None, :], (channel % C.D)[:, None]
                    x = gate_output(even * normalize[None, :], results, token, out_head, out_channel, stored)
                    gl.store(out_ptrs, x.to(results.out.dtype.element_ty), mask=stored)
                    x = gate_output(odd * normalize[None, :], results, token, out_head, out_channel + 1, stored)
                    gl.store(out_ptrs + 1, x.to(results.out.dtype.element_ty), mask=stored)
                else:
                    gl.store(results.sums + part * C.D + at, even, mask=stored)
                    gl.store(results.sums + part * C.D + at + 1, odd, mask=stored)
    if PDL and not C.EARLY:
        gdc_launch_dependents()


@prepared
@gluon.jit(do_not_specialize=["B", "table_width"])
def _decode_fp8_sm90_kernel(
    heads, rope, pages, k_pages, v_pages, sequences, results, scores, B, table_width, C, PDL: gl.constexpr
):  # fmt: skip
    """Every n-th pair of a KV split and `TILES` tiles of heads, for n programs.

    k_pages, v_pages: descriptors of [P · page_size, NKV · D/2].
    """
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, PAIRS], gl.int16)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, PAIRS], gl.float16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = C.SPLIT // BLOCK_N
    tiles = gl.allocate_shared_memory(gl.int16, [C.STAGES * C.SIDE, BLOCK_N, PAIRS], BLOCK)
    q_tiles = gl.allocate_shared_memory(gl.float16, [2, C.N, PAIRS], QUERIES)
    s_tiles = gl.allocate_shared_memory(gl.float32, [BLOCKS, BLOCK_N, C.N], PLAIN)
    inverse_tiles = gl.allocate_shared_memory(gl.float32, [BLOCKS, BLOCK_N, C.N], PLAIN)
    p_tiles = gl.allocate_shared_memory(gl.float16, [BLOCKS, BLOCK_N, C.N], PLAIN)
    slots = gl.allocate_shared_memory(gl.float32, [2 * C.SLOTS, BLOCK_N, C.HEADS if C.HEADS <= 2 else C.N], LINES)
    full, empty = ring_barriers(C.STAGES, 1, 33)  # TMA arrives, and each lane that copies scales
    fence_async_shared()
    ring, sizes = (tiles, full, empty), (B, table_width)
    item_tiles = (q_tiles, s_tiles, inverse_tiles, p_tiles)
    gl.warp_specialize(
        [
            (_attend_items, (heads, rope, pages, ring, slots, item_tiles, sequences, results, scores, sizes, C, PDL)),
            (fetch_stages, (pages, k_pages, v_pages, ring, slots, sequences, sizes, scores.window, C)),
        ],
        [1],
        [C.REGISTERS],
    )


def variant(num_seqs: int) -> int:
    """The largest number of sequences that launches the same compiled kernel."""
    return _FEW if 1 < num_seqs <= _FEW else decode_lookup_size(num_seqs)


def rule(facts: AttentionFacts, gpu: Gpu) -> DecodeFp8Sm90Config:
    within = 2 * PAIRS.value // facts.D  # heads of a tile
    wide = _WIDE.tiles * within * (facts.Nq // facts.Nkv) <= TILE_QUERIES and facts.Nkv > 2 * within  # more than in two tiles
    return _WIDE if wide and facts.T > _FEW else _NARROW


FAMILY = Family("decode_fp8_sm90", DecodeFp8Sm90Config, (__file__,), ("T", "Nq", "Nkv", "D"), rule, tokens=variant)


def launch(a: AttentionInput) -> None:
    """Same as `decode.launch`."""
    shape, pages, B, device = a.head_shape, a.pages, a.num_seqs, a.out.device
    _, Nkv, D = shape
    pairs = (x.view(torch.int16).view(-1, Nkv * D // 2) for x in pages[:2])
    k, v = (tma_descriptor(x, min(pages.page_size, _BOX), PAIRS.value) for x in pairs)
    c = FAMILY.lookup(device, a.facts(variant(B)))
    units = cdiv(Nkv * D, 2 * PAIRS.value * c.tiles)
    programs = max(1, min(a.max_splits * units, c.programs * sm_count(device)))
    of_fp8 = units, c.tiles, 2 * PAIRS.value * c.tiles // D, c.side, c.slots, c.registers
    constants = constants_of(a, shape, B, TILE_QUERIES, c.stages, of_fp8)
    _decode_fp8_sm90_kernel[(programs,)](
        a.heads, a.rope, pages.for_kernel(torch.uint8), k, v, a.sequences, a.results(a.max_splits), a.scores.in_base_2(), B,
        a.table_width, C=constants, maxnreg=most_registers(256 * c.programs), **launch_options(4, 1, a.pdl),
    )  # fmt: skip
