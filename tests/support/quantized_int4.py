"""Writes a model folder with 4-bit weights, as compressed-tensors, GPTQ and AWQ store them. Independent of minirt.

Words are built nibble by nibble from the producers' documented orders: compressed-tensors' pack-quantized, AutoGPTQ's
`qlinear.pack`, AutoAWQ's `from_linear` (order_map).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.quantized import LINEARS, Written, save

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the column AWQ_ORDER[i] of eight


@dataclass(frozen=True)
class Quantized:
    """A weight [N, K]: codes from 0 to 15, scales [N, groups] as stored, zero points from 0 to 15, and the exact numbers."""

    codes: np.ndarray
    scale: Tensor
    zero: np.ndarray
    exact: Tensor
    group: int


def quantize(weight: Tensor, group: int, symmetric: bool, dtype: torch.dtype) -> Quantized:
    """Round to the nearest of 16 levels in each group of columns (-1: the whole row)."""
    n, k = weight.shape
    g = k if group == -1 else group
    groups = -(-k // g)
    codes, zero, scale = np.zeros((n, k), np.int64), np.zeros((n, groups), np.int64), torch.zeros(n, groups, dtype=dtype)
    exact = torch.zeros(n, k, dtype=torch.float64)
    for i in range(groups):
        columns = slice(i * g, min((i + 1) * g, k))
        part = weight[:, columns].double()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        factor = (part.abs().amax(1) / 7.5 if symmetric else (high - low) / 15).clamp(min=1e-4).to(dtype)
        z = torch.full((n,), 8.0, dtype=torch.float64) if symmetric else (-low / factor.double()).round().clamp(0, 14)
        q = (part / factor.double()[:, None] + z[:, None]).round().clamp(0, 15)
        codes[:, columns], zero[:, i], scale[:, i] = q.long().numpy(), z.long().numpy(), factor
        exact[:, columns] = (q - z[:, None]) * factor.double()[:, None]
    return Quantized(codes, scale, zero, exact, g)


def words(nibbles: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Nibbles [..., n] → int32 words [..., ⌈n / 8⌉]: nibble i of a word is the element order[i] of eight."""
    nibbles = np.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, -nibbles.shape[-1] % 8)])
    eights = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    result = np.zeros(eights.shape[:-1], np.uint32)
    for i, element in enumerate(order):
        result |= eights[..., element].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(result.view(np.int32))


def packed(q: Quantized, symmetric: bool) -> dict[str, Tensor]:
    """compressed-tensors: columns in words, zero points along the rows."""
    tensors = {"weight_packed": words(q.codes), "weight_scale": q.scale, "weight_shape": torch.tensor(q.codes.shape)}
    return tensors if symmetric else tensors | {"weight_zero_point": words(q.zero.T).T.contiguous()}


def gptq(q: Quantized, symmetric: bool, offset: int = 1) -> dict[str, Tensor]:
    """GPTQ: transposed; the stored zero point is `offset` less."""
    index = torch.arange(q.codes.shape[1], dtype=torch.int32) // q.group
    zeros = words(q.zero.T - offset)
    return {"qweight": words(q.codes).T.contiguous(), "scales": q.scale.T.contiguous(), "qzeros": zeros, "g_idx": index}


def awq(q: Quantized, symmetric: bool) -> dict[str, Tensor]:
    """AWQ, gemm: transposed, rows of the weight in words, in AWQ's order."""
    return {"qweight": words(q.codes.T, AWQ_ORDER), "scales": q.scale.T.contiguous(), "qzeros": words(q.zero.T, AWQ_ORDER)}


