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

_SPINS = 1 << 23  # loads in a wait for a silent rank before it gives up: some seconds
_PINNED = list[Tensor]()
_NEVER = tl.constexpr(0x7FFFFFFF)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mailbox(NamedTuple):
    """What the kernels of one rank get.

    Attributes:
        addresses: [N + 2] int64: of each rank's mailbox, as this rank sees it; this rank's number; and of `Peers.signs`.
        memory: [2, N, rows, width] int16, int32 or int64: this rank's places, as bits.
        calls: [rows] int32: how often each row was used.
        failed: [1] int32: not 0 after a wait has given up. Later calls of this rank load once.
        spins: after how many loads without a sign of life a wait gives up.
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
        rank: this one.
        signs: [2, N] int32 in the host's memory, pinned if there is a GPU, the same of all ranks: for each rank, not 0 after it
            was stopped or gave up; and a count that its host increases as a sign of life. If the slowest of the others' counts
            stays as it is, a wait gives up. This needs nothing of this rank's host, which a driver call may hold up.
        symmetric: what PyTorch knows of the mailboxes; it keeps the mapping of the others' memory.
    """

    ranks: int
    rank: int
    dtype: torch.dtype
    mailbox: Mailbox
    signs: Tensor
    group: Any = None
    symmetric: Any = None

    def stop(self) -> None:
        """End the waits of this rank's kernels. The host stores it: what it queued might wait for these kernels."""
        self.signs[0, self.rank] = 1

    def check(self, dtype: torch.dtype, rows: int, width: int) -> None:
        """Raise InputError unless the mailbox is for this dtype and has room for so many rows."""
        box = self.mailbox
        if self.dtype != dtype or box.rows < rows or box.width < width:
            shown = f"{box.rows} of {box.width} {self.dtype}"
            raise InputError("wrong mailbox", where="peers", expected=f"{rows} rows of {width} {dtype}", found=shown)


@triton.jit
def limits(box, RANKS: tl.constexpr):
    """After how many loads a wait gives up, and where the signs are. After a wait that gave up, others load once."""
    signs = tl.load(box.addresses + RANKS + 1).to(tl.pointer_type(tl.int32))
    return tl.where(tl.load(box.failed, volatile=True) == 0, box.spins, 1), signs


@triton.jit
def extended(spins, sign, loads, rank, signs, box, RANKS: tl.constexpr):
    """`spins` and the last sign of life: more after a new sign, 0 if this rank was stopped. It looks rarely: the host is far."""
    if loads % 1024 == 0:
        slowest = tl.where(rank == 0, _NEVER, tl.load(signs + RANKS, volatile=True))
        for other in tl.static_range(1, RANKS):
            slowest = tl.minimum(slowest, tl.where(rank == other, _NEVER, tl.load(signs + RANKS + other, volatile=True)))
        spins = tl.where(slowest != sign, loads + box.spins, spins)
        sign = slowest
        spins = tl.where(tl.load(signs + rank, volatile=True) == 0, spins, 0)
    return spins, sign


@triton.jit
def give_up(missing, rank, signs, box):
    if missing != 0:
        tl.store(box.failed, 1)
        tl.store(signs + rank, 1)


def peers_of(
    rank: int, memories: list[Tensor], dtype: torch.dtype, spins: int = _SPINS, group: Any = None, signs: Tensor | None = None
) -> Peers:
    """The peers of `rank`, from the mailboxes of all, [2, N, rows, width], at their addresses here. Its own is emptied.

    `signs`: None: no rank gives a sign of life.
    """
    memory, device = memories[rank], memories[rank].device
    memory.fill_(torch.iinfo(memory.dtype).min)
    rows, width = memory.shape[2:]
    if signs is None:
        signs = torch.zeros(2, len(memories), dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = [each.data_ptr() for each in memories] + [rank, signs.data_ptr()]
    addresses = torch.tensor(numbers, dtype=torch.int64, device=device)
    calls, failed = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, 1))
    return Peers(len(memories), rank, dtype, Mailbox(addresses, memory, calls, failed, rows, width, spins), signs, group)


def pin(signs: Tensor) -> None:
    """Let this process's GPUs read and write `Peers.signs` in memory that processes share, as long as the process lives.

    Raises:
        UnsupportedError: the driver cannot.
    """
    _PINNED.append(signs)
    code = torch.cuda.cudart().cudaHostRegister(signs.data_ptr(), signs.nbytes, 0)
    if int(code) != 0:
        what = "memory that processes share cannot be pinned"
        raise UnsupportedError(what, where="cudaHostRegister", found=f"error {int(code)}")


def connect(
    group: Any, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, signs: Tensor | None = None
) -> Peers:  # fmt: skip
    """Make the mailboxes for up to `rows` rows of up to `hidden` elements. All ranks of `group` call it together.

    `signs`: pinned.

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
    peers = replace(peers_of(rank, memories, dtype, group=group, signs=signs), symmetric=symmetric)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # no rank stores into a mailbox that is not yet empty
    return peers
