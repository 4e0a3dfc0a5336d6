"""Copies of one row of many tensors to another row, in one launch: a model's states are two to four tensors for each layer."""

import triton
import triton.language as tl

from minirt.kernels.launch import cdiv
from minirt.kernels.prepared import prepared
from minirt.kernels.step.rows import RowTable

_BLOCK = 4096  # words that a program copies


@prepared
@triton.jit(do_not_specialize=["source", "target"])
def _copy_rows_kernel(addresses_ptr, sizes_ptr, source, target, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """A block of words of one tensor."""
    tensor, first = tl.program_id(1), tl.program_id(0) * BLOCK
    size = tl.load(sizes_ptr + tensor)
    if first < size:
        word = first + tl.arange(0, BLOCK)
        address = tl.load(addresses_ptr + tensor)
        row_ptr = address.to(tl.pointer_type(tl.int32)) if WORD == 4 else address.to(tl.pointer_type(tl.int8))
        values = tl.load(row_ptr + source.to(tl.int64) * size + word, mask=word < size)
        tl.store(row_ptr + target.to(tl.int64) * size + word, values, mask=word < size)


def copy_rows(rows: RowTable, source: int, target: int) -> None:
    """`rows.copy_rows`."""
    grid = cdiv(rows.longest, _BLOCK), len(rows.tensors)
    _copy_rows_kernel[grid](rows.addresses, rows.sizes, source, target, WORD=rows.word, BLOCK=_BLOCK, num_warps=8)
