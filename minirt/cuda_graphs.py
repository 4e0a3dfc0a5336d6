"""`DecodeGraphs`: decode steps as CUDA graphs, so that the host launches one thing a step instead of a hundred and more.

One graph for each bucket of batch sizes serves every context length: what depends on it (pages, lengths, splits) lies in static
buffers, and the kernels' grids are sized by bounds.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.batch import KV_SPLIT, Batch, Chunk, Layout, write_decode
from minirt.graph import Model
from minirt.kv_cache import KVCache


def batch_bucket(count: int) -> int:
    """The captured batch size for `count` sequences: 1, 2, 4, 8, then multiples of 8, then of 16, then of 32."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else 16 if count <= 128 else 32
    return -(-count // step) * step


def max_splits(count: int, max_seq_len: int, cache: KVCache) -> int:
    """KV splits that `count` sequences of the cache can have, together."""
    return min(count * -(-max_seq_len // KV_SPLIT), cache.capacity // KV_SPLIT + count)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    layout: Layout
    logits: Tensor


class DecodeGraphs:
    """Decode steps of one model and cache on a CUDA device.

    Args:
        previous: [max_num_seqs] int64 on the device, where the sampler leaves a step's tokens for the next.
        max_seq_len: tokens of the longest sequence there can be.
    """

    def __init__(self, model: Model, cache: KVCache, previous: Tensor, max_seq_len: int) -> None:
        self._model, self._cache, self._previous, self._max_seq_len = model, cache, previous, max_seq_len
        largest = batch_bucket(previous.shape[0])
        width = cache.pages_for(max_seq_len)
        words = Layout(largest, largest, largest, width).words
        self._device = torch.zeros(words, dtype=torch.int32, device=model.device)
        # Two, since the copy of one may still be to come when the next step is written.
        self._host = [torch.zeros(words, dtype=torch.int32).pin_memory() for _ in range(2)]
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None  # of graphs and their static outputs; CUDA graphs of one stream can share it

    @property
    def buckets(self) -> list[int]:
        """Every bucket up to the largest batch, largest first, so that the smaller find their memory in its pool."""
        return sorted({batch_bucket(n + 1) for n in range(self._previous.shape[0])}, reverse=True)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [B, V] of decode chunks; a view of a static buffer, overwritten by the next step."""
        captured = self.capture(batch_bucket(len(chunks)))
        self._host.reverse()
        used = write_decode(captured.layout, self._host[0], chunks, self._cache.page_size)
        self._device[:used].copy_(self._host[0][:used], non_blocking=True)
        captured.graph.replay()
        return captured.logits[: len(chunks)]

    @torch.inference_mode()
    def capture(self, size: int) -> _Captured:
        """The graph for `size` sequences, captured if it is not there yet."""
        if size in self._graphs:
            return self._graphs[size]
        batch = self.batch(size)
        write_decode(batch.layout, self._host[0], [], self._cache.page_size)
        self._device.copy_(self._host[0])  # padding, which touches no page
        device = self._model.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._model(batch, self._cache)  # compiles what is not compiled yet
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._model(batch, self._cache)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = _Captured(graph, batch.layout, logits)
        return self._graphs[size]

    def batch(self, size: int) -> Batch:
        """The static decode batch of `size` rows over the device buffer."""
        splits = max_splits(size, self._max_seq_len, self._cache)
        batch = Batch.static(self._device, size, self._max_seq_len, splits, self._cache.page_size)
        return batch.after(self._previous)

    @torch.inference_mode()
    def replay_times(self, chunks: Sequence[Chunk], repeats: int) -> list[float]:
        """Seconds of each of `repeats` replays for these decode chunks, by CUDA events."""
        self.run(chunks)
        graph = self.capture(batch_bucket(len(chunks))).graph
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
