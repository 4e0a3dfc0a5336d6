"""Attention of one new token per sequence on the paged KV cache, alone or fused with QK-norm, rotary embedding and KV write.

The KV splits (`limits.KV_SPLIT`; Flash-Decoding, Dao et al. 2023) of all sequences form one list of work items. A fixed number of
programs takes items from it in turn, so neither the grid nor a CUDA graph depends on the contexts. `combine` adds the splits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton
import triton.language as tl

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.limits import KV_SPLIT, MAX_GROUP
from minirt.kernels.attention.online_softmax import (
    attend,
    blank,
    block_n,
    close,
    existing,
    fuses,
    gate_output,
    load_channels,
    no_queries,
    oldest_seen,
    prepare,
    score,
    split_channels,
    total_of,
    whole,
)
from minirt.kernels.attention.operands import FEW_SEQS, AttentionFacts, AttentionInput, decode_lookup_size, first_split
from minirt.kernels.compile.tuning import Family
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, sm_count
from minirt.kernels.pdl import wait_inside_loop
from minirt.kernels.prepared import prepared


@dataclass(frozen=True)
class DecodeConfig:
    """A launch configuration of `decode`. `num_stages` and `programs` do not change results.

    Args:
        block_n: tokens of K and V that a program holds at a time.
        num_stages: a program keeps (num_stages − 1) · block_n tokens in flight.
        programs: programs that run on an SM at once, each with its share of the registers.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int


