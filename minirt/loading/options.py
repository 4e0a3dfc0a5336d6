"""What the options of a load mean: "auto" and names become dtypes and lengths, checked before anything is allocated."""

import torch

from minirt.errors import ConfigError
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import FP8


def pick_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """"auto" → the checkpoint's dtype on a GPU, float32 on a CPU, where 16-bit arithmetic is slow."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return known[config.dtype] if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise ConfigError("unknown dtype", where="--dtype", expected=f"auto, {', '.join(known)}", found=dtype)
    return known[dtype]


def pick_kv_dtype(dtype: str, model: torch.dtype) -> torch.dtype:
    """"auto" → the model's; "fp8" → e4m3 with a scale for each token and head."""
    if dtype not in ("auto", "fp8"):
        raise ConfigError("unknown dtype", where="--kv-cache-dtype", expected="auto or fp8", found=dtype)
    return FP8 if dtype == "fp8" else model


def pick_length(config: ModelConfig, asked: int | None) -> int:
    """Positions to serve: those asked for, else all that the model has."""
    if asked is None:
        return config.context_len
    if type(asked) is not int or not 1 <= asked <= config.context_len:
        expected = f"1 to {config.context_len}"
        raise ConfigError("outside the model's context", where="--max-model-len", expected=expected, found=asked)
    return asked
