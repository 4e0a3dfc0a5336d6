"""`Reduction`: what ranks exchange within a step: sums of partial products, and the logits of all ids, or row maxima."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from minirt.device import triton_installed
from minirt.errors import UnsupportedError
from minirt.wording import warn

# NVLink multicast is not needed, and some hosts lack it. Connections are made at the start, not within the capture of a graph.
# `Leader` watches the ranks: PyTorch's watchdogs would end the caller's process.
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_RUNTIME_CONNECT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip
_LIMIT = timedelta(hours=1)  # that ranks wait for each other: loading takes long, and `Leader` finds out sooner if one has ended
_ROWS = 4096  # of a sum that a kernel computes, over the number of ranks, whose parts it receives; NCCL adds more rows


class Reduction:
    """Sums and gathers tensors of all ranks, in one order: all ranks get the same bits, and the same ones in each run.

    A call within the capture of a CUDA graph is part of that graph.

    Attributes:
        sums: how many were asked for.

    Args:
        folder: of the file through which the ranks find each other.
        signs: of all ranks, see `Peers`, in memory that they share; a page of it.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, folder: str, signs: Tensor) -> None:
        self._signs = signs
        self.ranks, self._rank, self._device, self._paused = ranks, rank, device, False
        self._rows, self.sums = _ROWS // ranks, 0
        self._peers: Any = None  # `kernels.collectives.peers.Peers`, of sums
        self._of_maxima: Any = None  # and of row maxima
        self._aborted = False
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], _LIMIT
        self._hosts: Any = dist.ProcessGroupGloo(dist.PrefixStore("hosts", store), rank, ranks, options)
        self._group: Any = self._hosts
        if device.type == "cuda":
            if dist.is_initialized():
                what, hint = "this process has a process group already", "call torch.distributed.destroy_process_group first"
                raise UnsupportedError(what, where=f"--tensor-parallel {ranks}", expected="none", hint=hint)
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            # The default group, since symmetric memory needs a group with a name.
            dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=_LIMIT, device_id=device)
            self._group = dist.group.WORLD
        self._add, self._side_by_side = dist.AllreduceOptions(), AllgatherOptions()
        for how in (self._add, self._side_by_side):
            how.asyncOp = False  # on the stream of the step, not beside it
        self._by_group(torch.zeros(1, device=device)).item()  # connects

    def prepare(self, hidden: int, dtype: torch.dtype) -> None:
        """Reserve memory for the kernel that adds few rows of `hidden` channels. All ranks call it."""
        if self._device.type == "cuda" and triton_installed():
            from minirt.kernels.collectives.peers import connect, pin

            try:
                pin(self._signs)
                self._peers = connect(self._group, self._rows, hidden, dtype, self._device, self._signs)
                self._of_maxima = connect(self._group, self._rows, 1, torch.int64, self._device, self._signs)
            except UnsupportedError as error:
                warn(f"NCCL adds what the GPUs have computed, which is slower: {error}", RuntimeWarning)

    def sum(self, partial: Tensor) -> Tensor:
        """Replace a tensor [T, H] by its sum over all ranks."""
        self.sums += 1
        return self._by_group(partial) if (summed := self._by_kernel(partial, None, False)) is None else summed

    def add(self, x: Tensor, partial: Tensor, *, pdl: bool = False) -> Tensor:
        """x + the sum of `partial` over all ranks, both [T, H], in the place of `partial`."""
        self.sums += 1
        summed = self._by_kernel(partial, x, pdl)
        return torch.add(x, self._by_group(partial), out=partial) if summed is None else summed

    def _by_kernel(self, partial: Tensor, x: Tensor | None, pdl: bool) -> Tensor | None:
        """Also if nothing is exchanged, so that it is compiled."""
        if self._peers is None or len(partial) > self._rows or partial.dtype != self._peers.dtype:
            return None
        from minirt.kernels.collectives.all_reduce import all_reduce

        return all_reduce(partial, self._peers, x, partial, pdl=pdl, check=False)

    def _by_group(self, partial: Tensor) -> Tensor:
        if not self._paused:
            _wait(self._group.allreduce([partial], self._add))
        return partial

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The parts [R, V / ranks] of all ranks side by side: [R, V], in `out` if it is given."""
        rows, width = part.shape
        out = part.new_empty(rows, self.ranks * width) if out is None else out
        if not self._paused:
            parts = part.new_empty(self.ranks * rows, width)
            _wait(self._group._allgather_base(parts, part.contiguous(), self._side_by_side))
            out.view(rows, self.ranks, width).copy_(parts.view(self.ranks, rows, width).transpose(0, 1))
        return out

    def maxima(self, tiles: Tensor, width: int, out: Tensor) -> Tensor:
        """The largest of each rank's row maxima [R, tiles]: [R, ranks], in `out`. `width`: ids of a rank."""
        first = self._rank * width
        if self._of_maxima is None or len(tiles) > self._rows:
            return self.gather(tiles.amax(1, keepdim=True) - first, out)  # see `kernels.argmax.pack`
        from minirt.kernels.collectives.gather_maxima import gather_maxima

        return gather_maxima(tiles, self._of_maxima, first, out, check=False)

    def least(self, values: list[int]) -> list[int]:
        """The least of each value over all ranks. Waits for them, not for the device."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor(values, dtype=torch.int64)
        _wait(self._hosts.allreduce([tensor], options))
        return tensor.tolist()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is exchanged, and results are arbitrary: for layers that run only to compile their kernels."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def abort(self) -> None:
        """End the calls of this rank on a GPU that wait for others, and the connection to them."""
        if self._aborted:
            return
        self._aborted = True
        self._signs[0, self._rank] = 1  # ends the waits of kernels
        with torch.cuda.device(self._device):
            self._group.abort()
            dist.destroy_process_group()


def _wait(work: "dist.Work | None") -> None:
    if work is not None:  # None: its stream is the current one
        work.wait()
