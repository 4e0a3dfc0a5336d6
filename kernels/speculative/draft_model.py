"""What a step with a draft model needs beside its layers, on the device, with the results of `reference.py`.

CUDA graphs hold these kernels, so grids depend on the sizes of tensors only.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.argmax import LOWEST, pack, sortable, token_of
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.speculative.reference import LEAST_TEMPERATURE, DraftTokens
from minirt.kernels.step import table as words
from minirt.kernels.step.kernels import FINAL_LEN, MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT
from minirt.kernels.step.table import Columns, Rows

_PROMPT_LEN, _SEED, _TEMPERATURE = map(tl.constexpr, (words.PROMPT_LEN, words.SEED, words.TEMPERATURE))
_LEAST = tl.constexpr(LEAST_TEMPERATURE)
_BLOCK = 256  # rows or sequences that a program handles at a time
_BLOCK_V = 1024  # ids of a program


@compile_time
class _Constants(NamedTuple):
    """What the kernels compile in: the columns of the table, and sizes of the engine."""

    WORDS: int
    PAGE_TABLES: int
    MOST: int
    PAGE_SIZE: int
    KV_SPLIT: int
    BLOCK: int


@functools.cache
def _constants(columns: Columns, most: int, page_size: int, kv_split: int) -> _Constants:
    return _Constants(columns.words, columns.page_tables, most, page_size, kv_split, _BLOCK)


@prepared
@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots_ptr"])
def _first_pass_kernel(
    table_ptr, slots_ptr, tokens_ptr, positions_ptr, starts_ptr, ids_ptr, last_ptr, T, WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One sequence; the program after the last one fills the padding behind all of them."""
    b, B = tl.program_id(0), tl.num_programs(0) - 1
    first = tl.load(starts_ptr + b)
    if b == B:
        for at in range(first, T, BLOCK):
            i = at + tl.arange(0, BLOCK)
            tl.store(ids_ptr + i, tl.zeros([BLOCK], tl.int64), mask=i < T)
    else:
        end = tl.load(starts_ptr + b + 1)
        slot = tl.load(slots_ptr + b)
        row_ptr = table_ptr + slot.to(tl.int64) * WORDS
        valid = (slot >= 0) & (first < end)
        cached = tl.load(row_ptr + NUM_CACHED, mask=valid, other=0)
        following = tl.load(row_ptr + NEXT_TOKENS, mask=valid, other=0)
        start = tl.load(positions_ptr + first, mask=valid, other=0).to(tl.int32)
        stays = tl.where(valid, tl.minimum(tl.maximum(cached - start, 1), end - first), 1)
        last = tl.minimum(first + stays - 1, T - 1)
        tl.store(last_ptr + b, last.to(tl.int64))
        for at in range(first, end, BLOCK):
            i = at + tl.arange(0, BLOCK)
            token = tl.load(tokens_ptr + i + 1, mask=i < last, other=0)
            tl.store(ids_ptr + i, tl.where(i < last, token, following.to(tl.int64)), mask=i < end)  # 0 of padding


