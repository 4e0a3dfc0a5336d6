"""`CpuGpuBuffer`: copies the values of each step from the host to a static device buffer, asynchronously."""

import numpy as np
import torch
from torch import Tensor


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

    def host(self) -> Tensor:
        """The host buffer for the next step's values. Waits until its previous values have reached the device."""
        self._host.reverse()
        self._arrays.reverse()
        if self._copied:
            self._copied.reverse()
            self._copied[0].synchronize()
        return self._host[0]

    def array(self) -> np.ndarray:
        """`host` as an array."""
        self.host()
        return self._arrays[0]

    def send(self, count: int | None = None) -> None:
        """Queue the copy of the last buffer returned by `host` to the device: its first `count` rows, or all rows."""
        self.copy(count)
        self.copied()

    def copy(self, count: int | None = None) -> None:
        """`send` in two parts: what is more urgent than `copied` can be queued between them."""
        self.device[:count].copy_(self._host[0][:count], non_blocking=True)

    def copied(self) -> None:
        """The second part of `send`: from now on, `host` waits for the copy."""
        if self._copied:
            self._copied[0].record()
