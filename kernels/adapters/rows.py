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
@triton.jit(do_not_specialize=["T", "ROWS", "rank"], do_not_specialize_on_alignment=["rows_ptr"])
def _steps_kernel(adapters_ptr, rows_ptr, of_rows_ptr, steps_ptr, T, ROWS, rank, stride, BLOCK_S: tl.constexpr,
                  BLOCK_J: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The steps of linears with program_id(0) + 1 modules: of all tokens; then of `rows`, whose adapters it stores."""
    selected, modules = tl.program_id(1) == 1, tl.program_id(0) + 1
    count, stored = tl.where(selected, ROWS, T), tl.where(selected, ROWS, 0)
    place, used = tl.arange(0, BLOCK_S), tl.zeros((BLOCK_S,), tl.int32)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + i, mask=i < stored, other=0) + tl.where(selected, 0, i)
        adapter = tl.load(adapters_ptr + row, mask=i < count, other=-1)
        tl.store(of_rows_ptr + i, adapter, mask=i < stored)
        used = tl.maximum(used, tl.max((adapter[None, :] == place[:, None]).to(tl.int32), 1))
    j, width = tl.arange(0, BLOCK_J), modules * rank
    meets = ((place * width)[None, :] < ((j + 1) * COLUMNS)[:, None]) & (((place + 1) * width)[None, :] > (j * COLUMNS)[:, None])
    wanted = tl.max(tl.where(meets, used[None, :], 0), 1)
    steps_ptr += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * stride
    tl.store(steps_ptr + tl.cumsum(wanted, 0), j, mask=wanted > 0)
    tl.store(steps_ptr, tl.sum(wanted, 0))


def adapters_of(table: Tensor, column: int, seq_slots: Tensor, query_starts: Tensor, out: Tensor) -> Tensor:
    """`reference.adapters_of`, into `out` [T] int32."""
    grid = (len(seq_slots) + 1,)
    _adapters_kernel[grid](
        table, seq_slots, query_starts, out, len(seq_slots), len(out), WORDS=table.shape[1], COLUMN=column, BLOCK=_BLOCK
    )
    return out


def used_steps(adapters: Tensor, rows: Tensor, of_rows: Tensor, rank: int, places: int, steps: Tensor) -> None:
    """`reference.used_steps` of adapters [T] int32, and of those of `rows` [R] int64, for linears of 1 … P modules.

    They are stored into `steps` [2, P, 1 + most] int32, the adapters of `rows` into `of_rows` [R].
    """
    modules = steps.shape[1]
    _steps_kernel[(modules, 2)](
        adapters, rows, of_rows, steps, len(adapters), len(rows), rank, steps.stride(1),
        BLOCK_S=next_power_of_2(places), BLOCK_J=next_power_of_2(most_steps(modules, rank, places)), COLUMNS=LOW_RANK_BLOCK,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
