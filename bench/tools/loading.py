"""Measures the time and memory to load a sharded checkpoint.

python bench/tools/loading.py write FOLDER [PRESET] [FORMAT] [LAYERS]   writes random weights in Hugging Face's layout
python bench/tools/loading.py hub FOLDER [PRESET]       the same as a Hub cache: HF_HUB_CACHE=FOLDER HF_HUB_OFFLINE=1 minirt …
python bench/tools/loading.py measure MODEL [OPTION …]  loads a model once and prints JSON

FORMAT is bf16 or a key of FORMATS; LAYERS is how many layers the model has. Options: `--quantize fp8` or `--quantize int4`, and
`--weights-only`, which neither warms up nor generates: memory peaks are then those of loading.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirt.modeling.formats import (
    E4M3,
    INT32,
    FormatChoice,
    LinearFormat,
    StoredFp8,
    StoredFp8Blocks,
    StoredInt4Awq,
    StoredInt4Gptq,
    StoredInt4Packed,
    TensorSpec,
)

SHARD_BYTES = 4 << 30
ITEM_BYTES = {E4M3: 1, INT32: 4, "I64": 8}  # of the dtypes in safetensors files; others have two


def _compressed_tensors(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
# Formats of checkpoints, and their quantization_config. The LM head keeps 16 bits.
FORMATS: dict[str, tuple[LinearFormat, dict[str, Any]]] = {
    "fp8": (StoredFp8(), _compressed_tensors("float-quantized", type="float", num_bits=8, strategy="channel")),
    "fp8-blocks": (StoredFp8Blocks(), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "w4a16": (
        StoredInt4Packed(128), _compressed_tensors("pack-quantized", type="int", num_bits=4, strategy="group", group_size=128),
    ),
    "gptq": (StoredInt4Gptq(128), _GPTQ),
    "awq": (StoredInt4Awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
}  # fmt: skip


@dataclass(frozen=True)
class _Everywhere(FormatChoice):
    """One format for every linear except the head."""

    format: LinearFormat

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        return None if head else self.format


def _random(spec: TensorSpec, device: str) -> Tensor:
    """A tensor that the loader accepts, with random values where the format leaves a choice."""
    last = spec.name.rpartition(".")[2]
    if spec.values is not None:
        return torch.tensor(spec.values)
    if last == "g_idx":
        return torch.arange(spec.shape[0], dtype=torch.int32) // 128
    if last == "qzeros":
        return torch.full(spec.shape, 0x77777777, dtype=torch.int32)  # those of symmetric GPTQ; AWQ takes any
    if spec.dtypes[0] == INT32:
        return torch.randint(-(1 << 31), 1 << 31, spec.shape, dtype=torch.int32, device=device).cpu()
    if spec.dtypes[0] == E4M3:
        return torch.randint(0, 127, spec.shape, dtype=torch.uint8, device=device).cpu().view(torch.float8_e4m3fn)
    if spec.positive or spec.nonzero:
        return (torch.rand(spec.shape, device=device) * 0.004 + 0.001).half().cpu()
    return (torch.randn(spec.shape, device=device) * 0.02).bfloat16().cpu()


def write(folder: Path, name: str, kind: str = "bf16", layers: int | None = None) -> None:
    """Write a preset's checkpoint with random weights to `folder`, in shards of at most 4 GiB.

    Args:
        kind: "bf16" or a key of FORMATS.
        layers: how many layers the model has; None: as the preset.
    """
    from safetensors.torch import save_file

    from minirt import models
    from minirt.modeling.model import Model
    from minirt.models.presets import raw_configs

    raw = next(config for preset, _, config in raw_configs() if preset == name)
    raw |= {} if layers is None else {"num_hidden_layers": layers}
    form, stated = FORMATS.get(kind, (None, None))
    choice = None if form is None else _Everywhere(form)
    model = Model(models.parse_config(raw), models.build(models.parse_config(raw)), choice)
    specs = {spec.name: spec for parameter in model.parameters() for spec in parameter.expected()}
    shards: list[dict[str, TensorSpec]] = [{}]
    room = SHARD_BYTES
    for tensor, spec in specs.items():
        size = ITEM_BYTES.get(spec.dtypes[0], 2) * torch.Size(spec.shape).numel()
        if size > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][tensor] = spec
        room -= size
    folder.mkdir(parents=True, exist_ok=True)
    config = raw | {"torch_dtype": "bfloat16"} | ({} if stated is None else {"quantization_config": stated})
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file({name: _random(spec, device) for name, spec in shard.items()}, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_hub(cache: Path, name: str) -> None:
    """Write the checkpoint in the layout of the Hub's cache, with the embedded model's tokenizer. It then loads by its name."""
    from minirt import models

    snapshot = "0" * 40
    hub_id = next(preset.hub_id for preset in models.presets() if preset.name == name)
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    write(repository / "snapshots" / snapshot, name)
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(snapshot)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (repository / "snapshots" / snapshot / file).write_bytes((models.embedded() / file).read_bytes())


def measure(model: str, quantization: str | None, weights_only: bool = False) -> dict[str, Any]:
    """Load once and generate a few tokens. Needs a new process, because memory peaks are those of the whole process."""
    from minirt.bench.report import commit
    from minirt.device import environment, host_peak_memory

    cuda = torch.cuda.is_available()
    torch.zeros(1, device="cuda" if cuda else "cpu")
    before = host_peak_memory()
    found = (_load if weights_only else _generate)(model, quantization)
    return {
        "model": Path(model).name if weights_only else model, "quantization": quantization, "commit": commit(),
        "gb_per_s": found["bytes"] / found["seconds"] / 1e9, "host_before_gb": before / 1e9, **found,
        "environment": environment(),
    }  # fmt: skip


def _load(model: str, quantization: str | None) -> dict[str, Any]:
    """Load the weights, and nothing else. The time includes looking at the headers and allocating."""
    import time

    from minirt.device import host_peak_memory, peak_memory
    from minirt.loading.load import load
    from minirt.loading.options import LoadOptions

    options = LoadOptions(model=model, max_model_len=4096, quantization=quantization, kv_cache_memory=1 << 28, warmup=False)
    started = time.perf_counter()
    loaded = load(options)
    seconds = time.perf_counter() - started
    device, weights = loaded.model.device, loaded.model.plan.weight_bytes
    peak = peak_memory(device) if device.type == "cuda" else None
    return {
        "checkpoint": loaded.model.plan.checkpoint, "bytes": loaded.bytes_read, "seconds": seconds, "weights_gb": weights / 1e9,
        "host_peak_gb": host_peak_memory() / 1e9, "gpu_peak_gb": peak and peak / 1e9,
        "gpu_peak_per_weights": peak and peak / weights,
    }  # fmt: skip


def _generate(model: str, quantization: str | None) -> dict[str, Any]:
    from minirt import Generator, SamplingParams
    from minirt.device import host_peak_memory, peak_memory

    cuda = torch.cuda.is_available()
    with Generator.from_pretrained(
        model, max_model_len=4096, quantization=quantization, kv_cache_memory=1 << 28
    ) as generator:
        peak = host_peak_memory()
        resident = torch.cuda.memory_allocated() if cuda else 0
        completion = generator.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        return {
            "bytes": generator.bytes_read, "seconds": generator.load_time_s, "warm_up_s": generator.warm_up_time_s,
            "host_peak_gb": peak / 1e9, "weights_gb": generator.plan.weight_bytes / 1e9,
            "gpu_resident_gb": resident / 1e9, "gpu_peak_gb": peak_memory(generator.device) / 1e9 if cuda else None,
            "time_to_first_token_s": completion.time_to_first_token_s, "token_ids": completion.token_ids,
        }  # fmt: skip


def main(command: str, target: str, *rest: str) -> None:
    if command == "measure":
        quantization = rest[rest.index("--quantize") + 1] if "--quantize" in rest else "fp8" if "--fp8" in rest else None
        print(json.dumps(measure(target, quantization, "--weights-only" in rest)))
    elif command == "hub":
        write_hub(Path(target), rest[0] if rest else "Qwen2.5-7B")
    else:
        name, kind, layers = (*rest, *("Qwen2.5-7B", "bf16", "")[len(rest) :])
        write(Path(target), name, kind, int(layers) if layers else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
