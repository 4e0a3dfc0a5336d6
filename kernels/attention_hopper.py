"""Prefill attention of `attention.py` for Hopper (compute capability 9.0): programs whose warps have different roles.

One warp fetches K and V by TMA; teams of four warps take 64 rows of a tile each. A team adds up the values of one block while it
computes the softmax of the next, and the teams multiply in turn, so that one's softmax hides behind the other's products
(FlashAttention-3, Shah et al. 2024). Pages of 16 bits only.
"""

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minirt.kernels.common import processors

# Renamed after Triton 3.6.
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

LEAST_TOKENS = 1024  # fewer do not fill the GPU with tiles of this size
ROWS = gl.constexpr(64)  # of a team
CHANNELS = gl.constexpr(64)  # 128 bytes, what one swizzle of TMA spans


@dataclass(frozen=True)
class HopperAttentionConfig:
    """Teams of four warps, tokens in a block of K and V, blocks on their way of each, whether a team computes the softmax beside
    its own products, whether the teams multiply in turn, and whether a program goes on to further tiles."""

    teams: int = 2
    block_n: int = 128
    num_stages: int = 2
    overlap: bool = True
    in_turn: bool = True
    persistent: bool = True


@gluon.jit
def _tile(
    turn, tiles, starts_ptr, lens_ptr, B, SHORTEST: gl.constexpr, QUERIES: gl.constexpr, NKV: gl.constexpr,
    BLOCK_B: gl.constexpr,
):  # fmt: skip
    """A program's tile: its sequence, KV head, tokens there are and tokens seen (0: no work), first row of q, queries, and tokens
    before them.

    Programs take tiles there and back, so that each gets as much of the long ones, which come first; see `attention._find`.
    """
    programs = gl.num_programs(0)
    index = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    block = (tiles - 1 - index) // NKV
    n = gl.arange(0, BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    starts = gl.load(starts_ptr + n, mask=n < B, other=2**30)
    b = gl.maximum(gl.sum((starts // QUERIES + n <= block).to(gl.int32), 0) - 1, 0)
    start = gl.load(starts_ptr + b)
    length = gl.load(starts_ptr + b + 1) - start
    limit = gl.load(lens_ptr + b)
    first = (block - start // QUERIES - b) * QUERIES
    queries = gl.minimum(length - first, QUERIES)
    before = limit - length + first
    works = (index < tiles) & (queries > 0) & (length >= SHORTEST)
    return b, index % NKV, limit, gl.where(works, before + queries, 0), start + first, queries, before


@gluon.jit
def _fetch_block(pages, rows, column, tile, full, empty, use):
    """Fetch parts of a tile from those rows of the pages on, once the tile's last use is over."""
    BLOCK_N: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    BOX: gl.constexpr = pages.block_type.shape[0]
    mbarrier.wait(empty, (use & 1) ^ 1)
    mbarrier.expect(full, BLOCK_N * D * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        for c in gl.static_range(0, D, CHANNELS):
            _fetch(pages, [rows[i], column + c], full, tile.slice(i * BOX, BOX).slice(c, CHANNELS, 1))


@gluon.jit
def _fetch_blocks(
    k, v, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables_ptr, starts_ptr, lens_ptr, B, table_width, tiles,
    SHORTEST: gl.constexpr, QUERIES: gl.constexpr, NKV: gl.constexpr, BLOCK_B: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """K and V of all tiles, a block after the other. Behind a sequence's end, its last page comes again."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    BOX: gl.constexpr = k.block_type.shape[0]
    step = 0
    for turn in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        b, kv_head, limit, seen, _, _, _ = _tile(turn, tiles, starts_ptr, lens_ptr, B, SHORTEST, QUERIES, NKV, BLOCK_B)
        table_ptr = tables_ptr + b.to(gl.int64) * table_width
        column = kv_head * k_tiles.shape[2]
        for first in range(0, seen, BLOCK_N):
            rows = ()  # of the pages, known before there is room
            for i in gl.static_range(0, BLOCK_N, BOX):
                t = gl.minimum(first + i, limit - 1) // BOX * BOX
                rows += (gl.load(table_ptr + t // PAGE_SIZE) * PAGE_SIZE + t % PAGE_SIZE,)
            stage = step % STAGES
            _fetch_block(k, rows, column, k_tiles.index(stage), k_full.index(stage), k_empty.index(stage), step // STAGES)
            _fetch_block(v, rows, column, v_tiles.index(stage), v_full.index(stage), v_empty.index(stage), step // STAGES)
            step += 1


@gluon.jit
def _hide(s, first, row_limit):
    """Scores of the tokens from `first` on, without those that a row does not see."""
    t = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(t[None, :] < row_limit[:, None], s, float("-inf"))


@gluon.jit
def _narrow(x, dtype: gl.constexpr):
    """fp32 to 16 bits, pairwise: else the assembler swaps every pair once more."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _next_block(
    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, p, peak, total, acc, step, round, first, row_limit, scale,
    TEAM: gl.constexpr, TEAMS: gl.constexpr, MASKED: gl.constexpr, OVERLAP: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """Add the products of the probabilities p and the block of V before; compute the probabilities of this block."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage = step % STAGES
    before = (step - 1) % STAGES
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    if OVERLAP:
        mbarrier.wait(k_full.index(stage), step // STAGES & 1)
        if IN_TURN:
            mbarrier.wait(turns.index(TEAM), round & 1)
        s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        if IN_TURN:
            mbarrier.arrive(turns.index((TEAM + 1) % TEAMS))
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
    else:
        if IN_TURN:
            mbarrier.wait(turns.index(TEAM), round & 1)
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(before))
        mbarrier.wait(k_full.index(stage), step // STAGES & 1)
        s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        if IN_TURN:
            mbarrier.arrive(turns.index((TEAM + 1) % TEAMS))
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
    if MASKED:
        s = _hide(s, first, row_limit)
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale)
    s = gl.exp2(s * scale - new_peak[:, None])
    rescale = gl.exp2(peak - new_peak)
    total = total * rescale + gl.sum(s, 1)
    if OVERLAP:
        # Passed already. Within a basic block, the assembler would move the next wait, and so all of the softmax behind it.
        mbarrier.wait(v_full.index(before), (step - 1) // STAGES & 1)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_empty.index(before))
    acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(_narrow(s, p.dtype), p.type.layout), new_peak, total, acc


@gluon.jit
def _clear_behind(tile, limit):
    """Zeros in the rows of V from `limit` on: a page may hold NaN there, which a probability of zero would not stop."""
    ROWS_OF_TILE: gl.constexpr = tile.shape[0]
    STEP: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0])
    row = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(0, ROWS_OF_TILE, STEP):
        if i + STEP > limit:
            part = tile.slice(i, STEP)
            x = part.load(LAYOUT)
            part.store(gl.where(i + row < limit, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _attend_tiles(
    q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr, lens_ptr, B, tiles,
    scale, SHORTEST: gl.constexpr, QUERIES: gl.constexpr, NKV: gl.constexpr, BLOCK_B: gl.constexpr, GROUP: gl.constexpr,
    OVERLAP: gl.constexpr, IN_TURN: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """A team's rows of all tiles: row r of a tile is head r % GROUP of query r // GROUP."""
    TEAMS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    dtype: gl.constexpr = q_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_tile = q_tiles.index(TEAM)
    step = 0
    done = 0
    if IN_TURN and TEAM == TEAMS - 1:
        mbarrier.arrive(turns.index(0))
    for turn in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        _, kv_head, limit, seen, start, queries, before = _tile(
            turn, tiles, starts_ptr, lens_ptr, B, SHORTEST, QUERIES, NKV, BLOCK_B
        )
        if seen > 0:
            # Rows past the end repeat the last query instead of being masked; they are not stored.
            row = TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MOVED))
            at = (gl.minimum(row // GROUP, queries - 1) * (NKV * GROUP) + row % GROUP) * D
            at = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, MOVED))[None, :]
            base = (start.to(gl.int64) * NKV + kv_head) * (GROUP * D)
            q_tile.store(gl.load(q_ptr + base + at))
            fence_async_shared()
            row = TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            row_limit = before + 1 + gl.minimum(row // GROUP, queries - 1)
            acc = gl.zeros([ROWS, D], gl.float32, SUMS)
            # The first block has a token that every row sees.
            done += 1
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            s = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
            s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            s = _hide(s, 0, row_limit)
            peak = gl.max(s, 1) * scale
            s = gl.exp2(s * scale - peak[:, None])
            total = gl.sum(s, 1)
            p = gl.convert_layout(_narrow(s, dtype), FACTOR)
            seen_by_all = gl.maximum((before + 1) // BLOCK_N * BLOCK_N, BLOCK_N)
            for first in range(BLOCK_N, seen_by_all, BLOCK_N):
                step += 1
                p, peak, total, acc = _next_block(
                    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, p, peak, total, acc, step, step - done,
                    first, row_limit, scale, TEAM, TEAMS, False, OVERLAP, IN_TURN,
                )  # fmt: skip
            for first in range(seen_by_all, seen, BLOCK_N):
                step += 1
                p, peak, total, acc = _next_block(
                    q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, p, peak, total, acc, step, step - done,
                    first, row_limit, scale, TEAM, TEAMS, True, OVERLAP, IN_TURN,
                )  # fmt: skip
            stage = step % STAGES
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            last = (seen - 1) // BLOCK_N * BLOCK_N
            if last + BLOCK_N > limit:
                _clear_behind(v_tiles.index(stage), limit - last)
            acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_empty.index(stage))
            step += 1
            acc /= gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
            q_tile.store(acc.to(dtype))
            row = TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MOVED))
            stored = (row < QUERIES * GROUP) & (row // GROUP < queries)
            gl.store(out_ptr + base + at, q_tile.load(MOVED), mask=stored[:, None])


@gluon.jit(do_not_specialize=["B", "table_width", "tiles"])
def _hopper_prefill_kernel(
    q_ptr, k, v, tables_ptr, starts_ptr, lens_ptr, out_ptr, B, table_width, tiles, scale, NQ: gl.constexpr,
    NKV: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, TEAMS: gl.constexpr, SHORTEST: gl.constexpr, OVERLAP: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    """Tiles of TEAMS · 64 rows: some queries of one sequence, with the heads of one KV head. k, v: descriptors of the pages as
    [P · page_size, NKV · D]."""
    GROUP: gl.constexpr = NQ // NKV
    QUERIES: gl.constexpr = TEAMS * ROWS // GROUP
    dtype: gl.constexpr = k.dtype
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [TEAMS, ROWS, D], Q)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], KV)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], KV)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [TEAMS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=TEAMS)
        mbarrier.init(v_empty.index(i), count=TEAMS)
    for i in gl.static_range(TEAMS):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    if TEAMS == 2:
        gl.warp_specialize(
            [
                (_attend_tiles, (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr,
                 lens_ptr, B, tiles, scale, SHORTEST, QUERIES, NKV, BLOCK_B, GROUP, OVERLAP, IN_TURN, 0)),
                (_attend_tiles, (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr,
                 lens_ptr, B, tiles, scale, SHORTEST, QUERIES, NKV, BLOCK_B, GROUP, OVERLAP, IN_TURN, 1)),
                (_fetch_blocks, (k, v, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables_ptr, starts_ptr, lens_ptr, B,
                 table_width, tiles, SHORTEST, QUERIES, NKV, BLOCK_B, PAGE_SIZE)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_tiles, (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr,
                 lens_ptr, B, tiles, scale, SHORTEST, QUERIES, NKV, BLOCK_B, GROUP, OVERLAP, IN_TURN, 0)),
                (_attend_tiles, (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr,
                 lens_ptr, B, tiles, scale, SHORTEST, QUERIES, NKV, BLOCK_B, GROUP, OVERLAP, IN_TURN, 1)),
                (_attend_tiles, (q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns, starts_ptr,
                 lens_ptr, B, tiles, scale, SHORTEST, QUERIES, NKV, BLOCK_B, GROUP, OVERLAP, IN_TURN, 2)),
                (_fetch_blocks, (k, v, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, tables_ptr, starts_ptr, lens_ptr, B,
                 table_width, tiles, SHORTEST, QUERIES, NKV, BLOCK_B, PAGE_SIZE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def suits(q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> bool:
    """Whether TMA can move the pages: of 16 bits, aligned to 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 for t in (q, k_pages, v_pages, out))
    return aligned and q.element_size() == 2 and k_pages.dtype == q.dtype


def choose_config(T: int, D: int) -> HopperAttentionConfig | None:
    """The configuration for T tokens of head size D, or None where `attention.py`'s kernel is faster."""
    return HopperAttentionConfig() if T >= LEAST_TOKENS else None


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float,
    out: Tensor, shortest: int, config: HopperAttentionConfig,
) -> None:  # fmt: skip
    """`paged_attention_prefill` of arguments that `suits` and that were checked; `scale` is for powers of two."""
    (T, Nq, D), (page_size, Nkv), B = q.shape, k_pages.shape[1:3], seq_lens.shape[0]
    tiles = (T // (config.teams * ROWS.value // (Nq // Nkv)) + B) * Nkv
    box = [min(page_size, config.block_n), CHANNELS.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)  # only the width counts
    k, v = (TensorDescriptor.from_tensor(x.view(-1, Nkv * D), box, layout) for x in (k_pages, v_pages))
    programs = min(tiles, processors(q.device)) if config.persistent else tiles
    _hopper_prefill_kernel[(programs,)](
        q, k, v, block_tables, query_starts, seq_lens, out, B, block_tables.shape[1], tiles, scale, NQ=Nq, NKV=Nkv, D=D,
        PAGE_SIZE=page_size, BLOCK_B=max(256, triton.next_power_of_2(B)), BLOCK_N=config.block_n, STAGES=config.num_stages,
        TEAMS=config.teams, SHORTEST=shortest, OVERLAP=config.overlap, IN_TURN=config.in_turn, num_warps=4,
    )  # fmt: skip
