"""Helpers of several test files: kernel names, and what transformers computes for a model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def triton_kernel_names() -> set[str]:
    """Names of all @triton.jit functions of minirt.kernels."""
    import pkgutil
    from importlib import import_module

    import triton

    from minirt import kernels

    names = set()
    for module in pkgutil.walk_packages(kernels.__path__, "minirt.kernels."):
        members = vars(import_module(module.name)).values()
        names |= {m.fn.__name__ for m in members if isinstance(m, triton.runtime.JITFunction)}
    return names


def kernel_names(work: Callable[[], object]) -> set[str]:
    """Names of the GPU kernels that `work` runs, without copies and memsets."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        work()
        torch.cuda.synchronize()
    names = {e.name for e in trace.events() if e.device_type == DeviceType.CUDA}
    return {n for n in names if not n.startswith(("Memcpy", "Memset"))}


def transformers_perplexity(model: Any, tokens: list[int], window: int, stride: int) -> float:
    """Perplexity by transformers' own loss. Each token but the first is scored once, in the first window that holds it."""
    total, done = 0.0, 1
    for start in range(0, len(tokens), stride):
        ids = torch.tensor([tokens[start : start + window]])
        labels = ids.clone()
        labels[0, : done - start] = -100
        with torch.no_grad():
            total += model(ids, labels=labels).loss.item() * (start + ids.shape[1] - done)
        done = start + ids.shape[1]
        if done == len(tokens):
            break
    return math.exp(total / (len(tokens) - 1))


def transformers_logits(model: Any, tokens: list[int], chunk: int = 2048) -> torch.Tensor:
    """Logits [T, V] fp32 on the CPU, computed in chunks on the model's device."""
    from transformers import DynamicCache

    cache, rows = DynamicCache(), []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            ids = torch.tensor([tokens[start : start + chunk]], device=model.device)
            rows.append(model(ids, past_key_values=cache, use_cache=True).logits[0].float().cpu())
    return torch.cat(rows)
