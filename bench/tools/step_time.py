"""`step_seconds`: the GPU's own time for a step with one chunk, without the host's part."""

import statistics
from itertools import pairwise

import torch

from minirt import Generator
from minirt.step.batch import Batch, Chunk

_REPLAYS = 12


def step_seconds(generator: Generator, start: int, new: int) -> float:
    """The median time of a step with `new` tokens behind `start` cached ones, as a CUDA graph. Cached values are arbitrary."""
    runner = generator._engine.engine._runner
    model, cache = runner._model, runner._cache
    pages = cache.allocator.allocate(cache.pages_for(start + new))
    try:
        with torch.inference_mode():
            batch = Batch.build([Chunk(list(range(1, new + 1)), start, pages, slot=0)], cache.page_size).to(generator.device)
            for _ in range(2):
                model(batch, cache)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(batch, cache)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS)]
            for event in events:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
    finally:
        cache.allocator.release(pages)
