"""Block tables: the page numbers of a step's sequences, spread into one row for each sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_tensor
from minirt.kernels.prepared import prepared

_BLOCK = 256  # page numbers copied at a time


@prepared
@triton.jit
def _expand_kernel(pages_ptr, starts_ptr, tables_ptr, width, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    start = tl.load(starts_ptr + b)
    count = tl.minimum(tl.load(starts_ptr + b + 1) - start, width)
    row_ptr = tables_ptr + b.to(tl.int64) * width
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(row_ptr + at, tl.load(pages_ptr + start + at, mask=at < count), mask=at < count)


def expand_block_tables(pages: Tensor, starts: Tensor, tables: Tensor, *, check: bool = True) -> Tensor:
    """Write the page numbers of B sequences into the rows of `tables` [B, width] int32, and return `tables`.

    A step needs few of a table's columns. So the host sends the page numbers in use, one sequence after the other, and this
    kernel spreads them. Columns beyond a sequence's pages keep what they held.

    Args:
        pages: int32, at least starts[B] of them. Page numbers beyond a row's width are left out.
        starts: [B + 1] int32, where each sequence's page numbers begin.
    """
    if check:
        check_tensor("tables", tables, (None, None), torch.int32, pages.device)
        check_tensor("pages", pages, (None,), torch.int32, tables.device)
        check_tensor("starts", starts, (tables.shape[0] + 1,), torch.int32, tables.device)
    B, width = tables.shape
    if B:
        _expand_kernel[(B,)](pages, starts, tables, width, BLOCK=_BLOCK, num_warps=4)
    return tables