def codes(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """The nibbles [..., 8n] of int32 words [..., n]: the inverse of `words`."""
    unsigned = words.contiguous().numpy().view(np.uint32)
    return np.stack([unsigned >> np.uint32(4 * order.index(j)) & 15 for j in range(8)], -1).reshape(*words.shape[:-1], -1)


def dequantized(tensors: dict[str, Tensor], zero_offset: int | None = 1) -> dict[str, Tensor]:
    """The tensors of a file with fp32 weights in place of 4-bit ones, whose groups are whole rows. GPTQ's rows may be padded.

    Args:
        zero_offset: what is added to GPTQ's zero points; None: the weights are AWQ's.
    """
    plain = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        parts = {end: tensors.get(f"{module}.{end}") for end in ("scales", "qzeros", "weight_scale", "weight_zero_point")}
        if last == "weight_packed":
            n, k = tensors[f"{module}.weight_shape"].tolist()
            zeros = parts["weight_zero_point"]
            zero = np.full((n, 1), 8) if zeros is None else codes(zeros.T).T[:n]
            weight = (codes(tensor)[:, :k].astype(np.int64) - zero) * parts["weight_scale"].float().reshape(n, 1).numpy()
        elif last == "qweight":
            n, order = parts["scales"].shape[1], AWQ_ORDER if zero_offset is None else tuple(range(8))
            zero = codes(parts["qzeros"], order)[0, :n].astype(np.int64) + (zero_offset or 0)
            q = codes(tensor, order)[:, :n].T if zero_offset is None else codes(tensor.T)
            weight = (q.astype(np.int64) - zero[:, None]) * parts["scales"].float().reshape(n, 1).numpy()
        else:
            if last not in (*parts, "weight_shape", "g_idx"):
                plain[name] = tensor
            continue
        plain[f"{module}.weight"] = torch.from_numpy(weight).float()
    return plain


@dataclass(frozen=True)
class Style:
    """One way to write a checkpoint: a producer's tensors, its config from the list of ignored modules, and the quantization."""

    tensors: Callable[[Quantized, bool], dict[str, Tensor]]
    config: Callable[[list[str]], dict[str, Any]]
    group: int = 128
    symmetric: bool = True
    dtype: torch.dtype = torch.float16


def _compressed(group: int, symmetric: bool = True) -> Callable[[list[str]], dict[str, Any]]:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel" if group == -1 else "group", "actorder": None,
        "group_size": None if group == -1 else group, "dynamic": False, "observer": "minmax", "block_structure": None,
    }  # fmt: skip
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return lambda ignore: {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group_0}, "ignore": ignore,
        "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def _gptq(group: int, sym: bool = True, **changes: Any) -> Callable[[list[str]], dict[str, Any]]:
    fields = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": sym, "lm_head": False} | changes
    return lambda ignore: fields | {"dynamic": {f"-:{name}$": {} for name in ignore if name != "lm_head"}}


def _awq(group: int) -> Callable[[list[str]], dict[str, Any]]:
    fields = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "backend": "autoawq"}
    return lambda ignore: fields | {"modules_to_not_convert": [name for name in ignore if name != "lm_head"] or None}


STYLES: dict[str, Style] = {
    "packed 128": Style(packed, _compressed(128), dtype=torch.bfloat16), "packed 32": Style(packed, _compressed(32), 32),
    "packed channel": Style(packed, _compressed(-1), -1, dtype=torch.bfloat16),
    "packed zeros": Style(packed, _compressed(64, False), 64, False), "gptq 128": Style(gptq, _gptq(128)),
    "gptq row": Style(gptq, _gptq(-1, desc_act=True), -1),
    "gptq v2": Style(lambda q, symmetric: gptq(q, symmetric, 0), _gptq(64, checkpoint_format="gptq_v2"), 64),
    "gptq zeros": Style(lambda q, symmetric: gptq(q, symmetric, 1), _gptq(128, sym=False), 128, False),
    "awq 128": Style(awq, _awq(128), 128, False), "awq 64": Style(awq, _awq(64), 64, False),
}  # fmt: skip


def write(
    source: Path, folder: Path, style: str, *, skip: tuple[str, ...] = ("lm_head",), shards: int = 1,
    linears: tuple[str, ...] = LINEARS,
) -> Written:
    """Quantize the linears of the model in `source` (one safetensors file) into `folder`, except those that end with `skip`.

    `linears`: how the names of the weights of linears end.
    """
    form, result, skipped = STYLES[style], Written(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        linear = name.endswith(linears)
        if not linear or module.endswith(skip):
            skipped += [module] if linear else []
            result.tensors[name], result.exact[name] = tensor, tensor.double()
            continue
        q = quantize(tensor, form.group, form.symmetric, form.dtype)
        result.tensors |= {f"{module}.{last}": value for last, value in form.tensors(q, form.symmetric).items()}
        result.exact[name] = q.exact
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": form.config(skipped)}
    (folder / "config.json").write_text(json.dumps(config))
    save(result, shards)
    return result
