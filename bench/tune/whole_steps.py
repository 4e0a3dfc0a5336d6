"""Whole steps of a model with random weights. `minirt tune` uses them to choose among the finalists of its microbenchmarks.

A step is a CUDA graph of all layers. Two CUDA graphs of the same launches can differ in speed by up to 1%
(docs/decisions/benchmarking.md), so each configuration is captured several times.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from minirt.bench.compare.timing import captured, replays
from minirt.device import on_device
from minirt.errors import InputError
from minirt.kernels.compile.tuning import Case, override_config
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import PAGE_SIZE, KVCache, LayerCache

CAPTURES = 3
MOST_DECODED = 256  # up to this number of tokens a step is a decode step; larger steps are one prompt
CONTEXT = 128  # tokens of each decoding sequence


def chunks(tokens: int, page_size: int, vocab_size: int = 1) -> list[Chunk]:
    """Return the chunks of a step of `tokens` tokens, on KV pages 0, 1, 2, … The tokens differ, as their experts should."""
    if tokens > MOST_DECODED:
        return [Chunk([i % vocab_size for i in range(tokens)], 0, range(-(-tokens // page_size)), slot=0)]
    pages = -(-CONTEXT // page_size)
    return [Chunk([i % vocab_size], CONTEXT - 1, range(pages * i, pages * i + pages), slot=i) for i in range(tokens)]


def _randomize(layer: LayerCache) -> None:
    """Fill what a layer keeps with random values, since power draw depends on them. Integers become 0."""
    tensors = layer.tensors()
    scaled = any(tensor.dtype == FP8 for tensor in tensors)
    for tensor in tensors:
        if tensor.dtype == FP8:  # PyTorch draws no FP8 values
            tensor.copy_(torch.randn(tensor.shape, device=tensor.device))
        elif not tensor.is_floating_point():
            tensor.zero_()
        elif scaled:
            tensor.uniform_(0.5, 1.5)  # a scale is positive
        else:
            tensor.normal_()


class Steps:
    """Times steps of a model on a GPU. The model has its weights and implementations."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache = KVCache(model.cache_specs, 0, model.device, model.kv_dtype)

    @torch.inference_mode()
    def seconds(self, case: Case, configs: Sequence[Any]) -> list[float]:
        """Return the seconds of a step with each configuration: medians over CAPTURES CUDA graphs. The graphs take turns.

        Raises:
            InputError: no step of a model runs this case.
        """
        if case.tokens is None:
            raise InputError("no step of a model runs this", where="case", found=case.bucket)
        model = self._model
        with on_device(model.device):
            work = chunks(case.tokens, PAGE_SIZE, model.config.vocab_size)
            pages = sum(len(chunk.pages) for chunk in work)
            if pages > self._cache.num_pages or len(work) > self._cache.num_slots:
                pages, slots = max(pages, self._cache.num_pages), max(len(work), self._cache.num_slots)
                self._cache = KVCache(model.cache_specs, pages, model.device, model.kv_dtype, num_slots=slots)
                for layer in self._cache.layers:
                    _randomize(layer)
            batch = Batch.build(work, PAGE_SIZE).to(model.device)
            model.reserve_splits(batch.max_splits)
            times: list[list[float]] = [[] for _ in configs]
            for _ in range(CAPTURES):
                graphs = []
                for config in configs:
                    with override_config(case.family, case.bucket, config):
                        graphs.append(captured(partial(model, batch, self._cache), model.device))
                for runs, seconds in zip(times, replays(graphs), strict=True):
                    runs.append(seconds)
            return [statistics.median(runs) for runs in times]
