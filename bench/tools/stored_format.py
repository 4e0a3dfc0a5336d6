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


def main(words: list[str]) -> int:
    from minirt.models.presets import raw_configs

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("preset")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    presets = {name: raw for name, _, raw in raw_configs()}
    if options.preset not in presets:
        parser.error(f"{options.preset}: no preset has this name")
    raw = presets[options.preset] | {"quantization_config": FORMATS[options.format]}
    raw |= {name: int(value) for name, _, value in (field.partition("=") for field in options.set)}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, f"{options.preset}-{options.format}")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        if options.command == ["steps"]:
            command = [str(Path(__file__).with_name("steps.py")), str(folder)]
        else:
            command = ["-m", "minirt", "bench", *options.command, "--model", str(folder), "--random-weights", "-o", "json", "-q"]
        return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
