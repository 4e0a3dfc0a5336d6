"""What layers keep in the cache, as a comparison sees it: `view` gives the `CacheView` of a `LayerCache`, by its class."""

from abc import ABC, abstractmethod
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from minirt.errors import UnsupportedError
from minirt.modeling.formats import FP8
from minirt.step.batch import Batch
from minirt.step.kv_cache import CombinedCache, LayerCache, LayerKV, LayerState


class CacheView(ABC):
    """What one layer keeps. Subclasses are registered for a class of caches: `view.register(OwnCache, OwnView)`."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @abstractmethod
    def rows(self, batch: Batch) -> list[Tensor]:
        """For each of the cache's `tensors`, the rows that a step of this batch writes: int64."""

    @abstractmethod
    def clone(self, *, wide: bool = False) -> LayerCache:
        """A copy. `wide`: with values in fp64, unless they are FP8 or integers; see `copy_tensor`."""

    @abstractmethod
    def written(self, batch: Batch) -> dict[str, Tensor]:
        """What a step of this batch has written, by name, in fp64. The names "out" and "added" are taken."""

    @abstractmethod
    def read_bytes(self, batch: Batch) -> int:
        """Bytes that a step of this batch reads at least."""


@singledispatch
def view(cache: LayerCache) -> CacheView:
    """The view of what a layer keeps.

    Raises:
        UnsupportedError: none is registered for its class.
    """
    raise UnsupportedError(
        "no view of what this layer keeps, to compare it", where=f"cache of class {type(cache).__name__}",
        expected="a LayerKV, LayerState or CombinedCache",
        hint="minirt.bench.compare.caches.view.register(OwnCache, OwnView) registers a CacheView for it",
    )  # fmt: skip


@view.register(LayerKV)
class PagesView(CacheView):
    """K and V of each token."""

    cache: LayerKV

    def rows(self, batch: Batch) -> list[Tensor]:
        return [batch.slot_mapping] * len(self.cache.tensors())

    def clone(self, *, wide: bool = False) -> LayerKV:
        wide = wide and self.cache.k_scale is None
        return LayerKV._make(None if tensor is None else copy_tensor(tensor, wide) for tensor in self.cache)

    def written(self, batch: Batch) -> dict[str, Tensor]:
        """K and V of the step's tokens, each [T, Nkv, D], with their scales applied."""
        cache, slots = self.cache, batch.slot_mapping
        return {"k": _values(cache.k, cache.k_scale, slots), "v": _values(cache.v, cache.v_scale, slots)}

    def read_bytes(self, batch: Batch) -> int:
        return sum(batch.seq_lens) * sum(tensor[0].nbytes for tensor in self.cache.tensors())


@view.register(LayerState)
class StateView(CacheView):
    """A state of each sequence."""

    cache: LayerState

    def rows(self, batch: Batch) -> list[Tensor]:
        return [batch.seq_slots.long()] * len(self.cache)

    def clone(self, *, wide: bool = False) -> LayerState:
        return LayerState({name: copy_tensor(tensor, wide) for name, tensor in self.cache.items()})

    def written(self, batch: Batch) -> dict[str, Tensor]:
        """The states of the step's sequences, each [B, N]."""
        slots = batch.seq_slots.long()
        return {f"state.{name}": _rows(tensor, slots).reshape(len(slots), -1) for name, tensor in self.cache.items()}

    def read_bytes(self, batch: Batch) -> int:
        return batch.num_seqs * sum(tensor[0].nbytes for tensor in self.cache.values())


@view.register(CombinedCache)
class CombinedView(CacheView):
    """Several parts."""

    def __init__(self, cache: CombinedCache) -> None:
        super().__init__(cache)
        self.parts = [view(part) for part in cache]

    def rows(self, batch: Batch) -> list[Tensor]:
        return [rows for part in self.parts for rows in part.rows(batch)]

    def clone(self, *, wide: bool = False) -> CombinedCache:
        return CombinedCache(part.clone(wide=wide) for part in self.parts)

    def written(self, batch: Batch) -> dict[str, Tensor]:
        """What each part has written. If two parts share a name, all names begin with the part's index: "0.k", "1.k"."""
        parts = [part.written(batch) for part in self.parts]
        names = [name for part in parts for name in part]
        prefixes = [f"{i}." if len(set(names)) < len(names) else "" for i in range(len(parts))]
        return {prefix + name: rows for prefix, part in zip(prefixes, parts, strict=True) for name, rows in part.items()}

    def read_bytes(self, batch: Batch) -> int:
        return sum(part.read_bytes(batch) for part in self.parts)


def copy_tensor(tensor: Tensor, wide: bool) -> Tensor:
    """A copy. `wide`: in fp64, unless it is FP8 or has integers."""
    return tensor.double() if wide and tensor.is_floating_point() and tensor.dtype != FP8 else tensor.clone()


def _values(pages: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """What pages [P, page_size, Nkv, D] hold at `slots` [T]: [T, Nkv, D] fp64."""
    values = _rows(pages.flatten(0, 1), slots)
    return values if scales is None else values * scales.flatten(0, 1)[slots].double().unsqueeze(-1)


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows of a tensor [N, …] in fp64."""
    return indexable(tensor)[rows].view(tensor.dtype).double()


def indexable(tensor: Tensor) -> Tensor:
    """The tensor, or its codes if it is FP8: PyTorch lacks some operations for FP8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
