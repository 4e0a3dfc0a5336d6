"""`GraphedModel`: decode steps as CUDA graphs, so that the host launches one thing a step instead of a hundred and more.

A graph is captured for a bucket of batch sizes and a bucket of context lengths, on its first use; its inputs live in static
buffers. Steps that hold a prompt run as they are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.batch import Batch
from minirt.graph import Model
from minirt.kv_cache import KVCache

MIN_CONTEXT = 1024  # tokens; the smallest context bucket, doubled up to the model's length


def batch_bucket(count: int) -> int:
    """The captured batch size for `count` sequences: 1, 2, 4, 8, then multiples of 8, then of 16, then of 32."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else 16 if count <= 128 else 32
    return -(-count // step) * step


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    host: Batch  # pinned; the engine reads a step's tokens before it fills the next, so one buffer does
    device: Batch
    logits: Tensor


class GraphedModel:
    """Wraps a model on a CUDA device; called like it.

    The logits that a decode step returns are a view of a static buffer, overwritten by the next step.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None  # of graphs and their static outputs; CUDA graphs of one stream can share it

    @torch.inference_mode()
    def __call__(self, batch: Batch, cache: KVCache) -> Tensor:
        if batch.max_query_len != 1 or batch.logits_indices.shape[0] != batch.num_tokens:
            return self._model(batch, cache)
        context = MIN_CONTEXT
        while context < batch.max_seq_len:
            context *= 2
        key = batch_bucket(batch.num_seqs), context
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key, cache)
        captured = self._graphs[key]
        captured.host.fill(batch)
        captured.device.flat.copy_(captured.host.flat, non_blocking=True)
        captured.graph.replay()
        return captured.logits[: batch.num_seqs]

    @torch.inference_mode()
    def _capture(self, size: int, context: int, cache: KVCache) -> _Captured:
        padding = Batch.padding(size, context, cache.page_size)
        host = padding.over(padding.flat.pin_memory())
        device = host.to(self._model.device)
        stream = torch.cuda.Stream(self._model.device)
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(stream):
            self._model(device, cache)  # compiles what is not compiled yet; padding touches no page
        torch.cuda.current_stream(self._model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model(device, cache)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, host, device, logits)
