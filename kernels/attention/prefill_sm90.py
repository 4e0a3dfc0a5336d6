"""Prefill attention of `prefill.py` for Hopper (compute capability 9.0): warp-specialized.

One warp fetches K and V by TMA. Two teams of four warps compute 64 rows of a tile each. A team multiplies the probabilities of
one block by its values while it computes the softmax of the next block. The teams multiply in turn, so that the softmax of one
overlaps with the products of the other (FlashAttention-3, Shah et al. 2024). The pages must have 16 bits.

docs/decisions/attention-prefill.md has the times of the sizes below; heads of 256 channels were not measured. Their blocks have
half as many tokens. `k` and `v` are rings (tiles, full, empty), see `hopper.ring`, and `sizes` is (B, table_width, tiles).

Sums of more than 256 channels do not fit in registers. Then a tile has one piece of V's channels, and as many tiles as there are
pieces compute the same scores: 64 rows of a team with all channels would read K and V more often. K is in pieces, too. Shared
memory has one block of K and one of V, so the teams compute side by side instead of in turn: each stage is free sooner.

In an invariant step, a block has one or two of the steps that all kernels take then, and the sums of the KV splits before a
split are in shared memory. `sums` and `ended` are theirs, see `_end_split`; else None and ().
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.online_softmax import add_split, base_of, block_n, close, hide, hide_before, rounded, score
from minirt.kernels.attention.operands import AttentionInput, prefill_lookup_size
from minirt.kernels.attention.partial import is_left
from minirt.kernels.hopper.ring import barriers, release, ring_barriers, wait_empty, wait_full
from minirt.kernels.hopper.tiles import halves, zero_rows_before, zero_rows_from
from minirt.kernels.hopper.tma import CHANNELS, tma_descriptor, tma_load
from minirt.kernels.launch import sm_count
from minirt.kernels.prepared import prepared

TEAMS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # rows of a team: those of a product of four warps
STAGES = gl.constexpr(2)  # blocks of K, and of V, in their rings; of heads in pieces: pieces of a block of K
PIECE = gl.constexpr(256)  # most channels of a tile's sums
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of fp32
TOTALS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # of invariant totals: 8 equal columns


@gluon.constexpr_function
def pieces(D):
    """Pieces of a head's channels."""
    return (D + PIECE.value - 1) // PIECE.value


