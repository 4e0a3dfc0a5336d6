"""How `attention_decode_hopper_fp8` gets what it computes with: what an item's warps ask for themselves, an item ahead, and what
a warp of its own fetches for them to take: tiles of K and V by TMA, and scales.

A tile is 64 tokens and 64 pairs of channels, as int16: 128 bytes of a token are one head of 128 channels or two of 64. An item
has `TILES` side by side. A ring is (tiles, full, empty), a barrier each for "has arrived" and "may be overwritten" of every
stage; a stage is as many tiles side by side as there are for each of `STAGES`.

Slots are K's and V's scales of a block of tokens, [tokens, columns] each, where a column is a head of the item or, of more than
two heads, a query. They arrive and are taken with the first stage of the block's K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from minirt.kernels.attention_decode_items import BLOCK_N, count_blocks, find_candidates, find_firsts, find_place, lanes
from minirt.kernels.hopper import CHANNELS, copy, fetch

PAIRS = CHANNELS  # of channels: what a tile has
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
WIDE = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))  # K and V
NARROW = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))  # queries and probabilities


@gluon.jit
def ask_token(
    place, first_head, batch, row, writes, d, m,
    NQ: gl.constexpr, NKV: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """All that an item needs of its sequence's new token, asked for side by side: both halves of the channels of q, k and v, for
    each row its head's, v of the first tiles once more in the order of sums, cosines and sines, and, for the rows that write its
    K and V, the token's page."""
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
    angles_ptr = cos_sin_ptr + gl.maximum(limit, 0).to(gl.int64) * D + d
    # Rows that write nothing load another page: one page for all would go to a uniform register, and be waited for at once.
    place_in_table = gl.maximum(limit // PAGE_SIZE - gl.where(writes, 0, 1), 0)
    page = gl.load(tables_ptr + b * table_width + place_in_table)
    return (
        gl.load(q_ptrs), gl.load(q_ptrs + HALF), gl.load(k_ptrs), gl.load(k_ptrs + HALF), gl.load(v_ptrs),
        gl.load(v_ptrs + HALF), ask_values(b, first_head * (D // 2), qkv_ptr, m, NQ, NKV, D, SIDE), gl.load(angles_ptr),
        gl.load(angles_ptr + HALF), page,
    )  # fmt: skip


@gluon.jit
def ask_values(b, pair, qkv_ptr, m, NQ: gl.constexpr, NKV: gl.constexpr, D: gl.constexpr, SIDE: gl.constexpr):
    """The new token's V in the order of sums, from a pair of channels on: for each tile of a stage [pairs], as int32. Behind the
    last head its last pair comes again, which is not stored."""
    pairs_ptr = (qkv_ptr + b * ((NQ + 2 * NKV) * D) + (NQ + NKV) * D).to(gl.pointer_type(gl.int32))
    pairs = ()
    for c in gl.static_range(SIDE):
        pairs += (gl.load(pairs_ptr + gl.minimum(pair + c * PAIRS + m, NKV * D // 2 - 1)),)  # type: ignore[assignment]
    return pairs


@gluon.jit
def _may_be_written(ring, step, STAGES: gl.constexpr):
    """Waits until all that was fetched `STAGES` steps before this one has been taken."""
    mbarrier.wait(ring[2].index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def _fetch(pages, rows, ring, block, column, step, STAGES: gl.constexpr):
    """The tiles of one stage: a block's tokens, whose rows the lanes have, from a column of the pages on."""
    BOX: gl.constexpr = pages.block_type.shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    tiles, full, _ = ring
    SIDE: gl.constexpr = tiles.shape[0] // STAGES
    stage = step % STAGES
    _may_be_written(ring, step, STAGES)
    mbarrier.expect(full.index(stage), SIDE * BLOCK_N * PAIRS * 2)
    for j in gl.static_range(BOXES):
        row = gl.sum(gl.where(lanes() == block * BOXES + j, rows, 0), 0)
        for c in gl.static_range(SIDE):
            tile = tiles.index(stage * SIDE + c).slice(j * BOX, BOX)
            fetch(pages, [row, column + c * PAIRS], full.index(stage), tile)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)  # every lane's, once its scales are there


@gluon.jit
def _fetch_scales(
    scale_ptrs, rows, slots, block, first_head, count,
    NKV: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """The scales of a block's tokens, whose rows the lanes have, to the next slot after `count` blocks."""
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
    if COLUMNS > HEADS:
        head = first_head + n // GROUP
    if COLUMNS > HEADS or NKV % HEADS != 0:
        head = gl.minimum(head, NKV - 1)  # columns without a head of their own repeat a last one
    k_scales_ptr, v_scales_ptr = scale_ptrs
    at, slot = (row.to(gl.int64) * NKV)[:, None] + head[None, :], count % SLOTS
    copy(slots.index(2 * slot), k_scales_ptr + at)
    copy(slots.index(2 * slot + 1), v_scales_ptr + at)


@gluon.jit
def fetch_stages(
    k_pages, v_pages, k_scales_ptr, v_scales_ptr, ring, slots, tables_ptr, table_width, starts_ptr, lens_ptr, B,
    NKV: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, UNITS: gl.constexpr, TILES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr, STRIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of one item after the other the scales of the first block and all tiles of its K, then those of its second one, and so on;
    then of V the first stage of all blocks, then its next one of all blocks. Without a wait for the kernel before, as
    `attention_decode_items.fetch_items`."""
    BOX: gl.constexpr = k_pages.block_type.shape[0]
    SIDE: gl.constexpr = ring[0].shape[0] // STAGES
    programs = gl.num_programs(0)
    items = gl.load(starts_ptr + B)
    firsts = find_firsts(starts_ptr, B, STRIDE)
    candidates = find_candidates(gl.program_id(0) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
    TURN: gl.constexpr = slots.shape[0] // 2 * (TILES // SIDE)  # so many steps ago, or more, a slot was last written
    step, count = 0, 0
    for unit in range(gl.program_id(0), items * UNITS, programs):
        b, length, split = find_place(unit // UNITS, candidates)
        blocks = count_blocks(split, length, SPLIT)
        column = unit % UNITS * (TILES * PAIRS)
        # Where each box of the split begins, a lane each. Behind a sequence's end its last rows come again.
        t = gl.maximum(gl.minimum(split * SPLIT + lanes() * BOX, length - 2), 0) // BOX * BOX
        rows = gl.load(tables_ptr + b * table_width + t // PAGE_SIZE) * PAGE_SIZE + t % PAGE_SIZE
        candidates = find_candidates((unit + programs) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
        for i in range(blocks):
            _may_be_written(ring, step + STAGES - TURN, STAGES)
            _fetch_scales((k_scales_ptr, v_scales_ptr), rows, slots, i, unit % UNITS * HEADS, count, NKV, GROUP, HEADS, BOX)
            count += 1
            for c in range(0, TILES, SIDE):
                _fetch(k_pages, rows, ring, i, column + c * PAIRS, step, STAGES)
                step += 1
        for c in range(0, TILES, SIDE):
            for i in range(blocks):
                _fetch(v_pages, rows, ring, i, column + c * PAIRS, step, STAGES)
                step += 1


@gluon.jit
def _of_columns(scales, second):
    """A slot's scales for each column [tokens, columns], or [tokens, 1] of one head."""
    if scales.shape[1] == 2:
        return gl.where(second[None, :], scales.slice(1, 1, 1).load(PRODUCTS), scales.slice(0, 1, 1).load(PRODUCTS))
    else:
        return scales.load(PRODUCTS)


@gluon.jit
def _load(ring, step, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr):
    """The tiles of a stage in registers, once all of it has arrived."""
    tiles, full, _ = ring
    SIDE: gl.constexpr = tiles.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    taken = ()
    for c in gl.static_range(SIDE):
        tile = tiles.index(stage * SIDE + c)
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        taken += (tile.load(WIDE),)  # type: ignore[assignment]
    return taken


@gluon.jit
def _release(ring, step, STAGES: gl.constexpr):
    """Lets a stage, and the scales that came with it, be overwritten."""
    # TMA's writes are ordered behind such reads by a fence alone: without it some came first where programs fetched far ahead.
    fence_async_shared()
    mbarrier.arrive(ring[2].index(step % STAGES))


@gluon.jit
def take(ring, step, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr):
    """The tiles of the ring's next stage in registers, once they have arrived; then they may be overwritten."""
    taken = _load(ring, step, TRANSPOSED, STAGES)
    _release(ring, step, STAGES)
    return taken


@gluon.jit
def take_with_scales(ring, slots, step, count, second, STAGES: gl.constexpr):
    """The first tiles of a block's K, and for each column the scales of its head's K and V, [tokens, columns], or [tokens, 1] of
    one head. Behind a sequence's end these are whatever the pages hold. `second`: columns of the second head, of two."""
    slot = count % (slots.shape[0] // 2)
    taken = _load(ring, step, False, STAGES)
    k_scale, v_scale = _of_columns(slots.index(2 * slot), second), _of_columns(slots.index(2 * slot + 1), second)
    _release(ring, step, STAGES)
    return taken, k_scale, v_scale