@prepared
@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["slots_ptr"])
def _race_kernel(logits_ptr, names_ptr, table_ptr, slots_ptr, best_ptr, R, number, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the best column of each block of each row: the largest logit, or the winner of the race."""
    split, b = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + b)
    row_ptr = table_ptr + slot.to(tl.int64) * WORDS
    cached = tl.load(row_ptr + NUM_CACHED, mask=slot >= 0, other=0)
    prompt = tl.load(row_ptr + _PROMPT_LEN, mask=slot >= 0, other=0)
    temperature = tl.load(row_ptr + _TEMPERATURE, mask=slot >= 0, other=0).to(tl.float32, bitcast=True)
    low = tl.load(row_ptr + _SEED, mask=slot >= 0, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(row_ptr + _SEED + 1, mask=slot >= 0, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    v = split * BLOCK + tl.arange(0, BLOCK)
    inside = v < R
    x = tl.load(logits_ptr + b.to(tl.int64) * R + v, mask=inside, other=float("-inf"))
    if temperature > _LEAST:
        name = v
        if names_ptr is not None:
            name = tl.load(names_ptr + v, mask=inside, other=0).to(tl.int32)
        zero = (name * 0).to(tl.uint32)
        step = zero + (cached + number - prompt).to(tl.uint32)
        word0, word1, word2, word3 = tl.philox(low | (high << 32), (name // 4).to(tl.uint32), step, zero, zero)
        word = tl.where(name % 4 < 2, tl.where(name % 4 == 0, word0, word1), tl.where(name % 4 == 2, word2, word3))
        u = tl.minimum(word.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
        t = 1.0 - u  # -log1p(-u) by Kahan's identity, as in `sampling.sample`
        noise = tl.where(t == 1.0, u, tl.div_rn(tl.log(t) * u, tl.where(t == 1.0, 1.0, t - 1.0)))
        x = tl.where(inside, tl.div_rn(x, temperature) - tl.log(noise), float("-inf"))
    tl.store(best_ptr + b * tl.num_programs(0) + split, tl.max(tl.where(inside, pack(sortable(x), v), LOWEST), 0))


@triton.jit
def _further(table_ptr, slots_ptr, b, inside, C):
    """Of sequences b, one or a block: (slot, whether it yields tokens, cached tokens, how many drafts it may have)."""
    slot = tl.load(slots_ptr + b, mask=inside, other=-1)
    valid = slot >= 0
    row_ptr = table_ptr + slot.to(tl.int64) * C.WORDS
    cached = tl.load(row_ptr + NUM_CACHED, mask=valid, other=0)
    following = tl.load(row_ptr + NUM_NEXT, mask=valid, other=0)
    final = tl.load(row_ptr + FINAL_LEN, mask=valid, other=0)
    left = C.PAGE_SIZE - 1 - (cached + C.PAGE_SIZE - 1) % C.PAGE_SIZE  # rows in the page of the last cached token
    room = tl.minimum(tl.minimum(final - 2 - cached, C.MOST), 1 + left)
    return slot, valid & (following > 0), cached, room


@prepared
@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["slots_ptr"])
def _draw_kernel(table_ptr, slots_ptr, best_ptr, names_ptr, out, number, SPLITS, C, BLOCK_S: tl.constexpr):
    """One sequence: its draft, and its row of the next pass."""
    b = tl.program_id(0)
    slot, live, cached, room = _further(table_ptr, slots_ptr, b, b >= 0, C)
    row_ptr = table_ptr + slot.to(tl.int64) * C.WORDS
    s = tl.arange(0, BLOCK_S)
    best = tl.max(tl.load(best_ptr + b.to(tl.int64) * SPLITS + s, mask=s < SPLITS, other=LOWEST), 0)
    draft = token_of(best).to(tl.int32)
    if names_ptr is not None:
        draft = tl.load(names_ptr + draft).to(tl.int32)
    drawn = live & (room >= number)
    tl.store(row_ptr + NEXT_TOKENS + number, draft, mask=drawn)
    count = tl.minimum(tl.maximum(room, 0), number)
    tl.store(row_ptr + NUM_NEXT, 1 + count, mask=live)
    tl.store(row_ptr + MATCHED, count, mask=live)
    goes_on = live & (room > number)
    position = cached + number - 1
    page = tl.load(row_ptr + C.PAGE_TABLES + position // C.PAGE_SIZE, mask=goes_on, other=0).to(tl.int64)
    tl.store(out.tokens + b, tl.where(goes_on, draft, 0).to(tl.int64))
    tl.store(out.positions + b, tl.where(goes_on, position, 0).to(tl.int64))
    tl.store(out.slot_mapping + b, tl.where(goes_on, page * C.PAGE_SIZE + position % C.PAGE_SIZE, -1))
    tl.store(out.seq_lens + b, tl.where(goes_on, position + 1, 0))
    splits = tl.zeros([C.BLOCK], tl.int32)  # of the sequences before, and this one
    for at in range(0, b + 1, C.BLOCK):
        i = at + tl.arange(0, C.BLOCK)
        _, others, lens, rooms = _further(table_ptr, slots_ptr, i, i <= b, C)
        splits += tl.where(others & (rooms > number), (lens + number + C.KV_SPLIT - 1) // C.KV_SPLIT, 0)
    tl.store(out.split_starts + b + 1, tl.sum(splits, 0))
    tl.store(out.split_starts, 0, mask=b == 0)


def first_pass(table: Tensor, rows: Rows, input_ids: Tensor, positions: Tensor, query_starts: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.first_pass`, in one launch."""
    B, T = rows.slots.shape[0], input_ids.shape[0]
    ids, last = torch.empty_like(input_ids), torch.empty(B, dtype=torch.int64, device=table.device)
    _first_pass_kernel[(B + 1,)](
        table, rows.slots, input_ids, positions, query_starts, ids, last, T, WORDS=table.shape[1], BLOCK=_BLOCK, num_warps=4
    )
    return ids, last


def draw(
    logits: Tensor, ids: Tensor | None, table: Tensor, columns: Columns, rows: Rows, out: DraftTokens, *, number: int, most: int,
    page_size: int, kv_split: int,
) -> None:  # fmt: skip
    """`reference.draw`, in two launches. Where two ids come close in the race, it may draw the other one."""
    B, R = logits.shape
    splits = cdiv(R, _BLOCK_V)
    if B:
        best = torch.empty(B, splits, dtype=torch.int64, device=table.device)
        _race_kernel[(splits, B)](
            logits, ids, table, rows.slots, best, R, number, WORDS=table.shape[1], BLOCK=_BLOCK_V, num_warps=4
        )
        C = _constants(columns, most, page_size, kv_split)
        _draw_kernel[(B,)](table, rows.slots, best, ids, out, number, splits, C, BLOCK_S=next_power_of_2(splits), num_warps=4)
