"""How fast does a real sharded checkpoint load, and in how much host memory?

python -P bench/loading.py write FOLDER [PRESET]    random weights on disk, in Hugging Face's form
python -P bench/loading.py measure FOLDER           one load in a fresh process, printed as JSON
"""

import json
import sys
import time
from pathlib import Path

import torch

SHARD_BYTES = 4 << 30


def write(folder: Path, name: str) -> None:
    """Write a preset's checkpoint with random bf16 weights to `folder`, in shards of at most 4 GiB."""
    from safetensors.torch import save_file

    from minirt import models
    from minirt.graph import Model
    from minirt.models.presets import raw_configs

    raw = next(config for preset, _, config in raw_configs() if preset == name)
    model = Model(models.parse_config(raw), models.build(models.parse_config(raw)))
    shapes = {name: shape for parameter in model.parameters() for name, shape in parameter.expected()}
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


def measure(folder: Path) -> dict:
    """Load `folder` once and generate a few tokens; call in a fresh process, since the peak is the process's own."""
    from minirt import Generator, SamplingParams
    from minirt.usage import environment, host_peak_memory

    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    before = host_peak_memory()
    started = time.perf_counter()
    with Generator.from_pretrained(folder, max_model_len=4096) as generator:
        loaded = time.perf_counter() - started
        peak = host_peak_memory()
        completion = generator.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        return {
            "bytes": generator.bytes_read, "seconds": loaded, "gb_per_s": generator.bytes_read / loaded / 1e9,
            "host_peak_gb": peak / 1e9, "host_before_gb": before / 1e9, "token_ids": completion.token_ids,
            "environment": environment(),
        }  # fmt: skip


if __name__ == "__main__":
    command, target = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(target, sys.argv[3] if len(sys.argv) > 3 else "Qwen2.5-7B")
    else:
        print(json.dumps(measure(target)))
