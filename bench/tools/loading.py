"""Measures the time and host memory to load a sharded checkpoint.

python bench/tools/loading.py write FOLDER [PRESET]     writes a checkpoint with random weights in Hugging Face's layout
python bench/tools/loading.py hub FOLDER [PRESET]       the same as a Hub cache: HF_HUB_CACHE=FOLDER HF_HUB_OFFLINE=1 minirt …
python bench/tools/loading.py measure MODEL [--fp8]     loads a model once and prints JSON
"""

import json
import sys
from pathlib import Path

import torch

SHARD_BYTES = 4 << 30


def write(folder: Path, name: str) -> None:
    """Write a preset's checkpoint with random bf16 weights to `folder`, in shards of at most 4 GiB."""
    from safetensors.torch import save_file

    from minirt import models
    from minirt.modeling.model import Model
    from minirt.models.presets import raw_configs

    raw = next(config for preset, _, config in raw_configs() if preset == name)
    model = Model(models.parse_config(raw), models.build(models.parse_config(raw)))
    shapes = {spec.name: spec.shape for parameter in model.parameters() for spec in parameter.expected()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for tensor, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if size > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][tensor] = shape
        room -= size
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {n: (torch.randn(s, device=device) * 0.02).bfloat16().cpu() for n, s in shard.items()}
        save_file(tensors, folder / file)
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


def measure(model: str, fp8: bool) -> dict:
    """Load once and generate a few tokens. Needs a new process, because memory peaks are those of the whole process."""
    from minirt import Generator, SamplingParams
    from minirt.bench.report import commit
    from minirt.device import environment, host_peak_memory, peak_memory

    cuda = torch.cuda.is_available()
    torch.zeros(1, device="cuda" if cuda else "cpu")
    before = host_peak_memory()
    quantization = "fp8" if fp8 else None
    with Generator.from_pretrained(
        model, max_model_len=4096, quantization=quantization, kv_cache_memory=1 << 28
    ) as generator:
        peak = host_peak_memory()
        resident = torch.cuda.memory_allocated() if cuda else 0
        completion = generator.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        seconds = generator.load_time_s
        return {
            "model": model, "quantization": quantization, "commit": commit(), "bytes": generator.bytes_read,
            "seconds": seconds, "gb_per_s": generator.bytes_read / seconds / 1e9, "warm_up_s": generator.warm_up_time_s,
            "host_peak_gb": peak / 1e9, "host_before_gb": before / 1e9, "weights_gb": generator.plan.weight_bytes / 1e9,
            "gpu_resident_gb": resident / 1e9, "gpu_peak_gb": peak_memory(generator.device) / 1e9 if cuda else None,
            "time_to_first_token_s": completion.time_to_first_token_s, "token_ids": completion.token_ids,
            "environment": environment(),
        }  # fmt: skip


if __name__ == "__main__":
    command, target, *rest = sys.argv[1:]
    if command == "measure":
        print(json.dumps(measure(target, "--fp8" in rest)))
    else:
        {"write": write, "hub": write_hub}[command](Path(target), rest[0] if rest else "Qwen2.5-7B")
