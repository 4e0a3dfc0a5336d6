"""Variants of a checkpoint that compute the same function from values that are hard to quantize."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_outliers(folder_in: Path, folder_out: Path, seed: int = 0, factor: float = 64.0) -> Path:
    """Write a variant of a Llama, Qwen2 or Qwen3 checkpoint to `folder_out` and return it.

    In each layer, one channel of each norm is multiplied by `factor`, and the matching columns of the linears after the norm are
    divided by it. One RoPE pair (d, d + D/2) is multiplied in every KV head and divided in every query head: in weight rows and
    biases or, with QK-norm, in the norms' weights. A factor that is a power of two changes only exponents.
    """
    config = json.loads((folder_in / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    files = {path.name: load_file(path) for path in sorted(folder_in.glob("*.safetensors"))}
    tensors = {name: tensor for content in files.values() for name, tensor in content.items()}
    draw = random.Random(seed)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        for norm, linears in (("input", ("q", "k", "v")), ("post_attention", ("gate", "up"))):
            channel, block = draw.randrange(config["hidden_size"]), "mlp" if norm == "post_attention" else "self_attn"
            tensors[f"{prefix}{norm}_layernorm.weight"][channel] *= factor
            for linear in linears:
                tensors[f"{prefix}{block}.{linear}_proj.weight"][:, channel] /= factor
        pair = draw.randrange(dim // 2)
        attention, pair = prefix + "self_attn.", torch.tensor([pair, pair + dim // 2])
        if attention + "k_norm.weight" in tensors:
            tensors[attention + "k_norm.weight"][pair] *= factor
            tensors[attention + "q_norm.weight"][pair] /= factor
            continue
        for linear, count, scale in (("q", heads, 1 / factor), ("k", kv_heads, factor)):
            rows = (torch.arange(count).unsqueeze(1) * dim + pair).flatten()
            for what in ("weight", "bias"):
                if f"{attention}{linear}_proj.{what}" in tensors:
                    tensors[f"{attention}{linear}_proj.{what}"][rows] *= scale
    return write(folder_in, folder_out, files)


def write(folder_in: Path, folder_out: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    """Save `files` (tensors by file name) to `folder_out`, with copies of all other files of `folder_in`."""
    folder_out.mkdir(parents=True, exist_ok=True)
    for path in folder_in.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, folder_out)
    for name, content in files.items():
        save_file(content, folder_out / name, metadata={"format": "pt"})
    return folder_out
