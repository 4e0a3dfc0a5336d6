"""Runs a benchmark on a preset whose checkpoint is quantized, with random weights.

python bench/tools/stored_format.py [--set NAME=NUMBER]… FORMAT PRESET COMMAND …     FORMAT: a key of FORMATS

The command is `steps` for `steps.py`, or a benchmark of `minirt bench` and its options: `decode -b 1,8`. Only a config.json is
written, to a temporary folder.
`--set` changes a field of it, for widths that are no multiple of a tile.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# quantization_config of the official FP8 files of Qwen and DeepSeek; of compressed-tensors, with a scale for each channel and
# with 4 bits; of GPTQ and AWQ. The LM head keeps 16 bits.
FORMATS = {
    "fp8-blocks": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-channels": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
            }
        },
    },
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
            }
        },
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def write_config(parent: Path, preset: str, changed: dict[str, Any], suffix: str = "") -> Path:
    """Write the config.json of a preset with some fields changed to a new folder in `parent`. Returns the folder."""
    from minirt.models.presets import raw_configs

    raw = next((raw for name, _, raw in raw_configs() if name == preset), None)
    if raw is None:
        sys.exit(f"{preset}: no preset has this name")
    folder = parent / f"{preset}{suffix}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | changed), encoding="utf-8")
    return folder


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("preset")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    changed: dict[str, Any] = {name: int(value) for name, _, value in (field.partition("=") for field in options.set)}
    changed |= {"quantization_config": FORMATS[options.format]}
    with tempfile.TemporaryDirectory() as parent:
        folder = write_config(Path(parent), options.preset, changed, f"-{options.format}")
        if options.command == ["steps"]:
            command = [str(Path(__file__).with_name("steps.py")), str(folder)]
        else:
            command = ["-m", "minirt", "bench", *options.command, "--model", str(folder), "--random-weights", "-o", "json", "-q"]
        return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
