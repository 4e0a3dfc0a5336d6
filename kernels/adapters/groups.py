"""`adapters_of` and `group_rows`: the rows of a step by adapter, on the device, so that CUDA graphs can hold them."""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import Groups
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import prepared

_BLOCK = 256  # rows that a program reads at a time


@prepared
@triton.jit(do_not_specialize=["B", "T"], do_not_specialize_on_alignment=["seq_slots_ptr", "query_starts_ptr"])
def _adapters_kernel(table_ptr, seq_slots_ptr, query_starts_ptr, out_ptr, B, T, WORDS: tl.constexpr, COLUMN: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
    """The tokens of one sequence; last, the padding."""
    b = tl.program_id(0)
    slot = tl.load(seq_slots_ptr + b, mask=b < B, other=-1)
    adapter = tl.load(table_ptr + slot.to(tl.int64) * WORDS + COLUMN, mask=slot >= 0, other=-1)
    end = tl.load(query_starts_ptr + b + 1, mask=b < B, other=T)
    for first in range(tl.load(query_starts_ptr + b), end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + t, adapter, mask=(t < end) & (t < T))


@prepared
@triton.jit(do_not_specialize=["T", "most"], do_not_specialize_on_alignment=["rows_ptr"])
def _group_kernel(adapters_ptr, rows_ptr, order_ptr, tiles_ptr, T, most, PLACES: tl.constexpr, BLOCK_P: tl.constexpr,
                  TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The rows of one adapter, the first program those without one; the last one also writes the unused tiles."""
    group = tl.program_id(0)
    groups = tl.arange(0, BLOCK_P)
    counts = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK)
        row = t if rows_ptr is None else tl.load(rows_ptr + t, mask=t < T, other=0)
        of = tl.load(adapters_ptr + row, mask=t < T, other=-2) + 1
        counts += tl.sum((of[None, :] == groups[:, None]).to(tl.int32), 1)
    before = tl.sum(tl.where(groups < group, counts, 0), 0)
    count = tl.sum(tl.where(groups == group, counts, 0), 0)
    tile = tl.sum(tl.where(groups < group, (counts + TILE - 1) // TILE, 0), 0)
    number = (count + TILE - 1) // TILE
    for first in range(0, number, BLOCK):
        i = first + tl.arange(0, BLOCK)
        to_ptr = tiles_ptr + (tile + i) * 3
        tl.store(to_ptr, group - 1, mask=i < number)
        tl.store(to_ptr + 1, before + i * TILE, mask=i < number)
        tl.store(to_ptr + 2, tl.minimum(count - i * TILE, TILE), mask=i < number)
    if group == PLACES:
        for first in range(3 * (tile + number), 3 * most, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(tiles_ptr + i, 0, mask=i < 3 * most)
    if count > 0:
        for first in range(0, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            row = t if rows_ptr is None else tl.load(rows_ptr + t, mask=t < T, other=0)
            mine = (tl.load(adapters_ptr + row, mask=t < T, other=-2) + 1 == group).to(tl.int32)
            place = before + tl.cumsum(mine, 0) - mine
            tl.store(order_ptr + place, t.to(tl.int32), mask=mine > 0)
            before += tl.sum(mine, 0)


def adapters_of(table: Tensor, column: int, seq_slots: Tensor, query_starts: Tensor, out: Tensor) -> Tensor:
    """`reference.adapters_of`, into `out` [T] int32."""
    grid = (len(seq_slots) + 1,)
    _adapters_kernel[grid](
        table, seq_slots, query_starts, out, len(seq_slots), len(out), WORDS=table.shape[1], COLUMN=column, BLOCK=_BLOCK
    )
    return out


def group_rows(adapters: Tensor, places: int, out: Groups, rows: Tensor | None = None) -> Groups:
    """`reference.group_rows` into `out`, of adapters [T] int32, or of those of `rows` [R] int64."""
    _group_kernel[(places + 1,)](
        adapters, rows, out.order, out.tiles, len(out.order), len(out.tiles), PLACES=places,
        BLOCK_P=next_power_of_2(places + 1), TILE=out.block, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out