@gluon.jit
def _tile(turn, sequences, sizes, window, C):
    """A program's tile: sequence, KV head, cached tokens, tokens that some row sees (0: no work), first row of q, queries, tokens
    before the first query, and piece of V.

    Long tiles come first (see `prefill._find`). Programs take tiles in alternating direction, so that each gets a similar share
    of long ones.
    """
    QUERIES: gl.constexpr = TEAMS * ROWS // C.GROUP
    PIECES: gl.constexpr = pieces(C.D)
    B, _, tiles = sizes
    programs = gl.num_programs(0)
    index = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    block = (tiles - 1 - index) // (C.NKV * PIECES)
    n = gl.arange(0, C.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    starts = gl.load(sequences.query_starts + n, mask=n < B, other=2**30)
    b = gl.maximum(gl.sum((starts // QUERIES + n <= block).to(gl.int32), 0) - 1, 0)
    start = gl.load(sequences.query_starts + b)
    length = gl.load(sequences.query_starts + b + 1) - start
    limit = gl.load(sequences.seq_lens + b)
    first = (block - start // QUERIES - b) * QUERIES
    queries = gl.minimum(length - first, QUERIES)
    before = limit - length + first
    works = (index < tiles) & (queries > 0) & is_left(length, limit, C, window)
    piece = index // C.NKV % PIECES
    return b, index % C.NKV, limit, gl.where(works, before + queries, 0), start + first, queries, before, piece


@gluon.jit
def _first_block(before, window, BLOCK_N: gl.constexpr):
    """The first token of the first block that a tile's first query sees, after `before` tokens."""
    if window is None:
        return 0
    else:
        return gl.maximum(before + 1 - window, 0) // BLOCK_N * BLOCK_N


@gluon.jit
def _fetch_block(pages, rows, column, ring, step):
    """Fetch a block, one TMA box from each of `rows` of the pages on, once its stage is free."""
    BOX: gl.constexpr = pages.block_type.shape[0]
    tiles, full, empty = ring
    BLOCK_N: gl.constexpr = tiles.shape[1]
    WIDTH: gl.constexpr = tiles.shape[2]
    stage = wait_empty(empty, step)
    tile, bar = tiles.index(stage), full.index(stage)
    mbarrier.expect(bar, BLOCK_N * WIDTH * 2)
    for i in gl.static_range(BLOCK_N // BOX):
        for c in gl.static_range(0, WIDTH, CHANNELS):
            tma_load(pages, [rows[i], column + c], bar, tile.slice(i * BOX, BOX).slice(c, CHANNELS, 1))


@gluon.jit
def _box_rows(pages, table_ptr, first, limit, C):
    """Rows of the pages of a block's boxes, loaded before the wait for a free stage."""
    BOX: gl.constexpr = pages.block_type.shape[0]
    rows = ()
    for i in gl.static_range(0, C.BLOCK_N, BOX):
        t = gl.minimum(first + i, limit - 1) // BOX * BOX
        rows += (gl.load(table_ptr + t // C.PAGE_SIZE) * C.PAGE_SIZE + t % C.PAGE_SIZE,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _products(q_tiles, k, step, turns, round, TEAM: gl.constexpr):
    """The products of a team's queries with a block of K, which may be under way: wait for them.

    turns: wait for the team's turn once the block has arrived; None: there are none.
    """
    tiles, full, empty = k
    BLOCK_N: gl.constexpr = tiles.shape[1]
    PIECES: gl.constexpr = q_tiles.shape[0] // TEAMS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    for i in gl.static_range(PIECES):
        stage = wait_full(full, step * PIECES + i)
        if turns is not None:
            mbarrier.wait(turns.index(TEAM), round & 1)
        s = warpgroup_mma(
            q_tiles.index(TEAM * PIECES + i), tiles.index(stage).permute((1, 0)), s, use_acc=i > 0, is_async=True
        )
        if i > 0:
            s = warpgroup_mma_wait(1, deps=[s])
            release(empty, step * PIECES + i - 1)
    return s


@gluon.jit
def _fetch_blocks(k_pages, v_pages, k, v, sequences, sizes, window, C):
    """Fetch K and V of all tiles, one block after the other, from the first that some row sees.

    Past a sequence's end, its last box is fetched again. In pieces, V follows the next block of K, which is needed before it,
    but the first block of V, which a window may hide in part, is cleared before that block of K is read.
    """
    PIECES: gl.constexpr = pieces(C.D)
    WIDTH: gl.constexpr = k[0].shape[2]
    _, table_width, tiles = sizes
    step = 0
    for turn in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        b, kv_head, limit, seen, _, _, before, piece = _tile(turn, sequences, sizes, window, C)
        table_ptr = sequences.block_tables + b.to(gl.int64) * table_width
        column = kv_head * C.D
        opening = _first_block(before, window, C.BLOCK_N)
        for first in range(opening, seen, C.BLOCK_N):
            rows = _box_rows(k_pages, table_ptr, first, limit, C)
            if PIECES == 1:
                _fetch_block(k_pages, rows, column, k, step)
                _fetch_block(v_pages, rows, column, v, step)
            else:
                for i in gl.static_range(PIECES):
                    _fetch_block(k_pages, rows, column + i * WIDTH, k, step * PIECES + i)
                if first != opening + C.BLOCK_N:
                    rows = _box_rows(v_pages, table_ptr, gl.maximum(first - C.BLOCK_N, opening), limit, C)
                    _fetch_block(v_pages, rows, column + piece * WIDTH, v, gl.where(first > opening, step - 1, step))
            step += 1
        if PIECES > 1:
            last = (seen - 1) // C.BLOCK_N * C.BLOCK_N
            if last > opening:
                rows = _box_rows(v_pages, table_ptr, last, limit, C)
                _fetch_block(v_pages, rows, column + piece * WIDTH, v, step - 1)


@gluon.jit
def _hide(s, first, row_limit, window):
    """`hide` for the tokens from `first` on, and `hide_before` with a window."""
    t = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    s = hide(s, t[None, :], row_limit[:, None])
    return s if window is None else hide_before(s, t[None, :], row_limit[:, None] - window)


@gluon.jit
def _narrow(x, like):
    """Convert fp32 to the 16-bit dtype of `like`, in pairs. Otherwise the assembler swaps every pair again."""
    PAIR: gl.constexpr = "bf16x2" if like.dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(f"cvt.rn.{PAIR}.f32 $0, $2, $1;", "=r,r,r", [x], like.dtype, is_pure=True, pack=2)


@gluon.jit
def _step_maxima(s, factor, row_max, C):
    """Row maxima after the scores s of a step, as `online_softmax.attend` computes them."""
    return gl.maximum(row_max, gl.convert_layout(rounded(gl.max(s, 1) * factor, C), row_max.type.layout))


@gluon.jit
def _step_weights(s, factor, row_max, C):
    """The weights of a step, in fp32. row_max: after it."""
    subtracted = gl.convert_layout(base_of(row_max, None, C), gl.SliceLayout(1, s.type.layout))
    return gl.exp2(s * factor - subtracted[:, None])


@gluon.jit
def _invariant_weights(s, factor, row_max, total, like, C):
    """A block's weights in the dtype of `like`, row maxima and totals after it, and the factor of the sums before it.

    With two steps, the weights of the first are multiplied by the factor that its sums have after the second. That is exact in
    bfloat16, whose exponents are those of fp32. (So weights below 2^-126 of the largest are 0.)
    """
    if s.shape[1] == C.STEP:
        new_row_max = _step_maxima(s, factor, row_max, C)
        p = _narrow(_step_weights(s, factor, new_row_max, C), like)
    else:
        left, right = halves(s)
        middle = _step_maxima(left, factor, row_max, C)
        new_row_max = _step_maxima(right, factor, middle, C)
        rescale = gl.exp2(middle - base_of(new_row_max, None, C))
        left = _step_weights(left, factor, middle, C)
        left *= gl.convert_layout(rescale, gl.SliceLayout(1, left.type.layout))[:, None]
        right = _narrow(_step_weights(right, factor, new_row_max, C), like)
        p = gl.join(_narrow(left, like), right).permute([0, 2, 1]).reshape(s.shape)
    rescale = gl.exp2(row_max - base_of(new_row_max, None, C))
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.D, 16])
    p = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
    ones = gl.full([s.shape[1], 8], 1.0, like.dtype, gl.DotOperandLayout(1, TOTALS, 2))
    total *= gl.convert_layout(rescale, gl.SliceLayout(1, TOTALS))[:, None]
    total = mma_v2(gl.convert_layout(p, gl.DotOperandLayout(0, TOTALS, 2)), ones, total)
    return p, new_row_max, total, rescale


@gluon.jit
def _no_splits(sums, zeros):
    """`ended` and, in shared memory, `sums` before a tile's first split."""
    LAYOUT: gl.constexpr = zeros.type.layout
    sums.store(zeros)
    return gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT)), gl.zeros([ROWS, 1], gl.float32, LAYOUT)


@gluon.jit
def _end_split(sums, ended, row_max, total, acc):
    """Add a split to those before it, as `prefill` does. `ended`: their row maxima [ROWS], and their totals [ROWS, 1]."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    part = gl.convert_layout(row_max, ROW), gl.convert_layout(gl.max(total, 1), ROW)[:, None], (acc,)
    return add_split((ended[0], ended[1], (sums.load(acc.type.layout),)), part)


@gluon.jit
def _release_last(k, step, q_tiles):
    """Release what `_products` has not released of a block of K."""
    PIECES: gl.constexpr = q_tiles.shape[0] // TEAMS
    release(k[2], step * PIECES + PIECES - 1)


@gluon.jit
def _next_block(
    q_tiles, k, v, turns, sums, state, step, round, first, row_limit, scores, C, TEAM: gl.constexpr, MASKED: gl.constexpr
):
    """Add the product of the previous block's probabilities and its V. Compute the probabilities of this block.

    `state`: the probabilities p, the row maximum, the total and the sums, and `ended`.
    """
    v_tiles, v_full, v_empty = v
    p, row_max, total, acc, ended = state
    s = _products(q_tiles, k, step, turns, round, TEAM)
    before = wait_full(v_full, step - 1)
    acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    if turns is not None:
        mbarrier.arrive(turns.index((TEAM + 1) % TEAMS))
    s = warpgroup_mma_wait(1, deps=[s])
    _release_last(k, step, q_tiles)
    s, factor = score(s, scores.scale, scores)
    if MASKED:
        s = _hide(s, first, row_limit, scores.window)
    if C.INVARIANT:
        opens = first % C.SPLIT == 0
        weights, new_row_max, new_total, rescale = _invariant_weights(
            s, factor, gl.where(opens, float("-inf"), row_max), gl.where(opens, 0.0, total), p, C
        )
    else:
        new_row_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        s = gl.exp2(s * factor - new_row_max[:, None])
        rescale = gl.exp2(row_max - new_row_max)
        total = total * rescale + gl.sum(s, 1)
    # Returns at once, but ends the basic block. Otherwise the assembler would move the next wait up, before the softmax.
    wait_full(v_full, step - 1)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    release(v_empty, step - 1)
    if C.INVARIANT:
        if opens:
            ended_max, ended_total, whole = _end_split(sums, ended, row_max, total, acc)
            sums.store(whole[0])
            ended = ended_max, ended_total
            acc = gl.zeros_like(acc)
        else:
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        return weights, new_row_max, new_total, acc, ended
    else:
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        return gl.convert_layout(_narrow(s, p), p.type.layout), new_row_max, total, acc, ended


@gluon.jit
def _attend_tiles(q_ptr, results, q_tiles, k, v, turns, cleared, sums, sequences, scores, sizes, C, TEAM: gl.constexpr):
    """Task of one team: its rows of all tiles. Row r of a tile is head r % GROUP of query r // GROUP."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_N, 16])
    PIECES: gl.constexpr = pieces(C.D)
    WIDTH: gl.constexpr = C.D // PIECES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    v_tiles, v_full, v_empty = v
    q_tile = q_tiles.index(TEAM * PIECES)  # also for results
    tiles = sizes[2]
    if C.INVARIANT:
        sums = sums.index(TEAM)
    step = 0
    done = 0
    clears = 0
    if turns is not None and TEAM == TEAMS - 1:
        mbarrier.arrive(turns.index(0))
    for turn in range((tiles + gl.num_programs(0) - 1) // gl.num_programs(0)):
        _, kv_head, limit, seen, start, queries, before, piece = _tile(turn, sequences, sizes, scores.window, C)
        if seen > 0:
            # Rows past the end repeat the last query instead of being masked. They are not stored.
            row = TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MOVED))
            at = (gl.minimum(row // C.GROUP, queries - 1) * (C.NKV * C.GROUP) + row % C.GROUP) * C.D
            at = at[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, MOVED))[None, :]
            base = (start.to(gl.int64) * C.NKV + kv_head) * (C.GROUP * C.D)
            for i in gl.static_range(PIECES):
                q_tiles.index(TEAM * PIECES + i).store(gl.load(q_ptr + base + at + i * WIDTH))
            base += piece * WIDTH
            fence_async_shared()
            query = (TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))) // C.GROUP
            row_limit = before + 1 + gl.minimum(query, queries - 1)
            acc = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
            opening = _first_block(before, scores.window, C.BLOCK_N)
            if scores.window is not None:
                hidden = before + 1 - scores.window - opening  # tokens of the first block that no row sees
                if hidden > 0:
                    PART: gl.constexpr = C.BLOCK_N // TEAMS  # the other team clears the rest
                    stage = wait_full(v_full, step)
                    zero_rows_before(v_tiles.index(stage).slice(TEAM * PART, PART), hidden - TEAM * PART, 16)
                    fence_async_shared()
                    mbarrier.arrive(cleared.index(0))
                    mbarrier.wait(cleared.index(0), clears & 1)
                    clears += 1
            done += 1
            s = _products(q_tiles, k, step, None, 0, TEAM)
            s = warpgroup_mma_wait(0, deps=[s])
            _release_last(k, step, q_tiles)
            s, factor = score(s, scores.scale, scores)
            s = _hide(s, opening, row_limit, scores.window)
            if C.INVARIANT:
                ended = _no_splits(sums, acc)
                row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
                total = gl.zeros([ROWS, 8], gl.float32, TOTALS)
                p, row_max, total, _rescale = _invariant_weights(s, factor, row_max, total, q_tile, C)
            else:
                ended = ()
                row_max = gl.max(s, 1) * factor
                if scores.window is not None:  # else every row sees a token of the first block, so its row maximum is finite
                    row_max = gl.maximum(row_max, LOWEST)
                s = gl.exp2(s * factor - row_max[:, None])
                total = gl.sum(s, 1)
                p = gl.convert_layout(_narrow(s, q_tile), gl.DotOperandLayout(0, SUMS, 2))
            FIRST: gl.constexpr = 1 if scores.window is None else 0
            second = opening + C.BLOCK_N
            edge = second  # the first block that the window hides in no row
            if scores.window is not None:
                edge = gl.maximum((seen - scores.window + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N, second)
            seen_by_all = gl.maximum((before + 1) // C.BLOCK_N * C.BLOCK_N, edge)
            for PHASE in gl.static_range(FIRST, 3):  # masked by the window, not masked, masked by the end
                begin = second if PHASE == 0 else edge if PHASE == 1 else seen_by_all
                end = edge if PHASE == 0 else seen_by_all if PHASE == 1 else seen
                for first in range(begin, end, C.BLOCK_N):
                    step += 1
                    state = (p, row_max, total, acc, ended)
                    p, row_max, total, acc, ended = _next_block(
                        q_tiles, k, v, turns, sums, state, step, step - done, first, row_limit, scores, C, TEAM, PHASE != 1
                    )
            stage = wait_full(v_full, step)
            last = (seen - 1) // C.BLOCK_N * C.BLOCK_N
            if last + C.BLOCK_N > limit:
                HALF: gl.constexpr = C.BLOCK_N // TEAMS  # the other team clears the rest
                zero_rows_from(v_tiles.index(stage).slice(TEAM * HALF, HALF), limit - last - TEAM * HALF, 16)
                fence_async_shared()
                mbarrier.arrive(cleared.index(0))
                mbarrier.wait(cleared.index(0), clears & 1)
                clears += 1
            acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            release(v_empty, step)
            step += 1
            lane = TEAM * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            if C.INVARIANT:
                row_max, total, whole = _end_split(sums, ended, row_max, total, acc)
                row_max = gl.convert_layout(row_max, lane.type.layout)
                total = gl.convert_layout(gl.sum(total, 1), lane.type.layout)
                acc = whole[0]
            total = close(total, row_max, results, kv_head * C.GROUP + lane % C.GROUP, True)
            acc /= gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
            if results.gate is not None:  # through shared memory, so that its loads are contiguous
                token = start.to(gl.int64) + gl.minimum(row // C.GROUP, queries - 1)
                head = kv_head * C.GROUP + row % C.GROUP
                gate_ptrs = results.gate + (token * results.gate_token + head * results.gate_head + piece * WIDTH)[:, None]
                q_tile.store(gl.load(gate_ptrs + gl.arange(0, WIDTH, gl.SliceLayout(0, MOVED))[None, :]))
                acc *= tl.sigmoid(q_tile.load(SUMS).to(gl.float32))
            q_tile.store(acc.to(q_tile.dtype))
            stored = (row < TEAMS * ROWS // C.GROUP * C.GROUP) & (row // C.GROUP < queries)
            gl.store(results.out + base + at, q_tile.load(MOVED), mask=stored[:, None])


@gluon.jit
def _ring(dtype: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, COUNT: gl.constexpr):
    """A ring for blocks of K or V, or their pieces, which both teams read."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, WIDTH], dtype)
    tiles = gl.allocate_shared_memory(dtype, [COUNT, BLOCK_N, WIDTH], LAYOUT)
    full, empty = ring_barriers(COUNT, TEAMS)
    return tiles, full, empty


@gluon.jit
def _sums(WIDTH: gl.constexpr):
    """The teams' sums of ended splits. Warps access them without bank conflicts."""
    return gl.allocate_shared_memory(gl.float32, [TEAMS, ROWS, WIDTH], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))


@prepared
@gluon.jit(do_not_specialize=["B", "table_width", "tiles"])
def _prefill_sm90_kernel(q_ptr, k_pages, v_pages, sequences, results, scores, B, table_width, tiles, C):
    """Tiles of TEAMS · 64 rows, each with some queries of one sequence and the heads of one KV head.

    k_pages, v_pages: descriptors of [P · page_size, NKV · D].
    """
    dtype: gl.constexpr = k_pages.dtype
    PIECES: gl.constexpr = pieces(C.D)
    WIDTH: gl.constexpr = C.D // PIECES
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [TEAMS * PIECES, ROWS, WIDTH], LAYOUT)
    k, v = _ring(dtype, C.BLOCK_N, WIDTH, STAGES), _ring(dtype, C.BLOCK_N, WIDTH, STAGES // PIECES)
    turns, cleared = barriers(TEAMS, 1) if PIECES == 1 else None, barriers(1, TEAMS)
    fence_async_shared()
    sums, sizes = _sums(WIDTH) if C.INVARIANT else None, (B, table_width, tiles)
    gl.warp_specialize(
        [
            (_attend_tiles, (q_ptr, results, q_tiles, k, v, turns, cleared, sums, sequences, scores, sizes, C, 0)),
            (_attend_tiles, (q_ptr, results, q_tiles, k, v, turns, cleared, sums, sequences, scores, sizes, C, 1)),
            (_fetch_blocks, (k_pages, v_pages, k, v, sequences, sizes, scores.window, C)),
        ],
        [4, 1],
        [232, 40],
    )


def launch(a: AttentionInput) -> None:
    """Write `out`, for one or more tokens and sequences."""
    q, (Nq, Nkv, D), pages, B = a.heads, a.head_shape, a.pages, a.num_seqs
    tiles = (q.shape[0] // (TEAMS.value * ROWS.value // (Nq // Nkv)) + B) * Nkv * -(-D // PIECE.value)
    block, split, step = 128 if D <= 128 else 64, 0, 0  # tokens of K and V in a block, of a KV split and of an invariant step
    if a.invariant:
        split, step = a.split, block_n(a)
        block = min(split, 2 * step if q.dtype == torch.bfloat16 else step)
    k, v = (tma_descriptor(x, min(pages.page_size, block), CHANNELS.value, Nkv * D) for x in pages[:2])
    constants = Constants.of(
        a, BLOCK_N=block, BLOCK_B=prefill_lookup_size(B), SHORTEST=a.shortest, PARTIAL=a.partial, SPLIT=split, STEP=step
    )
    _prefill_sm90_kernel[(min(tiles, sm_count(q.device)),)](
        q, k, v, a.sequences, a.results(), a.scores.in_base_2(), B, a.table_width, tiles, C=constants, num_warps=4
    )
