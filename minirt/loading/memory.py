"""Checks whether weights, rope tables and KV pages fit into a device's free memory, and sizes the KV cache."""

import torch

from minirt.device import free_memory, require_memory
from minirt.engine.kv_cache import PAGE_SIZE, page_bytes, state_bytes
from minirt.errors import ConfigError
from minirt.modeling.model import Model


def check_memory(
    model: Model, length: int, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype, kv_cache_memory: int | None,
    max_num_seqs: int,
) -> None:  # fmt: skip
    """Raise OutOfMemoryError if the model will not fit. Call it before anything is allocated.

    Of `kv_cache_memory`, only the bytes that `page_count` would use are counted.
    """
    # The rope tables are computed on the CPU. There, with temporaries, they take four times their size.
    tables = (16 if device.type == "cpu" else 4) * length * model.config.head_dim
    needed = model.weight_bytes(dtype) + tables + max_num_seqs * state_bytes(model.cache_specs)
    what = f"{model.num_parameters / 1e9:.2f} G weights and the rope tables of {length} positions"
    fp8 = "" if model.formats else "--fp8, "
    require_memory(needed, device, what, f"use {fp8}a smaller model, a 16-bit --dtype or a lower --max-model-len")
    if kv_cache_memory is not None:
        one = page_bytes(model.cache_specs, kv_dtype)
        pages = min(_pages_in(kv_cache_memory, one), max_num_seqs * -(-length // PAGE_SIZE)) * one
        require_memory(needed + pages, device, f"{what}, and KV pages,", "lower --kv-cache-memory")


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
    share = 0.9 if model.device.type == "cuda" else 0.25
    pages = min(int(free_memory(model.device) * share) // one, full)
    if pages < 1:
        require_memory(int(one / share), model.device, "KV pages", "use a smaller model or free memory")
    return pages


def _pages_in(memory: int, one: int) -> int:
    if type(memory) is not int or memory < max(one, 1):
        expected = f"{one} bytes (one page) or more"
        raise ConfigError("too small", where="--kv-cache-memory", expected=expected, found=memory)
    return memory // max(one, 1)
