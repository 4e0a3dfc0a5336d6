"""`adapters_of` and `used_steps`: which adapters a step's rows have, found on the device, so that CUDA graphs can hold it."""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import most_steps
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.linear.product import LOW_RANK_BLOCK
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
@triton.jit(do_not_specialize=["T", "R"], do_not_specialize_on_alignment=["rows_ptr"])
def _steps_kernel(adapters_ptr, rows_ptr, of_rows_ptr, widths_ptr, steps_ptr, T, R, stride, WIDTHS: tl.constexpr,
                  BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The steps of one width; the last program copies the adapters of `rows`."""
    of = tl.program_id(0)
    if of == WIDTHS:
        for first in range(0, R, BLOCK):
            i = first + tl.arange(0, BLOCK)
            row = tl.load(rows_ptr + i, mask=i < R, other=0)
            tl.store(of_rows_ptr + i, tl.load(adapters_ptr + row, mask=i < R, other=-1), mask=i < R)
    else:
        place, used = tl.arange(0, BLOCK_S), tl.zeros((BLOCK_S,), tl.int32)
        for first in range(0, T, BLOCK):
            t = first + tl.arange(0, BLOCK)
            adapter = tl.load(adapters_ptr + t, mask=t < T, other=-1)
            used = tl.maximum(used, tl.max((adapter[None, :] == place[:, None]).to(tl.int32), 1))
        width, j = tl.load(widths_ptr + of), tl.arange(0, BLOCK_J)
        first_column, last_column = place * width, (place + 1) * width
        meets = (first_column[None, :] < (j[:, None] + 1) * COLUMNS) & (last_column[None, :] > j[:, None] * COLUMNS)
        wanted = tl.max(tl.where(meets, used[None, :], 0), 1)
        steps_ptr += of * stride
        tl.store(steps_ptr + tl.cumsum(wanted, 0), j, mask=wanted > 0)
        tl.store(steps_ptr, tl.sum(wanted, 0))


def adapters_of(table: Tensor, column: int, seq_slots: Tensor, query_starts: Tensor, out: Tensor) -> Tensor:
    """`reference.adapters_of`, into `out` [T] int32."""
    grid = (len(seq_slots) + 1,)
    _adapters_kernel[grid](
        table, seq_slots, query_starts, out, len(seq_slots), len(out), WORDS=table.shape[1], COLUMN=column, BLOCK=_BLOCK
    )
    return out


def used_steps(
    adapters: Tensor, rows: Tensor, of_rows: Tensor, widths: Tensor, most_width: int, places: int, steps: Tensor
) -> None:
    """`reference.used_steps` of adapters [T] int32 for each of `widths` [W] int32, into `steps` [W, 1 + most] int32, and the
    adapters of `rows` [R] int64, into `of_rows` [R]."""
    count = len(widths)
    _steps_kernel[(count + 1,)](
        adapters, rows, of_rows, widths, steps, len(adapters), len(rows), steps.stride(0), WIDTHS=count,
        BLOCK_S=next_power_of_2(places), BLOCK_J=next_power_of_2(most_steps(most_width, places)), COLUMNS=LOW_RANK_BLOCK,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
