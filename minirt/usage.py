"""How much memory this process has used."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of a GPU's allocator, or of the process (resident set)."""
    if device.type == "cuda":
        return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]  # flat, it takes 0.3 ms
    return host_peak_memory()


def host_peak_memory() -> int:
    """The process's peak resident set, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def environment() -> dict[str, str]:
    """Versions, devices and memory: what a bug report needs."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    facts = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("minirt", "torch", "triton", "safetensors", "tokenizers", "huggingface-hub"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpu"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    facts["host memory"] = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    facts["cuda"] = torch.version.cuda or "torch is built without CUDA"
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        facts[f"cuda:{i}"] = (
            f"{device.name}, {device.total_memory / 2**30:.1f} GiB, capability {device.major}.{device.minor}"
        )
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        if name in os.environ:
            facts[name] = os.environ[name]
    return facts
