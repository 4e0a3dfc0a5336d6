"""The sum of all ranks' parts and the residual, in one kernel: each rank receives the parts of all others.

A program stores its row into the other ranks' mailboxes and waits for theirs (`peers.py`). It adds the parts in the order of the
ranks, then the residual, in fp32, and rounds once, so all ranks have the same bits, for any number of rows. A row's wait depends
on no other row: the ranks' programs start in the same order, so the first unfinished row is always running on every rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments
from minirt.kernels.collectives.peers import Peers, extended, give_up, limits
from minirt.kernels.launch import launch_options, next_power_of_2
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared

CASES = [{"T": 1, "H": 16}, {"T": 3, "H": 97}, {"T": 17, "H": 576}, {"T": 2, "H": 5120}]


@prepared
@triton.jit
def _all_reduce_kernel(
    x_ptr, residual_ptr, out_ptr, box, H, RANKS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Compute one row of out [T, H]."""
    EMPTY: tl.constexpr = -(1 << (x_ptr.dtype.element_ty.primitive_bitwidth - 1))
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    rank = tl.load(box.addresses + RANKS)
    theirs = ()
    for i in tl.static_range(1, RANKS):  # each rank begins with its successor, so that no mailbox gets all rows at once
        address = tl.load(box.addresses + (rank + i) % RANKS)
        theirs += (address.to(box.memory.dtype),)  # type: ignore[assignment]
    if PDL:
        wait_for_input(False)
    calls = tl.load(box.calls + t, volatile=True)
    spins, signs = limits(box, RANKS)
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0)
    bits = x.to(box.memory.dtype.element_ty, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    place = (calls % 2) * RANKS * box.rows + t  # of rank 0
    for i in tl.static_range(RANKS - 1):
        memory = tl.multiple_of(theirs[i], 16)
        tl.store(memory + (place + rank * box.rows) * box.width + h, bits, mask=inside)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + t * H + h, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    empty, loads, sign = 1, 0, 0
    while (empty != 0) & (loads < spins):
        total = tl.zeros((BLOCK_H,), tl.float32)
        missing = tl.zeros((BLOCK_H,), tl.int32)
        for source in tl.static_range(RANKS):
            others = h < tl.where(rank == source, 0, H)
            ptrs = box.memory + (place + source * box.rows) * box.width + h
            part = tl.load(ptrs, mask=others, other=0, volatile=True)
            missing |= (part == EMPTY).to(tl.int32)
            total += tl.where(rank == source, bits, part).to(x.dtype, bitcast=True).to(tl.float32)
        empty = tl.max(missing, 0)
        loads += 1
        spins, sign = extended(spins, sign, loads, rank, signs, box, RANKS)
    for source in tl.static_range(RANKS):
        ptrs = box.memory + (place + source * box.rows) * box.width + h
        tl.store(ptrs, tl.full((BLOCK_H,), EMPTY, bits.dtype), mask=h < tl.where(rank == source, 0, H))
    if residual_ptr is not None:
        total += residual
    tl.store(out_ptr + t * H + h, total.to(x.dtype), mask=inside)
    tl.store(box.calls + t, calls + 1)
    give_up(empty, rank, signs, box)


def all_reduce(
    x: Tensor, peers: Peers, residual: Tensor | None = None, out: Tensor | None = None, *, pdl: bool = False, check: bool = True
) -> Tensor:  # fmt: skip
    """residual + the sum over the ranks of x [T, H] → [T, H]. All ranks call it with the same T, H and, if given, residual.

    `out` may be `x` or `residual`. `pdl`: as for `rms_norm`.
    """
    if check:
        check_arguments("all_reduce", x=x, residual=residual, out=out)
        peers.check(x.dtype, *x.shape)
    T, H = x.shape
    out = torch.empty_like(x) if out is None else out
    if T:
        block = next_power_of_2(H)
        options = launch_options(min(16, max(1, block // 512)), 1, pdl)
        _all_reduce_kernel[(T,)](x, residual, out, peers.mailbox, H, RANKS=peers.ranks, BLOCK_H=block, **options)
    return out
