"""`CpuGpuBuffer`: copies the values of each step from the host to a static device buffer, asynchronously."""

import numpy as np
import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to the device. PyTorch keeps the pinned memory until the copy has ended."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class CpuGpuBuffer:
    """An int32 device buffer that is refilled for each step; on a CUDA device through pinned memory.

    There are two pinned buffers, because the copy from one may still be queued when the next step's values are written. Each has
    an event, because its copy may still be queued one step later, if the host has not waited for the device since.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._turn = 0  # which of the two is written
        self._views: dict[int | None, list[Tensor]] = {}  # the first rows of all three tensors, by their number

    def host(self) -> Tensor:
        """The host buffer for the next step's values. Waits until its previous values have reached the device."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def array(self) -> np.ndarray:
        """`host` as an array."""
        self.host()
        return self._arrays[self._turn]

    def send(self, count: int | None = None) -> None:
        """Queue the copy of the last buffer returned by `host` to the device: its first `count` rows, or all rows."""
        self.copy(count)
        self.copied()

    def copy(self, count: int | None = None) -> None:
        """The first part of `send`, so that urgent work can be queued before `copied`. Keeps views for each `count`."""
        if (views := self._views.get(count)) is None:
            views = self._views[count] = [tensor[:count] for tensor in (*self._host, self.device)]
        views[2].copy_(views[self._turn], non_blocking=True)

    def copied(self) -> None:
        """The second part of `send`: from now on, `host` waits for the copy."""
        if self._copied:
            self._copied[self._turn].record()
