"""Writes a model folder in one of the quantized formats in the wild. Independent of minirt: the producers' formulas."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX = 448.0  # of e4m3


@dataclass
class Written:
    """What was written: the tensors of the files, and the fp64 weights that they stand for, by tensor name."""

    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    exact: dict[str, Tensor] = field(default_factory=dict)


def _round(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() / scale.float()).clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def per_channel(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scale [N, 1], and the scale as a tensor that the values can be multiplied with."""
    scale = (weight.abs().amax(1, keepdim=True) / MAX).to(dtype)
    return _round(weight, scale), scale, scale


def per_tensor(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    scale = (weight.abs().amax() / MAX).to(dtype)
    return _round(weight, scale), scale, scale


def per_block(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    n, k = weight.shape
    scale = torch.empty(-(-n // 128), -(-k // 128), dtype=dtype)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().amax() / MAX
    wide = scale[torch.arange(n) // 128][:, torch.arange(k) // 128]
    return _round(weight, wide), scale, wide


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str], **changes: Any) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": fp8 | {"dynamic": False} | weights, "output_activations": None}
    group["input_activations"] = inputs and fp8 | inputs
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ignore,
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5, "sparsity_config": {},
        "transform_config": {}, "version": "0.12.2",
    } | changes  # fmt: skip


TOKEN = {"strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Style:
    """One way to write a checkpoint.

    Attributes:
        quantize: as `per_channel`.
        scale: the name of the scale. `shape` maps the scale to the shape in the file.
        config: quantization_config, from the list of linears that are not quantized. `hf`: hf_quant_config.json instead.
        inputs, kv: whether scales of activations, and of the KV cache, are written.
    """

    quantize: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor, Tensor]]
    config: Callable[[list[str]], dict[str, Any] | None]
    scale: str = "weight_scale"
    shape: Callable[[Tensor], Tensor] = lambda scale: scale
    dtype: torch.dtype = torch.float32
    inputs: bool = False
    kv: bool = False
    hf: Callable[[list[str]], dict[str, Any]] | None = None


def _modelopt(algorithm: str) -> Callable[[list[str]], dict[str, Any]]:
    stated = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}}
    return lambda ignore: stated | {"ignore": ignore}


def _nested(ignore: list[str]) -> dict[str, Any]:
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ignore}
    return {"producer": {"name": "modelopt", "version": "0.40.0"}, "quantization": stated}


STYLES: dict[str, Style] = {
    "compressed-tensors channel": Style(
        per_channel, lambda ignore: _compressed({"strategy": "channel"}, TOKEN, ignore), dtype=torch.bfloat16
    ),
    "compressed-tensors tensor": Style(
        per_tensor, lambda ignore: _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, ignore),
        shape=lambda scale: scale.reshape(1), inputs=True,
    ),
    "compressed-tensors block": Style(
        per_block, lambda ignore: _compressed({"strategy": "block", "block_structure": [128, 128]}, TOKEN, ignore),
        dtype=torch.float16,
    ),
    "modelopt": Style(per_tensor, lambda ignore: None, inputs=True, kv=True, hf=_nested),
    "modelopt channel": Style(per_channel, _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), shape=lambda scale: scale[:, 0]),
    "modelopt block": Style(per_block, _modelopt("fp8_pb_wo"), shape=lambda scale: scale[:, None, :, None]),
    "fp8 tensor": Style(
        per_tensor, lambda ignore: {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ignore}
    ),
    "fp8 block": Style(
        per_block,
        lambda ignore: {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ignore,
        },
        scale="weight_scale_inv", dtype=torch.bfloat16,
    ),
}  # fmt: skip


LINEARS = ("_proj.weight", "lm_head.weight")


def write(
    source: Path, folder: Path, style: str, *, skip: tuple[str, ...] = ("lm_head",), listed: bool = True, shards: int = 1,
    linears: tuple[str, ...] = LINEARS,
) -> Written:
    """Quantize the linears of the model in `source` (one safetensors file) into `folder`.

    Args:
        skip: modules that are not quantized, by the end of their names. `listed`: whether the config names them.
        shards: how many files hold the tensors.
        linears: how the names of the weights of linears end.
    """
    form, result = STYLES[style], Written(folder)
    folder.mkdir(parents=True, exist_ok=True)
    skipped = []
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith(linears) or module.endswith(skip):
            skipped += [module] if name.endswith(linears) else []
            result.tensors[name], result.exact[name] = tensor, tensor.double()
            continue
        values, scale, factor = form.quantize(tensor.float(), form.dtype)
        result.tensors |= {name: values, f"{module}.{form.scale}": form.shape(scale).contiguous()}
        result.exact[name] = values.double() * factor.double()
        if form.inputs:
            result.tensors[f"{module}.input_scale"] = torch.tensor(0.02).reshape(() if form.kv else (1,))
        if form.kv and module.endswith(("k_proj", "v_proj")):
            result.tensors[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    stated = form.config(skipped if listed else [])
    config |= {} if stated is None else {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    if form.hf:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.hf(skipped if listed else [])))
    save(result, shards)
    return result


def save(written: Written, shards: int = 1) -> None:
    """Write the tensors, and an index if there are several files."""
    names = sorted(written.tensors)
    if shards == 1:
        save_file(written.tensors, written.folder / "model.safetensors", {"format": "pt"})
        return
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({n: written.tensors[n] for n in names if files[n] == file}, written.folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in written.tensors.values())
    (written.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": files})
    )


def write_changed(write, plain, target, style, change=lambda tensors: None, **options):
    """Write the model `plain` in a style of `write`, with tensors that are changed before they are saved."""
    written = write(plain, target, style, **options)
    change(written.tensors)
    save(written, options.get("shards", 1))
    return written
