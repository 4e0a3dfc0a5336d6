"""`Peers`: the ranks of a process group, and the memory into which they store what others wait for.

A rank's mailbox has a place for every row of every rank, twice. A place that holds no value holds `EMPTY`, the bits of -0.0, in
each element. A rank stores a row into the mailboxes of all others. Their kernels read their place until no element is EMPTY, and
set it to EMPTY again. So the values are their flags: nothing is signalled, and no order of two stores matters.

The calls of a row use its two places in turn. A rank stores its row of call n + 2 after it has received that of call n + 1 from
all others, which they store after their kernel of call n has ended, and with it the place is EMPTY. The number of calls is
counted in each GPU's memory, so CUDA graphs may be replayed in any order, if it is the same on all ranks.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError, UnsupportedError

_SPINS = 1 << 22  # loads in a wait before it gives up: some seconds
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mailbox(NamedTuple):
    """What the kernels of one rank get.

    Attributes:
        addresses: [N + 2] int64: of each rank's mailbox, as this rank sees it; this rank's number; and of `Peers.stopped`.
        memory: [2, N, rows, width] int16, int32 or int64: this rank's places, as bits.
        calls: [rows] int32: how often each row was used.
        failed: [1] int32: not 0 after a wait has given up. Later calls of this rank load once.
        spins: after how many loads a wait gives up.
    """

    addresses: Tensor
    memory: Tensor
    calls: Tensor
    failed: Tensor
    rows: int
    width: int
    spins: int


@dataclass(frozen=True)
class Peers:
    """The ranks that add up their parts.

    Attributes:
        ranks: how many there are.
        dtype: of all parts.
        group: the process group, for the reference.
        stopped: [1] int32 in the host's memory, pinned if there is a GPU. After `stop`, no wait goes on.
        symmetric: what PyTorch knows of the mailboxes; it keeps the mapping of the others' memory.
    """

    ranks: int
    dtype: torch.dtype
    mailbox: Mailbox
    stopped: Tensor
    group: Any = None
    symmetric: Any = None

    def stop(self) -> None:
        """End the waits of this rank's kernels. The host stores it: what it queued might wait for these kernels."""
        self.stopped.fill_(1)

    def check(self, dtype: torch.dtype, rows: int, width: int) -> None:
        """Raise InputError unless the mailbox is for this dtype and has room for so many rows."""
        box = self.mailbox
        if self.dtype != dtype or box.rows < rows or box.width < width:
            shown = f"{box.rows} of {box.width} {self.dtype}"
            raise InputError("wrong mailbox", where="peers", expected=f"{rows} rows of {width} {dtype}", found=shown)


@triton.jit
def unless_stopped(stopped, loads, spins):
    """`spins`, or 0 if the host has stopped the wait. It looks rarely, since the host's memory is far away."""
    if loads % 1024 == 0:
        spins = tl.where(tl.load(stopped, volatile=True) == 0, spins, 0)
    return spins


def peers_of(rank: int, memories: list[Tensor], dtype: torch.dtype, spins: int = _SPINS, group: Any = None) -> Peers:
    """The peers of `rank`, from the mailboxes of all, [2, N, rows, width], at their addresses here. Its own is emptied."""
    memory, device = memories[rank], memories[rank].device
    memory.fill_(torch.iinfo(memory.dtype).min)
    rows, width = memory.shape[2:]
    stopped = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = [each.data_ptr() for each in memories] + [rank, stopped.data_ptr()]
    addresses = torch.tensor(numbers, dtype=torch.int64, device=device)
    calls, failed = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, 1))
    return Peers(len(memories), dtype, Mailbox(addresses, memory, calls, failed, rows, width, spins), stopped, group)


def connect(group: Any, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, spins: int = _SPINS) -> Peers:
    """Make the mailboxes for up to `rows` rows of up to `hidden` elements. All ranks of `group` call it together.

    Raises:
        UnsupportedError: a GPU cannot store into another one's memory.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks, rank, bits = dist.get_world_size(group), dist.get_rank(group), _BITS[dtype.itemsize]
    shape = (2, ranks, rows, -(-hidden // 16) * 16)
    memory = symmetric_memory.empty(shape, dtype=bits, device=device)
    try:
        symmetric = symmetric_memory.rendezvous(memory, group.group_name)
        memories = [memory if peer == rank else symmetric.get_buffer(peer, shape, bits) for peer in range(ranks)]
    except RuntimeError as error:
        raise UnsupportedError(
            f"the GPUs cannot store into each other's memory ({type(error).__name__}: {error})", where=f"rank {rank} of {ranks}",
            expected="GPUs of one host that NVLink or PCIe connects as peers", hint="`nvidia-smi topo -p2p w` lists the pairs",
        ) from error  # fmt: skip
    peers = replace(peers_of(rank, memories, dtype, spins, group), symmetric=symmetric)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank stores into a mailbox that is not yet empty
    return peers
