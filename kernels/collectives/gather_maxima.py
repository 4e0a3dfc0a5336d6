"""The row maxima of all ranks' logits, in one kernel: a rank's LM head has the logits of consecutive ids, a share of all.

The protocol is that of `peers.py`, except that nothing is emptied: bit 31 of a packed maximum, which is always 0, says in turn to
which use of the place the value belongs. So a program may read a value as often as it likes.
"""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.argmax import LOWEST
from minirt.kernels.checks import check_arguments
from minirt.kernels.collectives.peers import Peers, extended, give_up, limits
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import prepared

CASES = [{"R": 1, "P": 1}, {"R": 3, "P": 37}, {"R": 17, "P": 1188}]


@prepared
@triton.jit
def _gather_maxima_kernel(maxima_ptr, out_ptr, box, P, first, RANKS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Compute one row of out [R, RANKS]."""
    USE: tl.constexpr = 1 << 31
    t, p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P)
    rank = tl.load(box.addresses + RANKS)
    limit, signs = limits(box, RANKS)
    calls = tl.load(box.calls + t, volatile=True)
    use = (1 - (calls // 2) % 2).to(tl.int64) << 31  # mailboxes begin with 0 in this bit
    place = (calls % 2) * RANKS * box.rows + t  # of rank 0
    # A lower half is MAX_INT - id, so a subtraction adds to the id.
    largest = (tl.max(tl.load(maxima_ptr + t * P + p, mask=p < P, other=LOWEST), 0) - first) & ~USE  # what is no maximum, too
    for i in tl.static_range(1, RANKS):
        memory = tl.load(box.addresses + (rank + i) % RANKS).to(box.memory.dtype)
        tl.store(memory + (place + rank * box.rows) * box.width, largest | use)
    missing = 0
    for source in tl.static_range(RANKS):
        ptr = box.memory + (place + source * box.rows) * box.width
        value, loads, sign, spins = tl.where(rank == source, largest | use, largest | (use ^ USE)), 0, 0, limit
        while ((value & USE) != use) & (loads < spins):
            value = tl.load(ptr, volatile=True)
            loads += 1
            spins, sign = extended(spins, sign, loads, rank, signs, box, RANKS)
        tl.store(out_ptr + t * RANKS + source, value & ~USE)
        missing = tl.where((value & USE) == use, missing, 1)
    tl.store(box.calls + t, calls + 1)
    give_up(missing, rank, signs, box)


def gather_maxima(maxima: Tensor, peers: Peers, first: int, out: Tensor | None = None, *, check: bool = True) -> Tensor:
    """Of each rank, the largest of its row maxima [R, P] int64 (`RowMaxima`) → [R, N] int64, with ids of the whole vocabulary.

    All ranks call it with the same R. `peers`: of int64, with a mailbox for R rows. `first`: the id of this rank's first logit.
    """
    if check:
        check_arguments("gather_maxima", maxima=maxima, out=out)
        peers.check(maxima.dtype, len(maxima), 1)
    R, P = maxima.shape
    out = maxima.new_empty(R, peers.ranks) if out is None else out
    if R:
        block = next_power_of_2(P)
        warps = max(1, min(4, block // 256))
        _gather_maxima_kernel[(R,)](maxima, out, peers.mailbox, P, first, RANKS=peers.ranks, BLOCK_P=block, num_warps=warps)
    return out
