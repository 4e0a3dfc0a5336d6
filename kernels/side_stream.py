"""`SideStream`: kernels that run beside others, in CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minirt.kernels.launch import Workspace


class SideStream:
    """A branch of a CUDA graph: kernels launched within `fork` run beside those that follow it, until `join`.

    A step of few tokens has many small kernels, none of which fills the GPU. (vLLM runs shared experts so.) Outside of a capture
    `fork` and `join` do nothing: kernels run in order, since events would cost the host more than they save.

    `workspace`: of kernels within `fork`, as they must not share one with kernels beside them.
    """

    def __init__(self, device: torch.device, *, invariant: bool = False) -> None:
        self.workspace = Workspace(device, invariant=invariant)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Kernels within begin after those launched before. What they read must stay unchanged, and alive, until `join`."""
        if (stream := self._capturing()) is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Kernels launched from now on begin after those of the last `fork`."""
        if (stream := self._capturing()) is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _capturing(self) -> torch.cuda.Stream | None:
        return self._stream if self._stream is not None and torch.cuda.is_current_stream_capturing() else None
