"""Whole steps of a model with random weights, in which `minirt tune` confirms what chains of one kernel have found.

A step is a CUDA graph of all layers. Two graphs of the same launches may differ in speed (by up to 1%,
docs/decisions/tuning.md), so each configuration is captured several times.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from minirt.bench.compare.timing import captured, replays
from minirt.device import on_device
from minirt.engine.kv_cache import PAGE_SIZE, KVCache
from minirt.engine.step_input import Batch, Chunk
from minirt.errors import InputError
from minirt.kernels.compile.tuning import Case, override_config
from minirt.modeling.model import Model

CAPTURES = 3
MOST_DECODED = 256  # tokens of a step that are one of each sequence; more are those of a prompt
CONTEXT = 128  # tokens of a decoded sequence


def chunks(tokens: int, page_size: int) -> list[Chunk]:
    """A step of so many tokens, on pages from the first on."""
    if tokens > MOST_DECODED:
        return [Chunk([0] * tokens, 0, range(-(-tokens // page_size)))]
    own = -(-CONTEXT // page_size)
    return [Chunk([0], CONTEXT - 1, range(own * i, own * i + own)) for i in range(tokens)]


class Steps:
    """Steps of a resolved model whose weights are in place, on a GPU; KV pages of 16 or 32 bits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache = KVCache(model.kv_shapes, 0, model.device, model.kv_dtype)

    @torch.inference_mode()
    def seconds(self, case: Case, configs: Sequence[Any]) -> list[float]:
        """A step's seconds with each configuration in the case's bucket, medians over CAPTURES graphs that take turns."""
        if case.tokens is None:
            raise InputError("no step of a model runs this", where="case", found=case.bucket)
        model = self._model
        with on_device(model.device):
            work = chunks(case.tokens, PAGE_SIZE)
            pages = sum(len(chunk.pages) for chunk in work)
            if pages > self._cache.num_pages:
                self._cache = KVCache(model.kv_shapes, pages, model.device, model.kv_dtype)
                for layer in self._cache.layers:  # what a GPU computes with decides how much power it draws
                    layer.k.normal_()
                    layer.v.normal_()
            batch = Batch.build(work, PAGE_SIZE).to(model.device)
            model.reserve_splits(batch.max_splits)
            times: list[list[float]] = [[] for _ in configs]
            for _ in range(CAPTURES):
                graphs = []
                for config in configs:
                    with override_config(case.tunable, case.bucket, config):
                        graphs.append(captured(partial(model, batch, self._cache), model.device))
                for own, seconds in zip(times, replays(graphs), strict=True):
                    own.append(seconds)
            return [statistics.median(own) for own in times]
