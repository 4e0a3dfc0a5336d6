"""Checks whether weights, rope tables and KV pages fit into a device's free memory, and sizes the KV cache."""

from dataclasses import dataclass

import torch

from minirt.device import free_memory, require_memory
from minirt.engine.kv_cache import PAGE_SIZE, page_bytes, state_bytes
from minirt.errors import ConfigError
from minirt.gpus import AbsentGPU
from minirt.modeling.model import Model
from minirt.sizes import format_size


def check_memory(
    model: Model, length: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype, kv_cache_memory: int | None,
    max_num_seqs: int,
) -> None:  # fmt: skip
    """Raise OutOfMemoryError if the model will not fit. Call it before anything is allocated.

    Of `kv_cache_memory`, only the bytes that `page_count` would use are counted.
    """
    needed = model.weight_bytes(dtype) + _other_bytes(model, length, device, max_num_seqs)
    what = f"{model.num_parameters / 1e9:.2f} G weights and the rope tables of {length} positions"
    quantize = "" if model.formats else "--quantize fp8 or int4, "
    require_memory(needed, device, what, f"use {quantize}a smaller model, a 16-bit --dtype or a lower --max-model-len")
    if kv_cache_memory is not None:
        one = page_bytes(model.cache_specs, kv_dtype)
        pages = min(_pages_in(kv_cache_memory, one), max_num_seqs * -(-length // PAGE_SIZE)) * one
        require_memory(needed + pages, device, f"{what}, and KV pages,", "lower --kv-cache-memory")


@dataclass(frozen=True)
class MemoryPlan:
    """What loading a model takes of a device's memory, in bytes, by the rules of `check_memory` and `page_count`.

    Attributes:
        weights, other: the weights; rope tables and the state of recurrent layers.
        page, pages: the size of a KV page, and how many there is room for.
        free: what is free now; of an absent GPU an estimate.
        full: the pages of as many full sequences as a step computes.
    """

    weights: int
    other: int
    page: int
    pages: int
    free: int
    full: int

    @property
    def needed(self) -> int:
        """Bytes of everything, with one page at least."""
        return self.weights + self.other + max(self.pages, 1) * self.page

    @property
    def fits(self) -> bool:
        return self.needed <= self.free and self.pages > 0

    @property
    def tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self.pages * PAGE_SIZE


def plan_memory(
    model: Model, length: int, device: torch.device | AbsentGPU, kv_cache_memory: int | None, max_num_seqs: int
) -> MemoryPlan:
    """What loading `model`, which has its dtypes but no weights, would take of `device`."""
    weights, other = model.weight_bytes(model.dtype), _other_bytes(model, length, device, max_num_seqs)
    free, page = free_memory(device), page_bytes(model.cache_specs, model.kv_dtype)
    full = max_num_seqs * -(-length // PAGE_SIZE)
    if kv_cache_memory is not None:
        pages = min(_pages_in(kv_cache_memory, page), full)
    else:
        pages = min(int(max(0, free - weights - other) * _share(device)) // page, full) if page else full
    return MemoryPlan(weights, other, page, pages, free, full)


def _other_bytes(model: Model, length: int, device: torch.device | AbsentGPU, max_num_seqs: int) -> int:
    """Bytes of rope tables and recurrent states."""
    # The rope tables are computed on the CPU. There, with temporaries, they take four times their size.
    tables = (16 if device.type == "cpu" else 4) * length * model.config.head_dim
    return tables + max_num_seqs * state_bytes(model.cache_specs)


def _share(device: torch.device | AbsentGPU) -> float:
    """The share of the free memory that KV pages take by default."""
    return 0.9 if device.type == "cuda" else 0.25


def page_count(model: Model, memory: int | None, max_num_seqs: int) -> int:
    """The number of KV pages that fit into `memory` bytes, at most the pages of `max_num_seqs` sequences of full length.

    `memory` None: a share of the free memory; see `Generator`.
    """
    one = page_bytes(model.cache_specs, model.kv_dtype)
    full = max_num_seqs * -(-model.max_model_len // PAGE_SIZE)
    if not one:
        return full
    if memory is not None:
        return min(_pages_in(memory, one), full)
    share = _share(model.device)
    pages = min(int(free_memory(model.device) * share) // one, full)
    if pages < 1:
        require_memory(int(one / share), model.device, "KV pages", "use a smaller model or free memory")
    return pages


def _pages_in(memory: int, one: int) -> int:
    if type(memory) is not int or memory < max(one, 1):
        expected = f"{format_size(max(one, 1), up=True)} (one page) or more"
        found = format_size(memory) if type(memory) is int and memory > 0 else repr(memory)
        raise ConfigError("too small", where="--kv-cache-memory", expected=expected, found=found)
    return memory // max(one, 1)
