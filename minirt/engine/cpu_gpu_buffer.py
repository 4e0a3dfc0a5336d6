"""`CpuGpuBuffer`: values on their way from the host to a static device buffer, without waiting for either."""

import torch
from torch import Tensor


class CpuGpuBuffer:
    """An int32 buffer on a device that is filled anew for each step; on a CUDA device through pinned memory.

    There are two pinned buffers, since the copy of one may still be to come when the next step's values are written; and an event
    for each, since it may still be to come a step later, when no step between has waited for the device.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        cuda = device.type == "cuda"
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def host(self) -> Tensor:
        """The buffer to write the next step's values to; what it held before has reached the device."""
        self._host.reverse()
        if self._copied:
            self._copied.reverse()
            self._copied[0].synchronize()
        return self._host[0]

    def send(self, count: int | None = None) -> None:
        """Queue the copy of the buffer that `host` gave last, of its first `count` rows or all."""
        self.device[:count].copy_(self._host[0][:count], non_blocking=True)
        if self._copied:
            self._copied[0].record()
