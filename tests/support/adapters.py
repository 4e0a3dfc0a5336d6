"""LoRA adapters in PEFT's format, random, and models of transformers to which PEFT applies them: an independent reference."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linears(model: nn.Module, targets=ALL) -> dict[str, nn.Linear]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in found.items() if name.rpartition(".")[2] in targets}


def ranked(config: dict[str, Any], module: str) -> tuple[int, float]:
    """Rank and scaling of a module, as PEFT's `LoraModel` finds them."""

    def of(patterns, default):
        keys = [key for key in patterns if re.match(rf"(.*\.)?({key})$", module)]
        return patterns[keys[0]] if keys else default

    rank = of(config.get("rank_pattern") or {}, config["r"])
    alpha = of(config.get("alpha_pattern") or {}, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def write_adapter(folder: Path, model: nn.Module, rank: int, seed: int, targets=ALL, size: float = 1.0, **fields: Any) -> Path:
    """Write a random adapter of a transformers model. `size`: of what it adds, beside the weights' own."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets),
        "bias": "none", "init_lora_weights": True, "base_model_name_or_path": None, "lora_dropout": 0.05,
    } | fields  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in linears(model, targets).items():
        r, scaling = ranked(config, name)
        (rows, columns), prefix = module.weight.shape, f"base_model.model.{name}"
        a = torch.randn(r, columns, generator=generator) / columns**0.5
        tensors[f"{prefix}.lora_A.weight"] = a
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, r, generator=generator) * size / (scaling * r**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def applied(model: nn.Module, folder: Path | None) -> Iterator[nn.Module]:
    """The model, to which PEFT applies an adapter."""
    if folder is None:
        yield model
        return
    peft = PeftModel.from_pretrained(model, folder).to(model.dtype)
    yield peft
    peft.unload()


def logits(model: nn.Module, folder: Path | None, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad(), applied(model, folder) as adapted:
        return adapted(torch.tensor([tokens])).logits[0]


def greedy(model: nn.Module, folder: Path | None, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens."""
    for _ in range(count):
        tokens = [*tokens, int(logits(model, folder, tokens)[-1].argmax())]
    return tokens[-count:]
