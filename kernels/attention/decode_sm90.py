"""Decode attention of `decode.py` for Hopper (compute capability 9.0), fused with rotary embedding and KV write.

One warp fetches the pages of one work item after the other by TMA, so that loading never waits for arithmetic. Four warps compute
one item at a time: all scores of a split, one softmax over them, then the sum of the values. The M side of the MMA has the tokens
in scores [tokens, heads] = K · Qᵀ, and the channels in sums [channels, heads] = Vᵀ · Pᵀ. The N side has the query heads of a KV
head, padded to 8 or 16. The pages must have 16 bits; `decode_fp8_sm90` is for FP8 pages. `work_items_sm90` holds what both share.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.attention.online_softmax import close, gate_output, hide, hide_before, score
from minirt.kernels.attention.operands import AttentionInput
from minirt.kernels.attention.work_items_sm90 import (
    BLOCK_N,
    BOX,
    PROGRAMS,
    constants_of,
    end_of_first,
    fetch_items,
    find_blocks,
    find_candidates,
    find_firsts,
    find_place,
    load_angles,
    load_norm,
    load_partners,
    load_pieces,
    load_scale,
    of_pieces,
    times,
    turn,
)
from minirt.kernels.hopper.ring import release, ring_barriers, wait_full
from minirt.kernels.hopper.tiles import zero_rows_before, zero_rows_from
from minirt.kernels.hopper.tma import CHANNELS, tma_descriptor
from minirt.kernels.launch import launch_options, most_registers, sm_count
from minirt.kernels.prepared import prepared

STAGES = 6  # blocks of K or V that fit in a program's ring; a block has D // CHANNELS tiles


@gluon.jit
def _ask(place, kv_head, heads, rope, sequences, table_width, row, d, m, C):
    """Load everything that an item needs of its sequence's new token, without waiting.

    These are q, k and v in pieces; v again in the layout of the sums; cosines and sines; the token's page; the partners of q and
    k; the scale of q.
    """
    b, token, length, _ = place
    limit = length - 1
    heads_ptr = heads + gl.maximum(token, 0) * C.ROW
    # Heads past the group repeat the group's last head and are not stored.
    q_ptrs = heads_ptr + ((kv_head * C.GROUP + gl.minimum(row, C.GROUP - 1)) * C.D)[:, None]
    k_ptr = heads_ptr + (C.NQ + kv_head) * C.D
    v_ptr = k_ptr
    if not rope.v_is_k:
        v_ptr = heads_ptr + (C.NQ + C.NKV + kv_head) * C.D
    v_sums = ()
    for c in gl.static_range(0, C.D, CHANNELS):
        v_sums += (gl.load(v_ptr + c + m),)  # type: ignore[assignment]
    position = gl.maximum(limit, 0)
    page = gl.load(sequences.block_tables + b * table_width + gl.maximum(limit, 0) // C.PAGE_SIZE)
    return (
        load_pieces(q_ptrs, d[None, :], C), load_pieces(k_ptr, d, C), load_pieces(v_ptr, d, C), v_sums,
        load_angles(rope, position, d, C), page, load_partners(q_ptrs, d[None, :], C), load_partners(k_ptr, d, C),
        load_scale(rope, position),
    )  # fmt: skip


@gluon.jit
def _scores(ring, q_tiles, step, blocks, begin, hidden, limit, scores, SPLIT: gl.constexpr):
    """Compute the scores K · Qᵀ of the split whose blocks start at token `begin`. Scores are base-2 exponents.

    Returns [tokens, heads] for each block of the split, and the next step of the ring. Scores of the first `hidden` tokens, and
    past the last token in the pages, are −inf.
    """
    N: gl.constexpr = q_tiles.shape[1]
    TILES: gl.constexpr = q_tiles.shape[0]
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    tiles, full, empty = ring
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))
    block_scores = ()
    for i in gl.static_range(SPLIT // BLOCK_N):
        s = gl.full([BLOCK_N, N], float("-inf"), gl.float32, PRODUCTS)
        if i < blocks:
            stage = wait_full(full, step)
            for c in gl.static_range(TILES):
                k = tiles.index(stage * TILES + c)
                s = warpgroup_mma(k, q_tiles.index(c).permute((1, 0)), s, use_acc=c > 0, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            release(empty, step)
            s, factor = score(s, scores.scale, scores)
            s = hide(s * factor, (begin + i * BLOCK_N + m)[:, None], limit)
            if i == 0 and scores.window is not None:
                s = hide_before(s, m[:, None], hidden)
            step += 1
        block_scores += (s,)  # type: ignore[assignment]
    return block_scores, step


@gluon.jit
def _values(ring, p_tiles, step, blocks, D: gl.constexpr):
    """Sums Vᵀ · Pᵀ over the split's blocks, [channels, heads] for each tile of the channels, and the ring's next step."""
    BLOCKS: gl.constexpr = p_tiles.shape[0]
    N: gl.constexpr = p_tiles.shape[1]
    TILES: gl.constexpr = D // CHANNELS
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    tiles, full, empty = ring
    accs = ()
    for _ in gl.static_range(TILES):
        accs += (gl.zeros([CHANNELS, N], gl.float32, PRODUCTS),)  # type: ignore[assignment]
    for i in gl.static_range(BLOCKS):
        if i < blocks:
            stage = wait_full(full, step)
            pending = ()
            for c in gl.static_range(TILES):
                v = tiles.index(stage * TILES + c).permute((1, 0))
                acc = warpgroup_mma(v, p_tiles.index(i).permute((1, 0)), accs[c], is_async=True)
                pending += (acc,)  # type: ignore[assignment]
            done = ()
            for c in gl.static_range(TILES):
                done += (warpgroup_mma_wait(TILES - 1 - c, deps=[pending[c]]),)  # type: ignore[assignment]
            accs = done
            release(empty, step)
            step += 1
    return accs, step


@gluon.jit
def _attend_items(heads, rope, pages, ring, q_tiles, p_tiles, sequences, results, scores, sizes, C, PDL: gl.constexpr):
    """Compute the attention of one item after the other.

    The tiles do not contain the new token. The program that computes its split adds its score and its value without tensor cores,
    and writes its K and V to the pages; with `query_starts`, `rope_write` does.
    """
    N: gl.constexpr = q_tiles.shape[1]
    TILES: gl.constexpr = C.D // CHANNELS
    BLOCKS: gl.constexpr = C.SPLIT // BLOCK_N
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    HEADS: gl.constexpr = gl.BlockedLayout([1, C.WIDTH // 16], [2, 16], [4, 1], [1, 0])
    tiles, full, _ = ring
    B, table_width = sizes
    m = gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))  # tokens of a block, and channels of a tile
    n = gl.arange(0, N, gl.SliceLayout(0, PRODUCTS))
    row = gl.arange(0, N, gl.SliceLayout(1, HEADS))
    d = gl.arange(0, C.WIDTH, gl.SliceLayout(0, HEADS))
    q_norm, k_norm = load_norm(rope.q_norm, d, C), load_norm(rope.k_norm, d, C)
    first, programs = gl.program_id(0), gl.num_programs(0)
    items = gl.load(sequences.split_starts + B)
    firsts = find_firsts(sequences, B, C)
    next_place = find_place(
        first // C.NKV, find_candidates(first // C.NKV, firsts, sequences, B, C), sequences, scores.window, C
    )
    candidates = find_candidates((first + programs) // C.NKV, firsts, sequences, B, C)
    if PDL:
        gdc_wait()  # before the first read of the kernel before's output, and before the first write
    if PDL and C.EARLY:
        gdc_launch_dependents()  # programs of `gemm_sm90` have an SM each; others would crowd onto the first idle SMs
    asked = _ask(next_place, first % C.NKV, heads, rope, sequences, table_width, row, d, m, C)
    step = 0
    for pair in range(first, items * C.NKV, programs):
        item, kv_head = pair // C.NKV, pair % C.NKV
        token, length, split = next_place[1], next_place[2], next_place[3]
        q, k, v, v_sums, angles, page, q_partners, k_partners, scale = asked
        begin, blocks, hidden = find_blocks(split, length, scores.window, C.SPLIT)
        limit = length - 1
        newest = limit < split * C.SPLIT + C.SPLIT  # the new token belongs to this split
        q = turn(q, q_partners, q_norm, angles, scale, d, rope, C)
        k = turn(k, k_partners, k_norm, angles, (), d, rope, C)
        if rope.normalize_v:
            inverse_rms = of_pieces(v, rope, C)
            v, v_sums = times(v, inverse_rms), times(v_sums, inverse_rms)
        for i in gl.static_range(C.PIECES):
            if TILES == 1:
                q_tiles.index(0).slice(i * C.WIDTH, C.WIDTH, 1).store(q[i])
            else:
                q_tiles.index(i).store(q[i])
        fence_async_shared()
        # The new token's score [heads]; −inf if the token belongs to another split.
        new_score = q[0].to(gl.float32) * k[0].to(gl.float32)[None, :]
        for i in gl.static_range(1, C.PIECES):
            new_score = new_score + q[i].to(gl.float32) * k[i].to(gl.float32)[None, :]
        new_score = gl.sum(new_score, 1)
        new_score, factor = score(gl.convert_layout(new_score, gl.SliceLayout(0, PRODUCTS)), scores.scale, scores)
        new_score = gl.where(newest, new_score * factor, float("-inf"))
        # Load for the next item, while this one is computed.
        next_place = find_place((pair + programs) // C.NKV, candidates, sequences, scores.window, C)
        asked = _ask(next_place, (pair + programs) % C.NKV, heads, rope, sequences, table_width, row, d, m, C)
        candidates = find_candidates((pair + 2 * programs) // C.NKV, firsts, sequences, B, C)
        block_scores, step = _scores(ring, q_tiles, step, blocks, begin, hidden, limit, scores, C.SPLIT)
        # The probabilities go to shared memory, from where the next products read them.
        largest = gl.full([BLOCK_N, N], float("-inf"), gl.float32, PRODUCTS)
        for i in gl.static_range(BLOCKS):
            largest = gl.maximum(largest, block_scores[i])
        row_max = gl.maximum(gl.max(largest, 0), new_score)
        weights = gl.zeros([BLOCK_N, N], gl.float32, PRODUCTS)
        for i in gl.static_range(BLOCKS):
            if i < blocks:
                p = gl.exp2(block_scores[i] - row_max[None, :])
                weights += p
                p_tiles.index(i).store(gl.permute(p, (1, 0)).to(p_tiles.dtype))
        new_weight = gl.exp2(new_score - row_max)
        behind = begin + blocks * BLOCK_N - limit  # rows of the last block that are past the last token
        if behind > 0:
            last = wait_full(full, step + blocks - 1)
            for c in gl.static_range(TILES):
                zero_rows_from(tiles.index(last * TILES + c), BLOCK_N - behind, BLOCK_N)
        if scores.window is not None and hidden > 0:
            edge = wait_full(full, step)
            for c in gl.static_range(TILES):
                zero_rows_before(tiles.index(edge * TILES + c), hidden, BLOCK_N)
        fence_async_shared()
        total = gl.sum(weights, 0) + new_weight
        accs, step = _values(ring, p_tiles, step, blocks, C.D)
        at = n[None, :] * C.D + m[:, None]
        exist = (n < C.GROUP) & (token >= 0)
        stored = exist[None, :]
        inverse = 1 / close(total, row_max, results, kv_head * C.GROUP + n, exist)
        final = length <= end_of_first(length, scores.window, C.SPLIT)
        out_ptrs = results.out + (token * C.NQ + kv_head * C.GROUP) * C.D + at
        part = item.to(gl.int64) * C.NQ + kv_head * C.GROUP
        for c in gl.static_range(TILES):
            # Another split must not use the new token's V, which may be NaN.
            new_v = gl.where(newest, v_sums[c].to(gl.float32), 0.0)
            acc = accs[c] + new_v[:, None] * new_weight[None, :]
            if final:
                head, channel = kv_head * C.GROUP + n[None, :], c * CHANNELS + m[:, None]
                out = gate_output(acc * inverse[None, :], results, token, head, channel, stored)
                gl.store(out_ptrs + c * CHANNELS, out.to(results.out.dtype.element_ty), mask=stored)
            else:
                gl.store(results.sums + part * C.D + c * CHANNELS + at, acc, mask=stored)
        if not final:
            gl.store(results.row_stats + 2 * (part + n), row_max, mask=exist)
            gl.store(results.row_stats + 2 * (part + n) + 1, total, mask=exist)
        if sequences.query_starts is None and newest:
            slot = ((page.to(gl.int64) * C.PAGE_SIZE + limit % C.PAGE_SIZE) * C.NKV + kv_head) * C.D + d
            for i in gl.static_range(C.PIECES):
                gl.store(pages.k + slot + i * C.WIDTH, k[i])
            for i in gl.static_range(C.PIECES):
                gl.store(pages.v + slot + i * C.WIDTH, v[i])
    if PDL and not C.EARLY:
        gdc_launch_dependents()


@prepared
@gluon.jit(do_not_specialize=["B", "table_width"])
def _decode_sm90_kernel(heads, rope, pages, k_pages, v_pages, sequences, results, scores, B, table_width, C, PDL: gl.constexpr):
    """Every n-th pair of work item and KV head, for n programs. k_pages, v_pages: descriptors of [P · page_size, NKV · D]."""
    dtype: gl.constexpr = k_pages.dtype
    TILES: gl.constexpr = C.D // CHANNELS
    BLOCKS: gl.constexpr = C.SPLIT // BLOCK_N
    BLOCK: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, CHANNELS], dtype)
    SMALL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.N, CHANNELS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [C.STAGES * TILES, BLOCK_N, CHANNELS], BLOCK)
    q_tiles = gl.allocate_shared_memory(dtype, [TILES, C.N, CHANNELS], SMALL)
    p_tiles = gl.allocate_shared_memory(dtype, [BLOCKS, C.N, BLOCK_N], SMALL)
    full, empty = ring_barriers(C.STAGES, 1)
    fence_async_shared()
    ring, sizes = (tiles, full, empty), (B, table_width)
    gl.warp_specialize(
        [
            (_attend_items, (heads, rope, pages, ring, q_tiles, p_tiles, sequences, results, scores, sizes, C, PDL)),
            (fetch_items, (k_pages, v_pages, ring, sequences, sizes, scores.window, C)),
        ],
        [1],
        [64 if C.D <= 128 else 96],  # registers of a thread of the fetching warp; the other warps share the rest
    )


def launch(a: AttentionInput) -> None:
    """Same as `decode.launch`."""
    shape, pages, B, device = a.head_shape, a.pages, a.num_seqs, a.out.device
    Nq, Nkv, D = shape
    constants = constants_of(a, shape, B, 8 if Nq // Nkv <= 8 else 16, STAGES)
    k, v = (tma_descriptor(x, min(pages.page_size, BOX), CHANNELS.value, Nkv * D) for x in pages[:2])
    share = PROGRAMS if D <= 128 else 1  # programs that share an SM: the ring of one has as many bytes as two of 128 channels
    programs = max(1, min(a.max_splits * Nkv, share * sm_count(device)))
    _decode_sm90_kernel[(programs,)](
        a.heads, a.rope, pages.for_kernel(torch.int16), k, v, a.sequences, a.results(a.max_splits), a.scores.in_base_2(), B,
        a.table_width, C=constants, maxnreg=most_registers(256 * share), **launch_options(4, 1, a.pdl),
    )  # fmt: skip
