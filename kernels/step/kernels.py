"""The Triton kernels of the table of slots: `edit_table`, `derive`, `commit` and `report`, with the results of `step/table.py`.

CUDA graphs hold the first two, and `commit_greedy`, so grids depend on the sizes of tensors only, and the device reads the
numbers of edits, tokens and draws. Each program of `derive` and `commit` sums over the sequences before it, which takes less time
than another launch.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.argmax import LOWEST, greedy_token
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.sampling.batch import COLUMNS, SamplingBatch
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows, StepTensors

# The words of a row, as kernels take them.
NUM_CACHED, NUM_NEXT, FINAL_LEN = map(tl.constexpr, (words.NUM_CACHED, words.NUM_NEXT, words.FINAL_LEN))
PROMPT_LEN, LOGPROBS, SEED = map(tl.constexpr, (words.PROMPT_LEN, words.LOGPROBS, words.SEED))
TEMPERATURE, NEXT_TOKENS, RULED, MATCHED = map(tl.constexpr, (words.TEMPERATURE, words.NEXT_TOKENS, words.RULED, words.MATCHED))
_COLUMNS = tl.constexpr(len(COLUMNS))
_EDITING = 32  # programs that apply edits
_EDIT_BLOCK = 1024  # words that a program writes at a time
_BLOCK = 256  # sequences, pages or tokens that a program handles at a time
_MOST_PARTS = 8  # programs for each sequence, in a step with many tokens


@compile_time
class _Constants(NamedTuple):
    """What `derive`, `commit` and `report` compile in: the columns of the table, and sizes of the engine.

    BLOCK: see `_BLOCK`. BLOCK_DRAWS: a power of two, at least 1 + DRAFTS.
    """

    WORDS: int
    DRAFTS: int
    GROUPS: int
    WINDOWS: tuple[int, ...]
    PAGES: int
    PAGE_TABLES: int
    TOKENS: int
    HISTORY: int
    BLOCK: int
    PAGE_SIZE: int
    KV_SPLIT: int
    ONE_TOKEN: bool
    BLOCK_DRAWS: int


@functools.cache
def _constants(columns: Columns, page_size: int = 1, kv_split: int = 1, one_token: bool = False) -> _Constants:
    return _Constants(
        columns.words, columns.drafts, columns.groups, columns.windows, columns.pages, columns.page_tables, columns.tokens,
        columns.history, _BLOCK, page_size, kv_split, one_token, next_power_of_2(1 + columns.drafts),
    )  # fmt: skip


@prepared
@triton.jit(do_not_specialize_on_alignment=["edits_ptr", "values_ptr", "count_ptr"])
def _edit_kernel(table_ptr, edits_ptr, values_ptr, count_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Every n-th edit, for n programs."""
    for edit in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        edit_ptr = edits_ptr + edit * 4
        slot, column = tl.load(edit_ptr), tl.load(edit_ptr + 1)
        count, first = tl.load(edit_ptr + 2), tl.load(edit_ptr + 3)
        row_ptr = table_ptr + slot.to(tl.int64) * WORDS + column
        for at in range(0, count, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(row_ptr + i, tl.load(values_ptr + first + i, mask=i < count), mask=i < count)


@triton.jit
def _sequences(table_ptr, rows, b, end, C):
    """Of sequences b, one or a block: (slot, whether it goes on, start, new tokens, logits, draws). From `end` on: padding."""
    inside = b < end
    slot = tl.load(rows.slots + b, mask=inside, other=-1)
    start = tl.load(rows.starts + b, mask=inside, other=0)
    count = tl.load(rows.counts + b, mask=inside, other=0)
    logits = tl.load(rows.logits + b, mask=inside, other=0)
    draws = tl.load(rows.draws + b, mask=inside, other=0)
    valid = slot >= 0
    going_on = valid & (start < 0)
    row_ptr = table_ptr + slot.to(tl.int64) * C.WORDS
    cached = tl.load(row_ptr + NUM_CACHED, mask=going_on, other=0)
    following = tl.load(row_ptr + NUM_NEXT, mask=going_on, other=0)
    final = tl.load(row_ptr + FINAL_LEN, mask=going_on, other=0)
    most = tl.maximum(tl.minimum(count, tl.minimum(following, final - 1 - cached)), 1)
    start = tl.where(going_on, cached, start)
    count = tl.where(going_on, most, count)
    return slot, going_on, start, tl.where(valid, count, 0), tl.where(valid, logits, 0), tl.where(valid, draws, 0)


@triton.jit
def _splits(start, count, slot, C):
    return tl.where(slot >= 0, (start + count + C.KV_SPLIT - 1) // C.KV_SPLIT, 0)


@triton.jit
def _sums(table_ptr, rows, first, end, C):
    """What the sequences of a block have, up to `end`: (tokens, given tokens, KV splits, logits, draws)."""
    b = first + tl.arange(0, C.BLOCK)
    slot, going_on, start, count, logits, draws = _sequences(table_ptr, rows, b, end, C)
    given, splits = tl.where(going_on, 0, count), _splits(start, count, slot, C)
    # Four sums by one reduction: each exchanges values between warps, and waits.
    pairs = tl.split(tl.sum(tl.join(tl.join(given, splits), tl.join(logits, draws)), 0))
    given, splits = tl.split(pairs[0])
    logits, draws = tl.split(pairs[1])
    return tl.sum(count, 0), given, splits, logits, draws


@triton.jit
def _window_splits(table_ptr, rows, out, split_stride, b, WINDOW: tl.constexpr, GROUP: tl.constexpr, C):
    """The KV splits of all sequences before b that their new tokens see."""
    before = 0
    for block in range(0, b, C.BLOCK):
        slot, _, start, count, _, _ = _sequences(table_ptr, rows, block + tl.arange(0, C.BLOCK), b, C)
        unseen = tl.where(slot >= 0, tl.maximum(start - WINDOW + 1, 0) // C.KV_SPLIT, 0)
        before += tl.sum(_splits(start, count, slot, C) - unseen, 0)
    tl.store(out.split_starts + GROUP * split_stride + b, before)


@triton.jit
def _copy_pages(table_ptr, rows, out, group_stride, split_stride, b, B, group, C):
    """The columns of a page table that a sequence uses, and of those of a window also the KV splits."""
    for i in tl.static_range(1, C.GROUPS):
        if group == i:
            _window_splits(table_ptr, rows, out, split_stride, b, C.WINDOWS[i - 1], i, C)
    slot, _, start, count, _, _ = _sequences(table_ptr, rows, b, B, C)
    used = tl.where(slot >= 0, tl.minimum((start + count + C.PAGE_SIZE - 1) // C.PAGE_SIZE, C.PAGES), 0)
    from_ptr = table_ptr + slot.to(tl.int64) * C.WORDS + C.PAGE_TABLES + group * C.PAGES
    to_ptr = out.block_tables + group.to(tl.int64) * group_stride + b.to(tl.int64) * C.PAGES
    for at in range(0, used, C.BLOCK):
        page = at + tl.arange(0, C.BLOCK)
        tl.store(to_ptr + page, tl.load(from_ptr + page, mask=page < used), mask=page < used)


@triton.jit
def _pad(out, settings, slot_stride, first_token, first_logits, first_draw, T, R, Q, part, parts, C):
    """Every n-th block of what is behind the last token, row of logits and draw."""
    index = tl.arange(0, C.BLOCK)
    for at in range(first_token + part * C.BLOCK, T, parts * C.BLOCK):
        token = at + index
        tl.store(out.tokens + token, 0, mask=token < T)
        tl.store(out.positions + token, 0, mask=token < T)
        for group in tl.static_range(C.GROUPS):
            tl.store(out.slot_mapping + group * slot_stride + token, -1, mask=token < T)
    for at in range(first_logits + part * C.BLOCK, R, parts * C.BLOCK):
        row = at + index
        tl.store(out.logits_indices + row, tl.minimum(row, T - 1), mask=row < R)
    for at in range(first_draw + part * C.BLOCK, Q, parts * C.BLOCK):
        draw = at + index
        inside = draw < Q
        tl.store(out.draw_rows + draw, draw, mask=inside)
        tl.store(out.draw_slots + draw, -1, mask=inside)
        tl.store(out.draw_logprobs + draw, -1, mask=inside)
        tl.store(out.draw_drafts + draw, 0, mask=inside)
        for column in tl.static_range(len(settings)):
            tl.store(settings[column] + draw, 0, mask=inside)


@triton.jit
def _derive_rest(table_ptr, rows, out, settings, slot_stride, b, B, T, R, Q, part, parts, C):
    """What is no page: of a sequence, or the padding, if b = B. Part 0 has what is no token."""
    slot, going_on, start, count, logits, draws = _sequences(table_ptr, rows, b, B, C)
    valid, row_ptr = slot >= 0, table_ptr + slot.to(tl.int64) * C.WORDS
    # Loads come before the sums, and the sums' first block before their loop, so that the memory's latencies overlap.
    prompt_len, logprobs = tl.load(row_ptr + PROMPT_LEN, mask=valid), tl.load(row_ptr + LOGPROBS, mask=valid)
    values = ()
    for column in tl.static_range(_COLUMNS):
        values += (tl.load(row_ptr + TEMPERATURE + column, mask=valid),)
    low, high = tl.load(row_ptr + SEED, mask=valid), tl.load(row_ptr + SEED + 1, mask=valid)
    ruled = tl.load(row_ptr + RULED, mask=valid)
    first_token, first_given, first_split, first_logits, first_draw = _sums(table_ptr, rows, 0, b, C)
    for block in range(C.BLOCK, b, C.BLOCK):
        sums = _sums(table_ptr, rows, block, b, C)
        first_token, first_given, first_split = first_token + sums[0], first_given + sums[1], first_split + sums[2]
        first_logits, first_draw = first_logits + sums[3], first_draw + sums[4]
    if C.ONE_TOKEN:
        first_token = b
    if part == 0:
        tl.store(out.query_starts + b, first_token)
        tl.store(out.split_starts + b, first_split)
    if b == B:
        _pad(out, settings, slot_stride, first_token, first_logits, first_draw, T, R, Q, part, parts, C)
    else:
        index = tl.arange(0, C.BLOCK)
        num_following = tl.where(going_on, count, 0)
        num_given = count - num_following
        for at in range(part * C.BLOCK, count, parts * C.BLOCK):
            offset = at + index
            inside = offset < count
            position, to = start + offset, first_token + offset
            following = tl.load(row_ptr + NEXT_TOKENS + offset, mask=offset < num_following, other=0)
            given = tl.load(rows.tokens + first_given + offset, mask=offset < num_given, other=0)
            token = tl.where(going_on, following, given)
            tl.store(out.tokens + to, token, mask=inside)
            tl.store(out.positions + to, position, mask=inside)
            for group in tl.static_range(C.GROUPS):
                page_ptr = row_ptr + C.PAGE_TABLES + group * C.PAGES + position // C.PAGE_SIZE
                slot_in_pages = tl.load(page_ptr, mask=inside, other=0).to(tl.int64) * C.PAGE_SIZE + position % C.PAGE_SIZE
                tl.store(out.slot_mapping + group * slot_stride + to, slot_in_pages, mask=inside)
            if C.HISTORY:
                tl.store(row_ptr + C.TOKENS + position, token, mask=inside)
        if part == 0:
            length, last = tl.where(valid, start + count, 0), first_token + count
            tl.store(out.seq_slots + b, slot)
            tl.store(out.seq_lens + b, length)
            if C.ONE_TOKEN:
                tl.store(out.tokens + b, 0, mask=count == 0)
                tl.store(out.positions + b, 0, mask=count == 0)
                for group in tl.static_range(C.GROUPS):
                    tl.store(out.slot_mapping + group * slot_stride + b, -1, mask=count == 0)
            for at in range(0, logits, C.BLOCK):
                offset = at + index
                token = tl.minimum(last - tl.minimum(logits, count) + offset, last - 1)
                tl.store(out.logits_indices + first_logits + offset, token, mask=offset < logits)
            seed = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
            step = length - tl.minimum(draws, count) + 1 - prompt_len
            for at in range(0, draws, C.BLOCK):
                offset = at + index
                inside, draw = offset < draws, first_draw + offset
                tl.store(out.draw_rows + draw, first_logits + logits - draws + offset, mask=inside)
                tl.store(out.draw_slots + draw, tl.where(ruled > 0, slot, -1), mask=inside)
                tl.store(out.draw_logprobs + draw, logprobs, mask=inside)
                tl.store(out.draw_drafts + draw, offset, mask=inside)
                for column in tl.static_range(_COLUMNS):
                    to_ptr = settings[column] + draw
                    tl.store(to_ptr, values[column].to(to_ptr.dtype.element_ty, bitcast=True), mask=inside)
                tl.store(settings.seed + draw, seed, mask=inside)
                tl.store(settings.step + draw, step + offset, mask=inside)


@prepared
@triton.jit(do_not_specialize=["group_stride", "slot_stride", "split_stride", "B", "T", "R", "Q"])
def _derive_kernel(table_ptr, rows, out, settings, group_stride, slot_stride, split_stride, B, T, R, Q, C):
    """For each sequence, one program for each page table, and the others for the rest; the last of these have the padding."""
    b, part = tl.program_id(0), tl.program_id(1)
    if part < C.GROUPS:
        _copy_pages(table_ptr, rows, out, group_stride, split_stride, b, B, part, C)
    else:
        parts = tl.num_programs(1) - C.GROUPS
        _derive_rest(table_ptr, rows, out, settings, slot_stride, b, B, T, R, Q, part - C.GROUPS, parts, C)


@triton.jit
def _draws_before(rows, first, end, C):
    """The number of draws of a block's sequences, up to `end`."""
    b = first + tl.arange(0, C.BLOCK)
    slots = tl.load(rows.slots + b, mask=b < end, other=-1)
    return tl.sum(tl.where(slots >= 0, tl.load(rows.draws + b, mask=b < end, other=0), 0), 0)


@triton.jit
def _commit(table_ptr, rows, seq_lens_ptr, drawn_ptr, result_ptr, stride, tiles, C, BLOCK_S: tl.constexpr):
    """One sequence. `drawn_ptr`: its drawn tokens [Q]; with BLOCK_S, a power of two, row maxima of logits [Q, tiles] instead."""
    b = tl.program_id(0)
    slot, start, draws = tl.load(rows.slots + b), tl.load(rows.starts + b), tl.load(rows.draws + b)
    length = tl.load(seq_lens_ptr + b)
    row_ptr = table_ptr + slot.to(tl.int64) * C.WORDS
    valid = slot >= 0
    cached = tl.load(row_ptr + NUM_CACHED, mask=valid, other=0)
    following = tl.load(row_ptr + NUM_NEXT, mask=valid, other=0)
    final = tl.load(row_ptr + FINAL_LEN, mask=valid, other=0)
    first = _draws_before(rows, 0, b, C)
    for block in range(C.BLOCK, b, C.BLOCK):
        first += _draws_before(rows, block, b, C)
    valid = valid & ((start >= 0) | (following != 0))
    i = tl.arange(0, C.BLOCK_DRAWS)
    count = tl.where(valid, tl.minimum(tl.where(start < 0, length - cached, 1), draws), 0)  # of its draws, those that are valid
    if BLOCK_S:
        drawn, tile = tl.full([C.BLOCK_DRAWS], -1, tl.int32), tl.arange(0, BLOCK_S)
        for draw in range(count):
            maxima_ptr = drawn_ptr + (first + draw).to(tl.int64) * stride
            best = tl.max(tl.load(maxima_ptr + tile, mask=tile < tiles, other=LOWEST), 0)
            drawn = tl.where(i == draw, greedy_token(best).to(tl.int32), drawn)
    else:
        drawn = tl.load(drawn_ptr + first + i, mask=i < count, other=-1).to(tl.int32)
    drafts = tl.load(row_ptr + NEXT_TOKENS + 1 + i, mask=i + 1 < count, other=-1)
    # Drafts from the first wrong one on do not count. The draw after the last valid draft has none.
    right = tl.min(tl.where((i + 1 < count) & (drawn >= 0) & (drawn == drafts), C.BLOCK_DRAWS, i), 0)
    token = tl.sum(tl.where(i == right, drawn, 0), 0)
    yields = valid & (draws > 0)
    to_ptr = result_ptr + b.to(tl.int64) * (2 + C.DRAFTS)
    tl.store(to_ptr, tl.where(yields, right + 1, 0))
    tl.store(to_ptr + 1 + i, tl.where(yields & (i <= right), drawn, 0), mask=i <= C.DRAFTS)
    if C.DRAFTS and not BLOCK_S:
        tl.store(drawn_ptr + first + i, -1, mask=(i > tl.where(yields, right, -1)) & (i < tl.where(slot >= 0, draws, 0)))
    unusable = yields & (token < 0)
    length = tl.where(yields, length - (count - 1 - right), length)
    tl.store(row_ptr + NUM_CACHED, length, mask=valid & (unusable == 0))
    following = tl.where(unusable, 0, (length + 1 < final).to(tl.int32))
    tl.store(row_ptr + NUM_NEXT, following, mask=yields)
    tl.store(row_ptr + NEXT_TOKENS, token, mask=yields & (unusable == 0))
    if C.HISTORY:
        tl.store(row_ptr + C.TOKENS + length, token, mask=yields & (unusable == 0) & (length < C.HISTORY))


@prepared
@triton.jit
def _commit_kernel(table_ptr, rows, seq_lens_ptr, drawn_ptr, result_ptr, C):
    """One sequence."""
    _commit(table_ptr, rows, seq_lens_ptr, drawn_ptr, result_ptr, 0, 0, C, 0)


@prepared
@triton.jit(do_not_specialize_on_alignment=["wanted_ptr"])
def _commit_greedy_kernel(
    table_ptr, rows, seq_lens_ptr, row_maxima_ptr, wanted_ptr, result_ptr, stride, tiles, C, BLOCK_S: tl.constexpr
):
    """One sequence, or nothing."""
    if tl.load(wanted_ptr) != 0:
        _commit(table_ptr, rows, seq_lens_ptr, row_maxima_ptr, result_ptr, stride, tiles, C, BLOCK_S)


@prepared
@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["slots_ptr"])
def _report_kernel(table_ptr, slots_ptr, out_ptr, vocab, C):
    """One sequence."""
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    row_ptr, to_ptr = table_ptr + slot.to(tl.int64) * C.WORDS, out_ptr + b.to(tl.int64) * (2 + C.DRAFTS)
    following = tl.load(row_ptr + NUM_NEXT, mask=slot >= 0, other=0)
    matched = tl.load(row_ptr + MATCHED, mask=slot >= 0, other=0)
    i = tl.arange(0, C.BLOCK_DRAWS)
    drafts = tl.load(row_ptr + NEXT_TOKENS + 1 + i, mask=i + 1 < following, other=0)
    tl.store(to_ptr, matched)
    tl.store(to_ptr + 1, following)
    tl.store(to_ptr + 2 + i, drafts, mask=i < C.DRAFTS)
    wrong = (i < C.DRAFTS) & ((drafts < 0) | (drafts >= vocab))
    tl.store(row_ptr + NEXT_TOKENS + 1 + i, 0, mask=wrong)


def edit_table(table: Tensor, edits: Tensor, values: Tensor, count: Tensor) -> None:
    """`table.edit_table`, for the first `count` [1] int32 of the edits."""
    _edit_kernel[(_EDITING,)](table, edits, values, count, WORDS=table.shape[1], BLOCK=_EDIT_BLOCK, num_warps=4)


def derive(
    table: Tensor, columns: Columns, rows: Rows, out: StepTensors, settings: SamplingBatch, page_size: int, kv_split: int, *,
    one_token: bool
) -> None:  # fmt: skip
    """`table.derive`, for tensors at multiples of 16 bytes: Triton compiles anew for each set of others.

    Args:
        out: its tensors [groups, …] are parts of larger tensors, or whole.
    """
    B, T = rows.slots.shape[0], out.tokens.shape[0]
    parts = 1 if one_token else max(1, min(cdiv(T, _BLOCK), _MOST_PARTS))
    R, Q = out.logits_indices.shape[0], out.draw_rows.shape[0]
    strides = out.block_tables.stride(0), out.slot_mapping.stride(0), out.split_starts.stride(0)
    C = _constants(columns, page_size, kv_split, one_token)
    grid = B + 1, columns.groups + parts
    _derive_kernel[grid](table, rows, out, settings, *strides, B, T, R, Q, C, num_warps=4, num_stages=1)


def commit(table: Tensor, columns: Columns, rows: Rows, seq_lens: Tensor, drawn: Tensor, result: Tensor) -> None:
    """`table.commit`, for tensors at multiples of 16 bytes."""
    B = rows.slots.shape[0]
    C = _constants(columns)
    if B:
        _commit_kernel[(B,)](table, rows, seq_lens, drawn, result, C, num_warps=1, num_stages=1)


def commit_greedy(
    table: Tensor, columns: Columns, rows: Rows, seq_lens: Tensor, row_maxima: Tensor, wanted: Tensor, result: Tensor
) -> None:
    """`commit` of the token with the largest logit for each draw, unless `wanted` [1] int32 is 0.

    Args:
        row_maxima: [Q, P] int64 with any row stride, as the LM head stores them (`RowMaxima`).
    """
    (B,), (_, tiles) = rows.slots.shape, row_maxima.shape
    block, stride = next_power_of_2(tiles), row_maxima.stride(0)
    warps = max(1, min(4, block // 256))
    operands = table, rows, seq_lens, row_maxima, wanted, result, stride, tiles
    _commit_greedy_kernel[(B,)](*operands, _constants(columns), BLOCK_S=block, num_warps=warps, num_stages=1)


def report(table: Tensor, columns: Columns, rows: Rows, out: Tensor, vocab: int) -> None:
    """`table.report`, for tensors at multiples of 16 bytes."""
    B = rows.slots.shape[0]
    if B:
        _report_kernel[(B,)](table, rows.slots, out, vocab, _constants(columns), num_warps=1, num_stages=1)
