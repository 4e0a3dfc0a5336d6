"""`StepGraphs`: captures and replays steps as CUDA graphs, so the host launches one CUDA graph per step instead of some
200 kernels."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from minirt.engine.buckets import Bucket
from minirt.engine.kv_cache import KVCache
from minirt.engine.step_input import Batch
from minirt.modeling.model import Model


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: Batch


class StepGraphs:
    """The captured steps of one model and cache on a CUDA device. Their batches use the static buffers of the
    runner (`StepBuffers`)."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._captured: dict[Bucket, _Captured] = {}
        self._pool: Any = None  # the memory pool, which the CUDA graphs share because they run one after the other
        # The stream for captures. PyTorch's default capture stream belongs to the device that captured first.
        self._stream = torch.cuda.Stream(model.device)

    def batch(self, bucket: Bucket) -> Batch | None:
        """The batch of a bucket that has been captured, or None."""
        captured = self._captured.get(bucket)
        return None if captured is None else captured.batch

    @property
    def batches(self) -> list[Batch]:
        """The batches of all captured buckets."""
        return [captured.batch for captured in self._captured.values()]

    def capture(self, bucket: Bucket, batch: Batch) -> Batch:
        """Capture a step over a static batch. Its kernels must have been compiled. Returns `batch`."""
        from minirt.kernels.block_tables import expand_block_tables

        graph = torch.cuda.CUDAGraph()
        # Other threads may use other streams during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            expand_block_tables(batch.pages, batch.page_starts, batch.block_tables, check=False)
            self._model(batch, self._cache)
        self._pool = self._pool or graph.pool()
        self._captured[bucket] = _Captured(graph, batch)
        return batch

    def replay(self, bucket: Bucket) -> None:
        """Queue the step of a captured bucket."""
        self._captured[bucket].graph.replay()

    def replay_times(self, bucket: Bucket, repeats: int) -> list[float]:
        """Seconds of each of `repeats` replays, by CUDA events, after the same number of uncounted replays."""
        graph = self._captured[bucket].graph
        for _ in range(repeats):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
