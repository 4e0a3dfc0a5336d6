"""`CudaGraphs`: captures and replays a device's work, so the host launches one CUDA graph per step, not some 200 kernels."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class CudaGraphs:
    """CUDA graphs by key. They share one memory pool, because they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        # The stream for captures. PyTorch's default capture stream belongs to the device that captured first.
        self._stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Capture the kernels that `work` launches. They must have been compiled, and use memory that stays."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use other streams during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Queue a captured graph."""
        self._graphs[key].replay()
