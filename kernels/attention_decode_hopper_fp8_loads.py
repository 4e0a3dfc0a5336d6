"""How `attention_decode_hopper_fp8` gets what it computes with: what an item's warps ask for themselves, an item or a block
ahead, and the tiles of K and V that a warp of its own fetches by TMA for them to take.

A tile is 64 tokens and 64 pairs of channels, as int16: 128 bytes of a token are one head of 128 channels or two of 64. An item
has `TILES` side by side. A ring is (tiles, full, empty), a barrier each for "has arrived" and "may be overwritten" of every
stage; a stage is as many tiles side by side as there are for each of `STAGES`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from minirt.kernels.attention_decode_items import BLOCK_N, count_blocks, find_candidates, find_firsts, find_place, lanes
from minirt.kernels.hopper import CHANNELS, fetch

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
def ask_page(place, block, tables_ptr, table_width, m, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr):
    """The pages of the tokens of a split's block [tokens]: 0 where no token of the split is."""
    b, length, split = place
    t = split * SPLIT + block * BLOCK_N + m
    inside = t < gl.minimum(length - 1, (split + 1) * SPLIT)
    return gl.load(tables_ptr + b * table_width + t // PAGE_SIZE, mask=inside, other=0)


@gluon.jit
def _ask_heads(scales_ptr, slot, first_head, inside, n, NKV: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr):
    """The scales of one or two heads in slots of the pages, [tokens] each, or of more heads in their columns [tokens, columns]; 1
    where none is inside."""
    at = slot * NKV + first_head
    if HEADS > 2:
        head = n // GROUP
        if NKV % HEADS != 0:
            head = gl.minimum(head, NKV - 1 - first_head)  # columns without a head of their own repeat a last one
        return (gl.load(scales_ptr + at[:, None] + head[None, :], mask=inside[:, None], other=1.0),)
    elif HEADS == 1:
        return (gl.load(scales_ptr + at, mask=inside, other=1.0),)
    elif NKV % 2 == 0:  # both at once
        both = gl.load(scales_ptr.to(gl.pointer_type(gl.int64)) + at // 2, mask=inside, other=0x3F8000003F800000)
        return both.to(gl.int32).to(gl.float32, bitcast=True), (both >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    else:
        last = slot * NKV + gl.minimum(first_head + 1, NKV - 1)
        return gl.load(scales_ptr + at, mask=inside, other=1.0), gl.load(scales_ptr + last, mask=inside, other=1.0)


@gluon.jit
def ask_scales(
    place, block, page, first_head, scale_ptrs, m, n,
    NKV: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """K's and V's scales of a block's tokens, whose pages are known, for the item's heads."""
    k_scales_ptr, v_scales_ptr = scale_ptrs
    _, length, split = place
    t = split * SPLIT + block * BLOCK_N + m
    slot, inside = page.to(gl.int64) * PAGE_SIZE + t % PAGE_SIZE, t < gl.minimum(length - 1, (split + 1) * SPLIT)
    k_scales = _ask_heads(k_scales_ptr, slot, first_head, inside, n, NKV, GROUP, HEADS)
    return k_scales, _ask_heads(v_scales_ptr, slot, first_head, inside, n, NKV, GROUP, HEADS)


@gluon.jit
def of_columns(scales, second):
    """Of a block's scales each column's, [tokens, columns] or [tokens, 1]: of two heads, the first's or the `second`'s."""
    if len(scales) == 2:
        return gl.where(second[None, :], scales[1][:, None], scales[0][:, None])
    elif len(scales[0].shape) == 2:
        return scales[0]
    else:
        return scales[0][:, None]


@gluon.jit
def _fetch(pages, rows, ring, block, column, step, STAGES: gl.constexpr):
    """The tiles of one stage: a block's tokens, whose rows the lanes have, from a column of the pages on."""
    BOX: gl.constexpr = pages.block_type.shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    tiles, full, empty = ring
    SIDE: gl.constexpr = tiles.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), SIDE * BLOCK_N * PAIRS * 2)
    for j in gl.static_range(BOXES):
        row = gl.sum(gl.where(lanes() == block * BOXES + j, rows, 0), 0)
        for c in gl.static_range(SIDE):
            tile = tiles.index(stage * SIDE + c).slice(j * BOX, BOX)
            fetch(pages, [row, column + c * PAIRS], full.index(stage), tile)


@gluon.jit
def fetch_stages(
    k_pages, v_pages, ring, tables_ptr, table_width, starts_ptr, lens_ptr, B,
    UNITS: gl.constexpr, TILES: gl.constexpr, PAGE_SIZE: gl.constexpr, SPLIT: gl.constexpr, STRIDE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Of one item after the other all tiles of K's first block, then of its second one, and so on; then of V the first stage of
    all blocks, then its next one of all blocks. Without a wait for the kernel before, as `attention_decode_items.fetch_items`."""
    BOX: gl.constexpr = k_pages.block_type.shape[0]
    SIDE: gl.constexpr = ring[0].shape[0] // STAGES
    programs = gl.num_programs(0)
    items = gl.load(starts_ptr + B)
    firsts = find_firsts(starts_ptr, B, STRIDE)
    candidates = find_candidates(gl.program_id(0) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
    step = 0
    for unit in range(gl.program_id(0), items * UNITS, programs):
        b, length, split = find_place(unit // UNITS, candidates)
        blocks = count_blocks(split, length, SPLIT)
        column = unit % UNITS * (TILES * PAIRS)
        # Where each box of the split begins, a lane each. Behind a sequence's end its last rows come again.
        t = gl.maximum(gl.minimum(split * SPLIT + lanes() * BOX, length - 2), 0) // BOX * BOX
        rows = gl.load(tables_ptr + b * table_width + t // PAGE_SIZE) * PAGE_SIZE + t % PAGE_SIZE
        candidates = find_candidates((unit + programs) // UNITS, firsts, starts_ptr, lens_ptr, B, STRIDE)
        for i in range(blocks):
            for c in range(0, TILES, SIDE):
                _fetch(k_pages, rows, ring, i, column + c * PAIRS, step, STAGES)
                step += 1
        for c in range(0, TILES, SIDE):
            for i in range(blocks):
                _fetch(v_pages, rows, ring, i, column + c * PAIRS, step, STAGES)
                step += 1


@gluon.jit
def take(ring, step, TRANSPOSED: gl.constexpr, STAGES: gl.constexpr):
    """The tiles of the ring's next stage in registers, once they have arrived; then they may be overwritten."""
    tiles, full, empty = ring
    SIDE: gl.constexpr = tiles.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    taken = ()
    for c in gl.static_range(SIDE):
        tile = tiles.index(stage * SIDE + c)
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        taken += (tile.load(WIDE),)  # type: ignore[assignment]
    # TMA's writes are ordered behind such reads by a fence alone: without it some came first where programs fetched far ahead.
    fence_async_shared()
    mbarrier.arrive(empty.index(stage))
    return taken