CASES = [
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 16, "seq_lens": (1, 2, 0), "split": 64},
    {"Nq": 3, "Nkv": 1, "D": 128, "page_size": 16, "seq_lens": (65, 64, 63, 129), "split": 64},
    {"Nq": 7, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": (500, 0, 7), "split": 128},
    {"Nq": 14, "Nkv": 2, "D": 64, "page_size": 128, "seq_lens": (257, 1100), "split": 256},
    {"Nq": 16, "Nkv": 2, "D": 128, "page_size": 32, "seq_lens": (100,), "split": 256},
    {"Nq": 16, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": (1300,), "split": 64},
    {"Nq": 8, "Nkv": 1, "D": 512, "page_size": 64, "seq_lens": (65, 0, 130), "split": 64},
    {"Nq": 2, "Nkv": 2, "D": 64, "page_size": 256, "seq_lens": (0, 0, 130, 0, 64, 1, 0), "split": 64},
]


@triton.jit
def _rotated(x, y, norm, norm_partner, cos, sin, scale, rope, C):
    """Heads x [M, D] after RMSNorm (if `norm` is given, or all heads are normalized), rotary embedding and a scale.

    y and norm_partner are x and norm with the channels of each rotated pair swapped.
    """
    dtype: tl.constexpr = x.dtype
    d = tl.arange(0, C.BLOCK_D)[None, :]
    x, y = x.to(tl.float32), y.to(tl.float32)
    if norm is not None or rope.normalize:
        inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / C.D + rope.eps)[:, None]
        x = (x * inverse_rms).to(dtype).to(tl.float32)
        y = (y * inverse_rms).to(dtype).to(tl.float32)
    if norm is not None:
        x = x * norm.to(tl.float32)
        y = y * norm_partner.to(tl.float32)
    if C.R == C.D:
        x = x * cos + tl.where(d < C.R // 2, -y, y) * sin
    elif C.R > 0:
        x = tl.where(d < C.R, x * cos + tl.where(d < C.R // 2, -y, y) * sin, x)
    if scale is not None:
        x = x * scale
    return x.to(dtype)


@triton.jit
def _rotated_heads(heads_ptr, head, kv_head, rope, position, C, PDL: tl.constexpr):
    """The q heads `head` [M] of one token, normalized and rotated, and k and v of kv_head, repeated M times: [M, D] each.

    k and v are repeated because then all tiles have one shape and so one layout: a conversion between layouts would take longer
    than the arithmetic, and repeated loads cost nothing. All loads are issued before the first use, so their latencies overlap.
    """
    d = tl.arange(0, C.BLOCK_D)[None, :] + tl.zeros_like(head)[:, None]
    # Channel d < R is rotated with channel d ± R/2, so each is loaded twice.
    partner, angle = d, d
    if C.R == C.D:
        partner, angle = (d + C.D // 2) % C.D, d % (C.D // 2)
    elif C.R > 0:
        partner, angle = tl.where(d < C.R, (d + C.R // 2) % C.R, d), tl.where(d < C.R, d % (C.R // 2), 0)
    cos, sin, scale = None, None, None
    if C.R > 0:
        angles_ptr = rope.cos_sin + position.to(tl.int64) * C.R
        cos, sin = tl.load(angles_ptr + angle), tl.load(angles_ptr + C.R // 2 + angle)
    if rope.q_scales is not None:
        scale = tl.load(rope.q_scales + position)
    q_norm, q_norm_partner, k_norm, k_norm_partner = None, None, None, None
    if rope.q_norm is not None:
        q_norm, q_norm_partner = load_channels(rope.q_norm + d, d, C.D), load_channels(rope.q_norm + partner, d, C.D)
    if rope.k_norm is not None:
        k_norm, k_norm_partner = load_channels(rope.k_norm + d, d, C.D), load_channels(rope.k_norm + partner, d, C.D)
    if PDL:
        wait_inside_loop()
    q_ptrs = heads_ptr + (head * C.D)[:, None]
    k_ptr = heads_ptr + (C.NQ + kv_head) * C.D
    q, q_partner = load_channels(q_ptrs + d, d, C.D), load_channels(q_ptrs + partner, d, C.D)
    k, k_partner = load_channels(k_ptr + d, d, C.D), load_channels(k_ptr + partner, d, C.D)
    v = k
    if not rope.v_is_k:
        v = load_channels(k_ptr + C.NKV * C.D + d, d, C.D)
    if rope.normalize_v:
        wide = v.to(tl.float32)
        v = (wide * tl.rsqrt(tl.sum(wide * wide, 1) / C.D + rope.eps)[:, None]).to(v.dtype)
    q = _rotated(q, q_partner, q_norm, q_norm_partner, cos, sin, scale, rope, C)
    return q, _rotated(k, k_partner, k_norm, k_norm_partner, cos, sin, None, rope, C), v


@triton.jit
def find_work_item(item, sequences, scores, B, table_width, C):
    """The sequence of a work item, its length, the number of the split in it, and the pages of the split.

    A load that depends on another one takes as long as the attention of a short sequence. So all starts and lengths are loaded at
    once. With a single sequence, the pages are found without them, if there is no window.
    """
    if C.BLOCK_B == 1:
        b, length, split = tl.full((), 0, tl.int64), tl.load(sequences.seq_lens), item
    else:
        index = tl.arange(0, C.BLOCK_B)
        starts = tl.load(sequences.split_starts + index, mask=index < B, other=2**31 - 1)
        lens = tl.load(sequences.seq_lens + index, mask=index < B, other=0)
        # The last sequence that starts at or before the item. (An empty sequence starts where the next one does.)
        packed = tl.max(tl.where(starts <= item, (index.to(tl.int64) << 32) | lens.to(tl.int64), 0), 0)
        b, length = packed >> 32, packed.to(tl.int32)
        split = item - tl.max(tl.where(starts <= item, starts, 0), 0)
    if scores.window is not None:
        new = 1  # in `decode`, which skips sequences with another number
        if C.QUERIES > 1:
            new = tl.load(sequences.query_starts + b + 1) - tl.load(sequences.query_starts + b)
        split += oldest_seen(length, new, scores.window) // C.SPLIT
    PAGES: tl.constexpr = (C.SPLIT + C.PAGE_SIZE - 1) // C.PAGE_SIZE
    place = split * C.SPLIT // C.PAGE_SIZE + tl.arange(0, PAGES)
    numbers = tl.load(sequences.block_tables + b * table_width + place, mask=place < table_width, other=0)
    return b, length, split, numbers


@triton.jit
def split_slots(numbers, first, begin, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of the tokens first + [0, BLOCK_N) as (base, offsets): token i is in slot base + offsets[i].

    `begin` is the first token of their split, and `numbers` are those of the split's pages.
    """
    n = tl.arange(0, BLOCK_N)
    place = tl.arange(0, numbers.shape[0])
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.sum(tl.where(place == first // PAGE_SIZE - begin // PAGE_SIZE, numbers, 0), 0).to(tl.int64)
        return page * PAGE_SIZE + first % PAGE_SIZE, n
    else:
        t = first + n
        chosen = place[None, :] == (t // PAGE_SIZE - begin // PAGE_SIZE)[:, None]
        page = tl.sum(tl.where(chosen, numbers[None, :], 0), 1).to(tl.int64)
        return tl.full((), 0, tl.int64), page * PAGE_SIZE + t % PAGE_SIZE


@triton.jit
def _store_new(x, row, pages_ptr, scales_ptr, slot, kv_head, C, WRITES: tl.constexpr):
    """Write row 0 of x [M, D] to a slot, if WRITES. Returns x as the page holds it, in fp32."""
    d = tl.arange(0, C.BLOCK_D)[None, :]
    at = (slot * C.NKV + kv_head) * C.D + d + tl.zeros_like(row)[:, None]
    stored = existing(row[:, None] == 0, d, C.D)
    if scales_ptr is None:
        if WRITES:
            tl.store(pages_ptr + at, x, mask=stored)
        return x.to(tl.float32)
    else:
        scale = fp8_scale(tl.max(finite_magnitude(x), 1))
        x = to_fp8(x, scale[:, None])
        if WRITES:
            tl.store(pages_ptr.to(tl.pointer_type(tl.uint8)) + at, x, mask=stored)
            tl.store(scales_ptr + (slot * C.NKV + kv_head) + row, scale, mask=row == 0)
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]


@prepared
@triton.jit(do_not_specialize=["B", "table_width"])
def _decode_kernel(heads, rope, pages, sequences, results, scores, B, table_width, C, PDL: tl.constexpr):
    """Attention of one KV head on every n-th work item, n being the number of programs per head.

    For a sequence with one split it stores the final result, else a partial one. With `C.RAW`, `heads` holds raw q, k and v
    heads, and the new token need not be in the pages yet. With `query_starts`, items of sequences without exactly one new token
    are skipped, and `rope_write` writes the new tokens to the pages.
    """
    FP8: tl.constexpr = pages.k_scale is not None
    ALL: tl.constexpr = sequences.query_starts is None  # whether each sequence has one new token
    ROW: tl.constexpr = C.ROW if C.RAW else C.NQ * C.D
    kv_head = tl.program_id(0) % C.NKV
    first_item, programs = tl.program_id(0) // C.NKV, tl.num_programs(0) // C.NKV
    items = tl.load(sequences.split_starts + B)
    b, length, split, numbers = find_work_item(first_item, sequences, scores, B, table_width, C)
    if PDL and not C.RAW:
        tl.extra.cuda.gdc_wait()  # the kernel before may have written the new token's K and V
    row = tl.arange(0, C.BLOCK_M)
    d = tl.arange(0, C.BLOCK_D)[None, :]
    head = kv_head * C.GROUP + tl.minimum(row, C.GROUP - 1)  # rows past the group repeat its last head and are not stored
    valid = row < C.GROUP
    for item in range(first_item, items, programs):
        begin = split * C.SPLIT
        limit = length - 1 if C.RAW else length  # tokens in the pages
        row_max, total, acc = blank(C.BLOCK_M, C.BLOCK_D, FP8, C.INVARIANT)
        q = no_queries(C.BLOCK_M, C.BLOCK_D, heads.dtype.element_ty, FP8)
        row_limit = tl.zeros((C.BLOCK_M,), tl.int32) + limit
        start, first_end, oldest, row_oldest = begin, C.SPLIT, None, None
        if scores.window is not None:
            oldest = oldest_seen(length, 1, scores.window)
            row_oldest = tl.zeros((C.BLOCK_M,), tl.int32) + oldest
            start = tl.maximum(begin, oldest // C.BLOCK_N * C.BLOCK_N)
            first_end = (oldest // C.SPLIT + 1) * C.SPLIT
        # Run the loop at least once, even if the new token is the first of its split.
        end = tl.maximum(tl.minimum(begin + C.SPLIT, limit), start + 1)
        token, stored = b, valid
        if not ALL:
            token = tl.load(sequences.query_starts + b).to(tl.int64)
            single = tl.load(sequences.query_starts + b + 1) == token + 1
            end = tl.where(single, end, start)
            stored = row < tl.where(single, C.GROUP, 0)
        next_b, next_length, next_split, next_numbers = b, length, split, numbers
        for first in range(start, end, C.BLOCK_N):
            if first == start:
                # Inside the loop, so that its first loads of K and V are in flight before any wait.
                if ALL and item + programs < items:
                    next_b, next_length, next_split, next_numbers = find_work_item(
                        item + programs, sequences, scores, B, table_width, C
                    )
                heads_ptr = heads + token * ROW
                if C.RAW:
                    turned, k, v = _rotated_heads(heads_ptr, head, kv_head, rope, limit, C, PDL)
                    q = prepare(turned, FP8)
                    if limit < begin + C.SPLIT:
                        # The last split: the online softmax starts with the new token, which no other program reads.
                        base, slot = split_slots(numbers, limit, begin, C.PAGE_SIZE, 1)
                        base += tl.sum(slot, 0)
                        new_k = _store_new(k, row, pages.k, pages.k_scale, base, kv_head, C, ALL)
                        new_v = _store_new(v, row, pages.v, pages.v_scale, base, kv_head, C, ALL)
                        product = tl.sum(turned.to(tl.float32) * new_k, 1)
                        new_score, factor = score(product, scores.scale, scores)
                        row_max = new_score * factor
                        total += 1.0
                        acc = split_channels(new_v) if FP8 else (new_v,)
                else:
                    q = prepare(load_channels(heads_ptr + (head * C.D)[:, None] + d, d, C.D), FP8)
            base, slot = split_slots(numbers, first, begin, C.PAGE_SIZE, C.BLOCK_N)
            t = first + tl.arange(0, C.BLOCK_N)
            row_max, total, acc = attend(
                q, (row_max, total, acc), pages, base * C.NKV + kv_head, slot, t, limit, row_limit, scores, C, True,
                oldest, row_oldest,
            )  # fmt: skip
        total = total_of(total)
        if length <= first_end:
            inside = existing(stored[:, None], d, C.D)
            out = whole(acc) / tl.where(stored, close(total, row_max, results, head, True), 1.0)[:, None]
            out = gate_output(out, results, token, head[:, None], d, inside).to(results.out.dtype.element_ty)
            tl.store(results.out + ((token * C.NQ + head) * C.D)[:, None] + d, out, mask=inside)
        else:
            part = tl.cast(item, tl.int64) * C.NQ + head
            tl.store(results.sums + part[:, None] * C.D + d, whole(acc), mask=existing(stored[:, None], d, C.D))
            tl.store(results.row_stats + 2 * part, row_max, mask=stored)
            tl.store(results.row_stats + 2 * part + 1, total, mask=stored)
        if not ALL:  # noqa: SIM102 — compile-time. The loop does not run for a skipped item.
            if item + programs < items:
                next_b, next_length, next_split, next_numbers = find_work_item(
                    item + programs, sequences, scores, B, table_width, C
                )
        b, length, split, numbers = next_b, next_length, next_split, next_numbers
    if PDL:
        # Every program waits, even one without a work item (`pdl`, rule 2), and triggers after its last reads.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def rule(facts: AttentionFacts, gpu: Gpu) -> DecodeConfig:
    """The configuration, whose blocks are not longer than a split. With more than 128 channels, a block has as many bytes."""
    if facts.itemsize == 4:
        return DecodeConfig(32, 8, 3, 3) if facts.D <= 128 else DecodeConfig(16, 8, 3 if facts.D <= 256 else 2, 1)
    if facts.D > 256:
        return DecodeConfig(16, 8, 5 if facts.fp8 else 3, 1)
    if facts.D > 128:
        return DecodeConfig(32, 4, 3, 2)
    if facts.fp8:  # With half the bytes, the work for each block takes the time. So use fewer, larger blocks.
        return DecodeConfig(min(128, facts.split), 4, 2, 3)
    # Programs that share an SM hide each other's latency. A single program must prefetch more.
    return DecodeConfig(64, 4, 2 if facts.T > FEW_SEQS else 3, 3)


FAMILY = Family("decode", DecodeConfig, (__file__,), ("T", "D", "itemsize", "fp8", "split"), rule, tokens=decode_lookup_size)


def splits_before(
    seq_lens: Sequence[int], split: int = KV_SPLIT, window: int | None = None, new: Sequence[int] | None = None
) -> list[int]:
    """`split_starts` [B + 1]: for each sequence, the number of splits of the sequences before it; last, that of all splits.

    new: new tokens of each sequence, which matter with a window. None: one each.
    """
    new = [1] * len(seq_lens) if new is None else new
    splits = (cdiv(n, split) - first_split(n, m, window, split) for n, m in zip(seq_lens, new, strict=True))
    return list(accumulate(splits, initial=0))


def workspace_floats(max_splits: int, Nq: int, D: int) -> int:
    """fp32 values that decoding keeps in the workspace: for each split and head a sum [D], a row maximum and a total."""
    return max_splits * Nq * (D + 2)


def launch(a: AttentionInput) -> None:
    """Write `out` of sequences with one split, and partial results of the others. `dispatch` checks the operands before."""
    Nkv, B, device, lookup = a.head_shape[1], a.num_seqs, a.out.device, decode_lookup_size(a.num_seqs)
    c = FAMILY.lookup(device, a.facts(lookup))
    if a.invariant:
        c = replace(c, block_n=block_n(a))
    constants = Constants.of(a, BLOCK_M=MAX_GROUP, BLOCK_N=c.block_n, BLOCK_B=lookup, SPLIT=a.split)
    _decode_kernel[(max(1, min(a.max_splits, c.programs * sm_count(device) // Nkv)) * Nkv,)](
        a.heads, a.rope, a.pages.for_kernel(torch.int16), a.sequences, a.results(a.max_splits), a.scores.in_base_2(),
        B, a.table_width, C=constants, maxnreg=most_registers(32 * c.num_warps * c.programs), enable_fp_fusion=fuses(a.out.dtype),
        **launch_options(c.num_warps, c.num_stages, a.pdl),
    )  # fmt: skip
