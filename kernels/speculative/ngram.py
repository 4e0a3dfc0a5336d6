"""N-gram matching on the device, with the results of `speculative/reference.py`.

It runs after every step that has drafts, so it is one short kernel. One program has one sequence: 64 sequences are 64 SMs, and an
SM reads a sequence's tokens from L2 in less time than two more launches and their scratch memory would take. The grid depends on
the number of rows only, so CUDA graphs may hold it.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.speculative import limits, reference
from minirt.kernels.step.kernels import FINAL_LEN, MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT
from minirt.kernels.step.table import Columns, Rows

_MAX_HISTORY = tl.constexpr(limits.MAX_HISTORY)
_BLOCK = 4096  # places that a program looks at together
_NUM_WARPS = 16


@compile_time
class _Constants(NamedTuple):
    """What the kernel compiles in. BLOCK: see `_BLOCK`. BLOCK_DRAFTS: a power of two, at least MOST."""

    WORDS: int
    TOKENS: int
    HISTORY: int
    MOST: int
    SHORTEST: int
    LONGEST: int
    BLOCK: int
    BLOCK_DRAFTS: int


@functools.cache
def _constants(columns: Columns, most: int, shortest: int, longest: int) -> _Constants:
    reference.check_matching(columns, most, shortest, longest)
    sizes = columns.words, columns.tokens, columns.history
    return _Constants(*sizes, most, shortest, longest, _BLOCK, next_power_of_2(most))


@prepared
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _ngram_kernel(table_ptr, slots_ptr, C):
    """One sequence."""
    slot = tl.load(slots_ptr + tl.program_id(0))
    valid = slot >= 0
    row_ptr = table_ptr + slot.to(tl.int64) * C.WORDS
    cached = tl.load(row_ptr + NUM_CACHED, mask=valid, other=0)
    following = tl.load(row_ptr + NUM_NEXT, mask=valid, other=0)
    final = tl.load(row_ptr + FINAL_LEN, mask=valid, other=0)
    live = valid & (following != 0) & (cached < C.HISTORY)
    length = tl.where(live, cached, 0)  # number of places at which a match may end
    last_ptr = row_ptr + C.TOKENS + cached
    suffix = ()
    for j in tl.static_range(C.LONGEST):
        suffix += (tl.load(last_ptr - j, mask=live & (j <= length), other=-1),)
    best = tl.zeros([C.BLOCK], tl.int32)
    for first in range(0, length, C.BLOCK):
        back = first + tl.arange(0, C.BLOCK)  # place 0 is the token before the last
        equal, matched = back >= 0, tl.zeros([C.BLOCK], tl.int32)
        for j in tl.static_range(C.LONGEST):
            equal = equal & (back + j < length)
            token = tl.load(last_ptr - 1 - j - back, mask=equal, other=-1)  # few places get beyond the first of these loads
            equal = equal & (token == suffix[j])
            matched += equal.to(tl.int32)
        packed = matched * _MAX_HISTORY + (_MAX_HISTORY - 1 - back)  # the longest, of these the last
        best = tl.maximum(best, tl.where(matched >= C.SHORTEST, packed, 0))
    best = tl.max(best, 0)
    matched, back = best // _MAX_HISTORY, _MAX_HISTORY - 1 - best % _MAX_HISTORY
    count = tl.where(matched > 0, tl.maximum(tl.minimum(C.MOST, final - 2 - cached), 0), 0)
    i = tl.arange(0, C.BLOCK_DRAFTS)
    inside = i < count
    drafts = tl.load(last_ptr - back + i % (back + 1), mask=inside, other=0)
    tl.store(row_ptr + NEXT_TOKENS + 1 + i, drafts, mask=inside)
    tl.store(row_ptr + NUM_NEXT, 1 + count, mask=live)
    tl.store(row_ptr + MATCHED, tl.where(count > 0, matched, 0), mask=live)


def propose(table: Tensor, columns: Columns, rows: Rows, *, most: int, shortest: int, longest: int) -> None:
    """`reference.propose`, in one launch."""
    B = rows.slots.shape[0]
    C = _constants(columns, most, shortest, longest)
    if B:
        _ngram_kernel[(B,)](table, rows.slots, C, num_warps=_NUM_WARPS, num_stages=1)
