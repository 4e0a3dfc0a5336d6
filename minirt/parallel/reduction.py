"""`Reduction`: what the ranks of a model exchange within a step: sums of partial products, and the logits of all ids."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

# NVLink multicast is not needed, and some hosts lack it. Connections are made at the start, not within the capture of a graph.
# `Leader` watches the ranks: PyTorch's watchdogs would end the caller's process.
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_RUNTIME_CONNECT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip

_LIMIT = timedelta(hours=1)  # that ranks wait for each other: loading takes long, and `Leader` finds out sooner if one has ended


class Reduction:
    """Sums and gathers tensors of all ranks, in one order: all ranks get the same bits, and the same ones in each run.

    The group is none of `torch.distributed`'s own, so a program may have others. A call within the capture of a CUDA graph is
    part of that graph.

    Args:
        folder: of the file through which the ranks find each other.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, folder: str) -> None:
        self._ranks, self._paused = ranks, False
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        self._group: Any
        if device.type == "cuda":
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            of_nccl = dist.ProcessGroupNCCL.Options()
            of_nccl._timeout = _LIMIT
            self._group = dist.ProcessGroupNCCL(store, rank, ranks, of_nccl)
        else:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")], _LIMIT
            self._group = dist.ProcessGroupGloo(store, rank, ranks, options)
        self._add, self._side_by_side = dist.AllreduceOptions(), AllgatherOptions()
        for how in (self._add, self._side_by_side):
            how.asyncOp = False  # on the stream of the step, not beside it
        self.least([0], device)  # connects

    def sum(self, partial: Tensor) -> Tensor:
        """Replace a tensor by its sum over all ranks."""
        if not self._paused:
            _wait(self._group.allreduce([partial], self._add))
        return partial

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """The parts [R, V / ranks] of all ranks side by side: [R, V], in `out` if it is given."""
        rows, width = part.shape
        out = part.new_empty(rows, self._ranks * width) if out is None else out
        if not self._paused:
            parts = part.new_empty(self._ranks * rows, width)
            _wait(self._group._allgather_base(parts, part.contiguous(), self._side_by_side))
            out.view(rows, self._ranks, width).copy_(parts.view(self._ranks, rows, width).transpose(0, 1))
        return out

    def least(self, values: list[int], device: torch.device) -> list[int]:
        """The least of each value over all ranks. Waits for them."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        tensor = torch.tensor(values, dtype=torch.int64, device=device)
        _wait(self._group.allreduce([tensor], options))
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
        """End the calls of this rank that wait for others. Nothing can be exchanged any more."""
        self._group.abort()


def _wait(work: "dist.Work | None") -> None:
    if work is not None:  # None: its stream is the current one
        work.wait()
