"""`environment`: what `minirt env` prints, and each result of a benchmark states."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

import minirt
from minirt.device import triton_installed

_SERVE = ("uvicorn", "httptools", "msgspec", "prometheus-client", "pyyaml")
_OPTIONAL = {"llguidance": "structured output needs it", **dict.fromkeys(_SERVE, "minirt serve needs it")}


def environment() -> dict[str, str]:
    """Versions, devices and memory."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "minirt": minirt.__version__}
    for package in ("torch", "triton", "safetensors", "tokenizers", "huggingface-hub", *_OPTIONAL):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed" + (f": {_OPTIONAL[package]}" if package in _OPTIONAL else "")
    if not triton_installed():
        facts["triton"] = "not installed: layers run eager, and compare and bench kernels cannot run"
    facts["cpu"] = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    facts["host memory"] = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    facts["cuda"] = torch.version.cuda or "torch is built without CUDA"
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        size, capability = f"{device.total_memory / 2**30:.1f} GiB", f"capability {device.major}.{device.minor}"
        facts[f"cuda:{i}"] = f"{device.name}, {size}, {capability}"
    names = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    return facts | {name: os.environ[name] for name in names if name in os.environ}
