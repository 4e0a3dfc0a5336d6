"""Measures the time and memory to load a sharded checkpoint.

python bench/tools/loading.py write FOLDER [PRESET] [FORMAT] [LAYERS]   writes random weights in Hugging Face's layout
python bench/tools/loading.py hub FOLDER [PRESET]       the same as a Hub cache: HF_HUB_CACHE=FOLDER HF_HUB_OFFLINE=1 minirt …
python bench/tools/loading.py measure MODEL [OPTION …]  loads a model once and prints JSON

FORMAT is bf16, bf16-fused (all experts of a layer in one tensor) or one of stored_format.py, LAYERS the number of layers.
Options of `measure`: `--quantize fp8` or `--quantize int4`; with `--weights-only` there is no warm-up and no text, so the
memory peaks do not include them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirt.bench.tools.stored_format import FORMATS
from minirt.modeling.formats import E4M3, INT32, TensorSpec

SHARD_BYTES = 4 << 30
ITEM_BYTES = {E4M3: 1, INT32: 4, "I64": 8}  # of the dtypes in safetensors files; others have two


def _random(spec: TensorSpec, device: str) -> Tensor:
    """A tensor that the loader accepts, with random values where the format leaves a choice."""
    last = spec.name.rpartition(".")[2]
    if spec.values is not None:
        return torch.tensor(spec.values)
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
        kind: "bf16", "bf16-fused" or a key of `stored_format.FORMATS`.
        layers: how many layers the model has; None: as the preset.
    """
    from safetensors.torch import save_file

    from minirt import models
    from minirt.loading.stored_formats import stored_formats
    from minirt.modeling.config import Fields
    from minirt.modeling.model import Model
    from minirt.modeling.quantization_config import read_quantization
    from minirt.models.presets import raw_configs

    raw = next(config for preset, _, config in raw_configs() if preset == name) | {"torch_dtype": "bfloat16"}
    raw |= {} if layers is None else {"num_hidden_layers": layers}
    raw |= {} if kind.startswith("bf16") else {"quantization_config": FORMATS[kind]}
    config = models.parse_config(raw)
    parts = models.build(config)
    model = Model(config, parts, stored_formats(parts, None, read_quantization(Fields(raw, "config.json"))))
    for parameter in model.parameters():
        if kind == "bf16-fused" and parameter.fused_tensor is not None:
            parameter.fuse()
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
    (folder / "config.json").write_text(json.dumps(raw))
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

    options = LoadOptions(model=model, max_model_len=512, quantization=quantization, kv_cache_memory=1 << 28, warmup=False)
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
        model, max_model_len=512, quantization=quantization, kv_cache_memory=1 << 28
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
